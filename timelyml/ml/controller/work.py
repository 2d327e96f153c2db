"""Work: what calls of computations and of programs have in common, and calls themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from timelyml.ml.functions import Computation
from timelyml.ml.hosts import Done
from timelyml.ml.scheduling import Grant, SpreadGraph
from timelyml.ml.store import Claim, Entry


class Work(Protocol):
    """A call, of a computation or of a program, that is not over.

    Attributes:
        owner: Who knows what it is made of: an `Owner`.
        slice: Where it is, or a name of its own if that is on several slices.
        uses: Every buffer that it keeps alive.
        results: What it makes.
        exported: Those that are sent elsewhere for it.
        before: Work that has to be ordered before it, until it begins.
        is_claimed: Whether its memory was asked for.
        is_begun: Whether it has its memory, and the schedulers know it.
        num_waits: Work that has to be ordered before it can be.
        num_moves: How many slices had moved when it was last placed.
        since_s: When it was called for.
        device_ns: Device time that it took so far.
        dependants: Gangs that may be ordered once this is, and their slot for it.
        error: Pickled, why it, or some of it, did not run.
        values: Small results.
        parent: The work that it is part of, if it is.
        final_part: The part with which it ends, if it has parts and this one has begun.
    """

    results: list[Entry]
    before: list[Work]
    is_claimed: bool
    is_begun: bool
    num_waits: int
    num_moves: int
    since_s: float
    device_ns: int
    error: bytes | None

    @property
    def parent(self) -> Any:
        """What it is part of."""

    @property
    def final_part(self) -> Any:
        """The part with which it ends."""

    @property
    def has_parts(self) -> bool:
        """Whether it does nothing itself."""

    @property
    def program(self) -> str:
        """Its name in the schedulers."""

    @property
    def client(self) -> int:
        """Whose it is."""

    @property
    def owner(self) -> Any:
        """Who knows what it is made of."""

    @property
    def slice(self) -> str:
        """Where it is."""

    @property
    def slices(self) -> tuple[str, ...]:
        """All slices that it uses."""

    @property
    def args(self) -> list[Entry]:
        """What it takes."""

    @property
    def is_placed(self) -> tuple[bool, ...]:
        """Of each argument, whether it is taken where it lies."""

    @property
    def outs(self) -> tuple[int, ...]:
        """Numbers of what it makes."""

    @property
    def uses(self) -> list[Entry]:
        """Every buffer that it keeps alive."""

    @property
    def exported(self) -> list[Entry]:
        """Arguments that are sent elsewhere for it."""

    @property
    def given(self) -> tuple[int, ...]:
        """Buffers that its client gives away to it."""

    @property
    def taken(self) -> tuple[int, ...]:
        """Buffers whose memory it takes where they are."""

    @property
    def dependants(self) -> list[tuple[str, int, int]]:
        """Gangs that may be ordered once it is, and their slot for it."""

    @property
    def values(self) -> dict[int, Any]:
        """Small results."""

    @property
    def is_ordered(self) -> bool:
        """Whether all of it has its place in the order."""

    @property
    def is_in_turn(self) -> bool:
        """Whether all of it is ordered as it comes, if it waits for no other work."""

    @property
    def has_run(self) -> bool:
        """Whether what it was to make is there, be it of any use or not."""

    @property
    def is_apart(self) -> bool:
        """Whether it goes on where it can when some of it cannot."""


class Owner(Protocol):
    """Who knows what work is made of."""

    def place_again(self, work: Any) -> None:
        """Adapt it to slices that have moved; nothing of it has begun."""

    def codes(self, work: Any) -> Iterable[tuple[str, str]]:
        """Return what has to be compiled before its needs are known, and where."""

    def refusal(self, work: Any) -> bytes | None:
        """Return why it cannot begin, if so."""

    def claim(self, work: Any) -> Claim:
        """Return the memory that it takes."""

    def prepare(self, work: Any) -> None:
        """Let hosts prepare it."""

    def graph(
        self, work: Any, num_waits: int
    ) -> tuple[SpreadGraph, Sequence[tuple[int, int]]]:
        """Return its gangs, and for each thing waited for the inputs that open then."""

    def limit(self, work: Any, gang: int) -> tuple[float, str] | None:
        """Return how long a gang may run, if it states that, and what it is."""

    def is_alone(self, work: Any, gang: int) -> bool:
        """Whether all else that is ordered of it is over."""

    def described(self, work: Any, gang: int) -> tuple[str, str, tuple[int, ...]]:
        """Return what a gang is called, where it runs, and the buffers it makes."""

    def overdue(self, work: Any, gang: int, error: bytes) -> None:
        """Hear that a gang runs for too long."""

    def granted(self, work: Any, grant: Grant) -> None:
        """Hear that a gang is ordered, before its hosts do."""

    def reported(self, work: Any, gang: int, done: Done) -> bool:
        """Hear from a host that a gang is over; return whether the rest must not run."""

    def output_errors(self, work: Any) -> Mapping[int, bytes]:
        """Return the errors of those outputs that will never be."""

    def ended(self, work: Any) -> None:
        """Drop what is kept for it here."""

    def forget(self, work: Any) -> None:
        """Have hosts drop what of it was prepared and will not be launched."""


class CallRecord:
    """A call of a computation that is not over.

    Attributes:
        owner: Who knows what it is made of.
        args: What it takes, in the order of the computation's arguments.
        copied: Positions of arguments whose memory it would take, but others use them.
        uses: Every buffer that it keeps alive.
        exported: Arguments that are moved.
        results: What it makes.
        before: Calls that have to be ordered before it, until it begins.
        is_claimed: Whether its memory was asked for.
        is_begun: Whether it has its memory, and the scheduler knows it.
        is_ordered: Whether it has its place in the order of the island.
        num_waits: Calls that have to be ordered before it can be.
        device_ns: Device time that it took.
        dependants: Gangs that may be ordered once this is, and their slot for it.
        error: Pickled, what the first host that failed reported.
        values: Small results.
        order: Number of the order of its client on the slice that it is part of, or 0.
    """

    __slots__ = (
        "args",
        "before",
        "client",
        "computation",
        "copied",
        "dependants",
        "device_ns",
        "error",
        "exported",
        "is_begun",
        "is_claimed",
        "is_ordered",
        "is_placed",
        "num_moves",
        "num_waits",
        "order",
        "outs",
        "owner",
        "program",
        "results",
        "since_s",
        "slice",
        "uses",
        "values",
    )

    def __init__(
        self,
        program: str,
        client: int,
        owner: Any,
        computation: Computation,
        args: list[Entry],
        *,
        where: str,
        outs: tuple[int, ...],
        is_placed: tuple[bool, ...],
        copied: tuple[int, ...],
        order: int,
    ) -> None:
        self.program = program
        self.client = client
        self.owner = owner
        self.computation = computation
        self.args = args
        self.slice = where
        self.outs = outs
        self.copied = copied
        self.order = order
        self.uses = list({id(each): each for each in args}.values())
        self.is_placed = is_placed
        self.exported: list[Entry] = []
        self.place(is_placed)
        self.results: list[Entry] = []
        self.before: list[Work] = []
        self.is_claimed = False
        self.is_begun = False
        self.is_ordered = False
        self.num_waits = 0
        self.num_moves = 0
        self.since_s = 0.0
        self.device_ns = 0
        self.dependants: list[tuple[str, int, int]] = []
        self.error: bytes | None = None
        self.values: dict[int, Any] = {}

    def place(self, is_placed: tuple[bool, ...]) -> None:
        """Say of each argument whether it lies where it is wanted; others move."""
        self.is_placed = is_placed
        self.exported = []
        if False in is_placed:
            pairs = zip(self.args, is_placed, strict=True)
            self.exported = [entry for entry, is_there in pairs if not is_there]

    @property
    def slices(self) -> tuple[str, ...]:
        """The slice where it is."""
        return (self.slice,)

    @property
    def given(self) -> tuple[int, ...]:
        """Buffers that are donated."""
        donated = self.computation.donated
        return tuple([self.args[each].number for each in donated])

    @property
    def parent(self) -> None:
        """None: it stands for itself."""

    @property
    def final_part(self) -> None:
        """None: it has no parts."""

    @property
    def has_parts(self) -> bool:
        """No: it is one launch."""
        return False

    @property
    def is_in_turn(self) -> bool:
        """Yes: it is one launch."""
        return True

    @property
    def has_run(self) -> bool:
        """Whether it was ordered, and so launched."""
        return self.is_ordered

    @property
    def is_apart(self) -> bool:
        """No: it is in one place."""
        return False

    @property
    def taken(self) -> tuple[int, ...]:
        """Buffers whose memory it takes where they are."""
        return tuple(
            [
                self.args[position].number
                for position in self.computation.donated
                if self.is_placed[position] and position not in self.copied
            ]
        )


def is_final_part(work: Work) -> bool:
    """Whether it is the part with which other work ends."""
    return work.parent is not None and work.parent.final_part is work
