"""An asyncio loop in a thread of its own, for what operators wait for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

JOIN_TIMEOUT_S = 5.0  # cancelling takes microseconds, on a busy machine seconds


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
        """Cancel everything and end the loop, if there is one; wait for its thread.

        Not for ever: a coroutine may hold it up that does not let itself be cancelled.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._is_closing = True
        with contextlib.suppress(RuntimeError):  # it has ended by itself, as it failed
            self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join(JOIN_TIMEOUT_S)

    def _begin(self, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(begin())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _serve(self) -> None:
        import asyncio  # noqa: PLC0415  see the class

        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            while not self._is_closing:
                # A task of the user's that exits ends it, and who awaits the task is
                # told; a user may stop it too. Others go on.
                with contextlib.suppress(BaseException):
                    loop.run_forever()
            while running := list(self._running):  # and those that began meanwhile
                for task in running:
                    task.cancel()
                done = asyncio.gather(*running, return_exceptions=True)
                with contextlib.suppress(BaseException):  # as above
                    loop.run_until_complete(done)
                loop.run_until_complete(asyncio.sleep(0))  # lets `discard` happen
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
