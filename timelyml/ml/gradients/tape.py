"""The tape: a program recorded with the functions that it calls, to be differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from timelyml.ml.functions import TracedCall
from timelyml.ml.functions.blame import calling_line
from timelyml.ml.programs import Placeholder, Recorder, Ref


class Tape(Recorder):
    """Records a block, and keeps its calls as they were made.

    What the block uses of programs around it is captured, as handles are: of it there
    is no gradient.

    Attributes:
        calls: The call of each node that is one.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: dict[int, TracedCall] = {}

    def call(self, call: TracedCall) -> Sequence[Any]:
        """Record a call, and keep it."""
        kept = replace(call, line=call.line or calling_line())
        found = super().call(kept)
        self.calls[len(self._nodes) - 1] = kept
        return found

    def ref_of(self, value: Any) -> Ref | None:
        """Return the output that a value is; None of what the block did not make."""
        if isinstance(value, Placeholder) and value.recorder is self:
            return value.ref
        return None

    def _check_captured(self, leaf: Any) -> None:
        """Accept values of programs that are being traced around this one."""
