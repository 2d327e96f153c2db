"""What a client sees of a run of a schedule: when actions end, and what stages hold.

Times are the client's. It hears of the end of a launch a little after it, and takes as
its beginning when everything that it waited for had ended; so the way of a value from
slice to slice counts as part of what reads it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from typing import Any, TypeAlias

from timelyml.errors import ScheduleError, TimelyError
from timelyml.ml.pipeline.actions import Action, Schedule, made_by, needed_by
from timelyml.ml.pipeline.channels import Span
from timelyml.ml.pipeline.simulate import Timeline

_Started: TypeAlias = tuple[int, Action, Any]


class PipelineRecord:
    """Filled by a training step that it is given to; times are those of the last.

    Attributes:
        peak_live: For each stage, the most microbatches whose residuals it held at once.
        peak_bytes: For each stage, the most bytes that residuals took.
    """

    def __init__(self) -> None:
        self.peak_live: dict[int, int] = {}
        self.peak_bytes: dict[int, int] = {}
        self._began = 0.0
        self._schedule: Schedule | None = None
        self._ends: dict[Action, float] = {}
        self._order: dict[int, list[Action]] = {}
        self._queues: dict[int, SimpleQueue[_Started | None]] = {}
        self._threads: list[threading.Thread] = []
        self._error: TimelyError | None = None

    @contextlib.contextmanager
    def of(self, schedule: Schedule) -> Iterator[None]:
        """Take times of what is started inside, in one thread for each rank."""
        self._schedule = schedule
        self._ends, self._order = {}, {}
        self._queues = {rank: SimpleQueue() for rank in range(schedule.num_ranks)}
        self._threads = [
            threading.Thread(
                target=self._watch,
                args=(queue,),
                name=f"timelyml-rank-{r}",
                daemon=True,
            )
            for r, queue in self._queues.items()
        ]
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            for queue in self._queues.values():
                queue.put(None)

    def started(self, rank: int, action: Action, tick: Any) -> None:
        """Note that an action was started; `tick` comes when it is over."""
        if self._queues:
            self._order.setdefault(rank, []).append(action)
            self._queues[rank].put((rank, action, tick))

    def holds(self, held: Mapping[int, tuple[int, int]]) -> None:
        """Note what stages hold now: microbatches and bytes."""
        for stage, (count, size) in held.items():
            self.peak_live[stage] = max(self.peak_live.get(stage, 0), count)
            self.peak_bytes[stage] = max(self.peak_bytes.get(stage, 0), size)

    def timeline(self) -> Timeline:
        """Wait until the step is over, and return when its actions ran, in seconds.

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
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        there = {made_by(action): end for action, end in self._ends.items()}
        spans: list[Span] = []
        for rank, actions in sorted(self._order.items()):
            free = self._began
            for action in actions:
                needs = needed_by(action, self._schedule.num_stages)
                end = self._ends[action]
                start = max([free, *(there[value] for value in needs)])
                # News of two ranks may come in the wrong order, by a moment.
                spans.append(Span(rank, action, min(start, end), end))
                free = end
        return Timeline(self._schedule.num_ranks, tuple(spans))

    def _watch(self, queue: SimpleQueue[_Started | None]) -> None:
        while (item := queue.get()) is not None:
            _, action, tick = item
            try:
                tick.block_until_ready()
            except TimelyError as error:
                self._error = error
            self._ends[action] = time.monotonic()
