"""A call of a program that is not over: what it takes and makes, and how far it is."""

from __future__ import annotations

from typing import Any

from timelyml.ml.controller.cuts import Cut, RegisteredProgram
from timelyml.ml.controller.work import Work
from timelyml.ml.hosts import Run
from timelyml.ml.programs import LoweredProgram
from timelyml.ml.scheduling import Dispatch
from timelyml.ml.store import Entry
from timelyml.runtime.failure import placed_error


class ProgramRecord:
    """A call of a program that is not over.

    Attributes:
        owner: Who knows what it is made of.
        cut: Its blocks.
        args: What it takes, in the order of its inputs.
        copied: Inputs whose memory it would take, but others use them.
        ordered: Its blocks that are ordered.
        reports: How many hosts have said of a block that it is over.
        errors: Pickled, by the gang that failed.
        run: What hosts are told of it, once it begins.
        told: Hosts that know of it.
        parent: The flow that it is part of, if it is.
        where: In which run of which loop, and the like; for errors.
        matrix: If it moves rows, how many go from which shard to which.
    """

    __slots__ = (
        "args",
        "before",
        "client",
        "copied",
        "cut",
        "dependants",
        "device_ns",
        "error",
        "errors",
        "is_begun",
        "is_claimed",
        "known",
        "lowered",
        "matrix",
        "num_moves",
        "num_waits",
        "ordered",
        "outs",
        "owner",
        "parent",
        "program",
        "reports",
        "results",
        "run",
        "since_s",
        "told",
        "uses",
        "values",
        "where",
    )

    def __init__(
        self,
        program: str,
        client: int,
        owner: Any,
        known: RegisteredProgram,
        lowered: LoweredProgram,
        *,
        cut: Cut,
        args: list[Entry],
        outs: tuple[int, ...],
        copied: tuple[int, ...],
    ) -> None:
        self.program = program
        self.client = client
        self.owner = owner
        self.known = known
        self.lowered = lowered
        self.cut = cut
        self.args = args
        self.outs = outs
        self.copied = copied
        self.uses = list({id(each): each for each in args}.values())
        self.results: list[Entry] = []
        self.before: list[Work] = []
        self.is_claimed = False
        self.is_begun = False
        self.num_waits = 0
        self.num_moves = 0
        self.since_s = 0.0
        self.device_ns = 0
        self.dependants: list[tuple[str, int, int]] = []
        self.error: bytes | None = None
        self.values: dict[int, Any] = {}
        self.ordered: set[int] = set()
        self.reports: dict[int, int] = {}
        self.errors: dict[int, bytes] = {}
        self.run: Run | None = None
        self.told: set[int] = set()
        self.parent: Any = None
        self.where = ""
        self.matrix: Any = None

    @property
    def final_part(self) -> None:
        """None: its blocks are no work of their own."""

    @property
    def has_parts(self) -> bool:
        """No: its blocks are no work of their own."""
        return False

    @property
    def slice(self) -> str:
        """The slice where it is, or a name of its own if it is on several."""
        slices = self.slices
        return slices[0] if len(slices) == 1 else f"program {self.program}"

    @property
    def slices(self) -> tuple[str, ...]:
        """All slices that it uses."""
        return self.known.slices

    @property
    def is_placed(self) -> tuple[bool, ...]:
        """All arguments are taken where they lie."""
        return (True,) * len(self.args)

    @property
    def exported(self) -> list[Entry]:
        """Arguments that are sent elsewhere."""
        return [self.args[number] for number in self.cut.sent]

    @property
    def given(self) -> tuple[int, ...]:
        """Buffers that its client gives away to it."""
        return tuple([self.args[each].number for each in self.known.given])

    @property
    def taken(self) -> tuple[int, ...]:
        """Buffers whose memory it takes where they are."""
        return tuple(
            [
                self.args[number].number
                for number in self.known.destroyed
                if number not in self.copied and number not in self.cut.sent
            ]
        )

    @property
    def is_ordered(self) -> bool:
        """Whether all of its blocks are."""
        return len(self.ordered) == len(self.cut.blocks)

    @property
    def is_in_turn(self) -> bool:
        """Whether none of its blocks waits until another is over."""
        is_sequential = self.known.dispatch is Dispatch.SEQUENTIAL
        return not is_sequential or len(self.cut.blocks) == 1

    @property
    def has_run(self) -> bool:
        """Whether hosts keep what it makes: all but where they drop what is left."""
        return self.is_ordered or bool(self.ordered and self.is_apart)

    @property
    def is_apart(self) -> bool:
        """Yes: what of it can run does."""
        return True

    def placed(self, error: bytes) -> bytes:
        """Return the error of a gang with where that is in a flow."""
        return placed_error(error, self.where) if self.where else error
