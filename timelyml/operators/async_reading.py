"""Async iterators as sources: a coroutine reads them ahead, by a bounded number."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, Callable, Iterator
from typing import Any

from timelyml.operators.loop_thread import LoopThread

ITEMS_AHEAD = 16


class Pump:
    """Items of an async iterator, for the worker's thread: None where it has to wait.

    Args:
        loop: Where it is read.
        items: What is read.
        wake: Called when an item has come for which the worker waits.
    """

    def __init__(
        self, loop: LoopThread, items: AsyncIterable[Any], wake: Callable[[], None]
    ) -> None:
        self._items = items
        self._wake = wake
        self._queue: deque[Any] = deque()
        self._error: BaseException | None = None
        self._is_over = False
        self._room: Any = None  # an asyncio.Event, of the loop
        self._tell: Callable[[], None] = lambda: None
        loop.start(self._read)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        is_over = self._is_over  # before the look at what there is
        if self._queue:
            item = self._queue.popleft()
            self._tell()
            return item
        if not is_over:
            return None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopIteration

    async def _read(self) -> None:
        import asyncio  # noqa: PLC0415  loaded by the loop already

        room = asyncio.Event()
        loop = asyncio.get_running_loop()

        def tell() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(room.set)

        self._tell = tell
        try:
            async for item in self._items:
                self._queue.append(item)
                if len(self._queue) == 1:
                    self._wake()
                while len(self._queue) >= ITEMS_AHEAD:
                    room.clear()
                    if len(self._queue) >= ITEMS_AHEAD:
                        await room.wait()
        except BaseException as error:  # noqa: BLE001  raised where the worker reads
            self._error = error
        finally:
            self._is_over = True
            self._wake()
