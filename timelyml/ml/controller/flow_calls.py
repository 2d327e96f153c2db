"""Flows that clients registered, and calls of them that are not over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from timelyml.ml.controller.cuts import RegisteredProgram
from timelyml.ml.controller.work import Work
from timelyml.ml.programs import Value
from timelyml.ml.programs.flows import WholeFlow
from timelyml.ml.scheduling import Dispatch
from timelyml.ml.store import Entry


class RegisteredFlow:
    """A flow that a client registered.

    Attributes:
        whole: What it is.
        given: Those of its inputs that a call gives away.
        parts: What is known of its parts, by the identity of their programs.
    """

    def __init__(
        self, whole: WholeFlow, when: Dispatch, given: tuple[int, ...]
    ) -> None:
        self.whole = whole
        self.given = given
        self.parts = {
            each.identity: RegisteredProgram(each, when, given=())
            for each in whole.programs()
        }

    @property
    def name(self) -> str:
        """What people call it."""
        return self.whole.name

    @property
    def slices(self) -> tuple[str, ...]:
        """All slices that it uses."""
        return self.whole.slices

    @property
    def taken(self) -> Sequence[Value]:
        """What each of its inputs has to be."""
        return self.whole.inputs

    @property
    def outputs(self) -> Sequence[Value]:
        """What it computes."""
        return self.whole.outputs


@dataclass(slots=True)
class FlowRecord:
    """A call of a flow that is not over: work without launches of its own.

    Attributes:
        held: Every buffer that it keeps alive, by number: what it was given, and what
            its parts made.
        final_part: Its last part, once that has begun.
    """

    program: str
    client: int
    owner: Any
    known: RegisteredFlow
    args: list[Entry]
    outs: tuple[int, ...]
    held: dict[int, Entry]
    results: list[Entry] = field(default_factory=list)
    before: list[Work] = field(default_factory=list)
    is_claimed: bool = False
    is_begun: bool = False
    is_ordered: bool = False
    num_waits: int = 0
    num_moves: int = 0
    since_s: float = 0.0
    device_ns: int = 0
    dependants: list[tuple[str, int, int]] = field(default_factory=list)
    error: bytes | None = None
    values: dict[int, Any] = field(default_factory=dict)
    final_part: Work | None = None
    parent: None = None
    is_apart: bool = True
    is_in_turn: bool = False
    has_run: bool = False
    has_parts: bool = True

    @property
    def slice(self) -> str:
        """A name of its own."""
        return f"program {self.program}"

    @property
    def slices(self) -> tuple[str, ...]:
        """All slices that it uses."""
        return self.known.slices

    @property
    def uses(self) -> list[Entry]:
        """Every buffer that it keeps alive."""
        return list(self.held.values())

    @property
    def is_placed(self) -> tuple[bool, ...]:
        """All arguments are taken where they lie."""
        return (True,) * len(self.args)

    @property
    def exported(self) -> list[Entry]:
        """None: its parts say so of theirs."""
        return []

    @property
    def given(self) -> tuple[int, ...]:
        """Buffers that its client gives away to it."""
        return tuple(self.args[each].buffer.number for each in self.known.given)

    @property
    def taken(self) -> tuple[int, ...]:
        """None: its parts say so of theirs."""
        return ()
