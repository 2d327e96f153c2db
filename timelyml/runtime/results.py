"""Collected batches of a run, one after the other, while it goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

from timelyml.progress import Timestamp
from timelyml.runtime.record import RunRecord

WAIT_SLICE_S = 0.2  # how long a thread may outlive an `async for` that was left

Batch = tuple[Timestamp, Any]


class RunLink(Protocol):
    """What is needed of the run."""

    record: RunRecord


class Results:
    """An iterator of (time, payload), sync and async; made by `Run.results`.

    It holds the run, and with it a cluster of its own, as long as it is used.
    """

    def __init__(self, run: RunLink, name: str, *, keep: bool) -> None:
        self._run = run
        self._name = name
        self._keep = keep
        self._position = 0
        self._taken: deque[Batch] = deque()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self._take()
            if not self._has_more():
                if self._run.record.is_ended and not self._has_more():
                    self._run.record.raise_if_failed()
                    return
                self._run.record.wait_until(self._has_more, None)

    async def __aiter__(self) -> AsyncIterator[Batch]:
        import asyncio  # noqa: PLC0415  as in `Run.__await__`

        record = self._run.record
        while True:
            for batch in self._take():
                yield batch
            if not self._has_more():
                if record.is_ended and not self._has_more():
                    record.raise_if_failed()
                    return
                await asyncio.to_thread(record.wait_until, self._has_more, WAIT_SLICE_S)

    def _has_more(self) -> bool:
        return self._run.record.num_batches(self._name) > self._position

    def _take(self) -> Iterator[Batch]:
        """Yield what there is now; what a reader leaves behind comes the next time."""
        found = self._run.record.take_batches(
            self._name, self._position, keep=self._keep
        )
        if self._keep:
            self._position += len(found)
        self._taken.extend((time, payload) for time, _, payload in found)
        while self._taken:
            yield self._taken.popleft()
