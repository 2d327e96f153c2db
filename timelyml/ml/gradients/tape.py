"""The tape: a program recorded with the functions that it calls, to be differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timelyml.ml.functions import ArrayType, TracedCall
from timelyml.ml.functions.blame import calling_line
from timelyml.ml.programs import Placeholder, Recorder, Ref
from timelyml.ml.programs.nodes import Control


class Tape(Recorder):
    """Records a block, and keeps its calls as they were made.

    What the block uses of programs around it is captured, as handles are: of it there
    is no gradient. Regions of branches and loops are tapes in turn.

    Attributes:
        calls: The call of each node that is one.
        regions: The tapes of each branch or loop that was recorded with them; of a loop
            those of its condition and its body.
        outside: What the block uses that it did not make: arguments are not among it.
    """

    def __init__(self, name: str, parent: Recorder | None = None) -> None:
        super().__init__(name, parent)
        self.calls: dict[int, TracedCall] = {}
        self.regions: dict[int, tuple[Tape, ...]] = {}
        self.outside: dict[Ref, Any] = {}

    def inside(self, name: str) -> Recorder:
        """Return what records a region, so that it can be differentiated."""
        return Tape(name, self)

    def call(self, call: TracedCall) -> Sequence[Any]:
        """Record a call, and keep it."""
        kept = call._replace(line=call.line or calling_line())
        found = super().call(kept)
        self.calls[len(self._nodes) - 1] = kept
        return found

    def control(
        self, node: Control, regions: Sequence[Recorder] = ()
    ) -> list[Placeholder]:
        """Record what values decide, and keep the tapes of its regions."""
        found = super().control(node, regions)
        tapes = tuple(each for each in regions if isinstance(each, Tape))
        if tapes:
            self.regions[len(self._nodes) - 1] = tapes
        return found

    def ref_of(self, value: Any) -> Ref | None:
        """Return the output that a value is; None of what the block did not make."""
        if isinstance(value, Placeholder) and value.recorder is self:
            return value.ref
        return None

    def _operand(self, leaf: Any, array_type: ArrayType, user: str) -> Ref:
        ref = super()._operand(leaf, array_type, user)
        if self.ref_of(leaf) is None:
            self.outside.setdefault(ref, leaf)
        return ref

    def _check_captured(self, leaf: Any) -> None:
        """Accept values of programs that are being traced around this one."""
