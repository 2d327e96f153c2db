"""What is seen of a run of a schedule: when actions ran, and what stages hold.

Times are those at which devices ran, from a trace of them; what stages hold is what the
object store's ledger counts on their devices while the step runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from timelyml.errors import AdmissionError, ScheduleError
from timelyml.ml.client.gauge import MemoryGauge
from timelyml.ml.client.handle import Handle
from timelyml.ml.client.slices import SliceOwner
from timelyml.ml.client.tracing import DeviceTrace
from timelyml.ml.controller.traced import LaunchSpan
from timelyml.ml.pipeline.actions import Action, Schedule
from timelyml.ml.pipeline.channels import Span
from timelyml.ml.pipeline.simulate import Timeline


class PipelineRecord:
    """Filled by a training step that it is given to; times are those of the last.

    Peaks are the most of all steps that it was given to, of the first replica. They come
    from the ledger that admits calls, in the order in which hosts say that actions are
    over. What a stage's action is the last to read goes when that action is over: the
    client lets go of it before it sends the next one. So peaks are exactly those of the
    order in which a rank ran, however far the client is ahead.
    """

    def __init__(self) -> None:
        self._peaks: dict[int, tuple[int, int]] = {}
        self._gauge: MemoryGauge | None = None
        self._client: SliceOwner | None = None
        self._schedule: Schedule | None = None
        self._trace: DeviceTrace | None = None
        self._started: list[tuple[int, Action, Handle]] = []
        self._timeline: Timeline | None = None

    def begin(self, schedule: Schedule, client: SliceOwner) -> None:
        """Trace the devices from here on, until `timeline` is asked for."""
        with contextlib.suppress(AdmissionError):  # of a step that nobody asked for
            self._end()
        if client is not self._client:
            self._all_peaks(is_last=True)
            self._client = client
        if self._gauge is None:
            self._gauge = client.resources.gauge()
        self._schedule, self._timeline = schedule, None
        self._started = []
        self._trace = client.resources.trace().__enter__()

    def started(self, rank: int, action: Action, tick: Any) -> None:
        """Note that an action was started; `tick` comes when it is over."""
        if self._trace is not None:
            self._started.append((rank, action, tick))

    def holds(self, stage: int, microbatch: int, residuals: Iterable[Handle]) -> None:
        """Have residuals counted as those of a microbatch on a stage."""
        if self._gauge is not None:
            buffers = [each.buffer for each in residuals]
            self._gauge.count(stage, microbatch, buffers)

    @property
    def peak_live(self) -> dict[int, int]:
        """For each stage, the most microbatches whose residuals it held at once.

        Waits until the step is over.

        Raises:
            TimelyError: What an action failed with.
        """
        return {stage: count for stage, (count, _) in self._all_peaks().items()}

    @property
    def peak_bytes(self) -> dict[int, int]:
        """For each stage, the most bytes that residuals took on one device.

        Waits until the step is over.

        Raises:
            TimelyError: What an action failed with.
        """
        return {stage: size for stage, (_, size) in self._all_peaks().items()}

    def timeline(self) -> Timeline:
        """Wait until the step is over, and return when its actions ran, in seconds.

        Actions so small that a host launched several as one share its time evenly. An
        action on several processes lasts from the first to the last of them.

        Raises:
            ScheduleError: It was given to no step.
            TimelyError: What an action failed with.
        """
        if self._schedule is None:
            raise ScheduleError(
                "record has no times; got none of a step; expected one; pass it as "
                "record= to a step first",
                reason="record",
            )
        if self._timeline is None:
            self._wait()
            self._all_peaks(is_last=True)
            spans = _spans(self._started, self._end())
            self._timeline = Timeline(self._schedule.num_ranks, spans)
            self._started = []
        return self._timeline

    def _wait(self) -> None:
        for _, _, tick in self._started:
            tick.block_until_ready()

    def _all_peaks(self, *, is_last: bool = False) -> dict[int, tuple[int, int]]:
        """Return the most microbatches and bytes of each stage, once they are known."""
        if self._gauge is not None:
            self._wait()
            for stage, peak in self._gauge.peaks(ends=is_last).items():
                before = self._peaks.get(stage, (0, 0))
                self._peaks[stage] = max(before[0], peak[0]), max(before[1], peak[1])
            if is_last:
                self._gauge = None
        return dict(sorted(self._peaks.items()))

    def _end(self) -> Sequence[LaunchSpan]:
        trace, self._trace = self._trace, None
        if trace is None:
            return ()
        trace.__exit__(None, None, None)
        return trace.launches


def _spans(
    started: Sequence[tuple[int, Action, Handle]], launches: Sequence[LaunchSpan]
) -> tuple[Span, ...]:
    of_buffer: dict[int, list[LaunchSpan]] = {}
    for launch in launches:
        for buffer in launch.results:
            of_buffer.setdefault(buffer, []).append(launch)
    together: dict[tuple[float, float, int], list[tuple[int, Action]]] = {}
    for rank, action, tick in started:
        parts = of_buffer.get(tick.buffer, ())
        if parts:
            began = min(each.began_s for each in parts)
            ended = max(each.ended_s for each in parts)
            together.setdefault((began, ended, rank), []).append((rank, action))
    spans = []
    for (began, ended, _), actions in together.items():
        each_s = (ended - began) / len(actions)
        for index, (rank, action) in enumerate(actions):
            first = began + index * each_s
            spans.append(Span(rank, action, first, first + each_s))
    return tuple(sorted(spans, key=lambda span: (span.rank, span.start)))
