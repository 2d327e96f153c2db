"""An asyncio loop in a thread of its own, for what operators wait for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

JOIN_TIMEOUT_S = 2.0


class LoopThread:
    """Runs coroutines for one operator on one worker; starts with the first.

    Pickled, it is a new one. `asyncio` is loaded where it is used: it takes 50 ms.
    """

    def __init__(self) -> None:
        self._loop: Any = None
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._running: set[Any] = set()  # or tasks might be collected

    def __reduce__(self) -> tuple[Any, ...]:
        return LoopThread, ()

    def start(self, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the coroutine that `begin` returns; called by the worker's thread."""
        if self._loop is None:
            import asyncio  # noqa: PLC0415  see the class

            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._serve, name="timelyml-loop", daemon=True
            )
            self._thread.start()
        self._loop.call_soon_threadsafe(self._begin, begin)

    def close(self) -> None:
        """Cancel everything and end the loop, if there is one."""
        if self._thread is not None:
            self._is_closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_TIMEOUT_S)
            self._thread = None

    def _begin(self, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(begin())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _serve(self) -> None:
        import asyncio  # noqa: PLC0415  see the class

        loop = self._loop
        asyncio.set_event_loop(loop)
        while not self._is_closing:
            # A task of the user's that exits ends it, and who awaits the task is told;
            # a user may stop it too. Others go on.
            with contextlib.suppress(BaseException):
                loop.run_forever()
        running = list(self._running)
        for task in running:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
