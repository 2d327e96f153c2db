"""Flows: calls of programs with branches and loops, taken part by part.

A call of a flow is work that launches nothing itself. Each of its parts is a call of a
program, goes through all gates on its own, and holds memory only while it runs; between
parts, others may run. What a branch or a loop decides by rides on the news that the part
is over that computed it, so that nothing goes to the client and back. Outputs get their
names by the last part; until it is ordered, what depends on them waits.
"""

from __future__ import annotations

from collections.abc import Mapping

from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.dispatching import Dispatch
from timelyml.ml.controller.flow_calls import FlowRecord, RegisteredFlow
from timelyml.ml.controller.flow_frames import Parts
from timelyml.ml.controller.flow_runs import FlowRun
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.store import Buffer, Entry


class Flows:
    """Calls of flows.

    Args:
        dispatch: Takes them, and their parts through all gates.
        buffers: Those that parts take and make.
        slices: All slices, also those that are lost.
        parts: Makes the calls that parts are.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        buffers: Buffers,
        slices: Mapping[str, SliceRecord],
        parts: Parts,
    ) -> None:
        self._dispatch = dispatch
        self._buffers = buffers
        self._slices = slices
        self._parts = parts
        self._runs: dict[str, FlowRun] = {}

    def start(
        self,
        name: str,
        client: int,
        known: RegisteredFlow,
        args: list[Entry],
        outputs: list[Buffer],
    ) -> None:
        """Take a call."""
        held = {each.buffer.number: each for each in args}
        outs = tuple([each.number for each in outputs])
        record = FlowRecord(name, client, self, known, args, outs, held)
        self._dispatch.take(record, outputs)
        run = FlowRun(record, self._dispatch, self._buffers, self._parts)
        self._runs[name] = run
        run.begin()
        self._forget_if_over(run)

    def go_on(self) -> None:
        """Take the next steps of flows whose parts are over."""
        for part, errors in self._dispatch.parts_over():
            run = self._runs.get(part.parent.program)
            if run is not None:
                run.over(part, errors)
                self._forget_if_over(run)

    def refusal(self, work: FlowRecord) -> bytes | None:
        """Return why a call cannot go on: a slice of it is gone."""
        errors = (self._slices[name].error for name in work.slices)
        return next((error for error in errors if error is not None), None)

    def output_errors(self, work: FlowRecord) -> dict[int, bytes]:
        """Return the error of all outputs: it ends by itself only if it was cancelled."""
        return {} if work.error is None else dict.fromkeys(work.outs, work.error)

    def ended(self, work: FlowRecord) -> None:
        """Take no more steps of a flow."""
        self._runs.pop(work.program, None)

    def _forget_if_over(self, run: FlowRun) -> None:
        if run.is_over:
            self._runs.pop(run.record.program, None)
