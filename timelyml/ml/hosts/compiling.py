"""Compiling in the background, in a thread of its own."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from timelyml.errors import TimelyError
from timelyml.ml.functions import Computation, Executable, Executables
from timelyml.ml.hosts.slices import HostSlice
from timelyml.runtime.failure import pack_error


class Compiler:
    """Compiles computations for slices, one after the other.

    Args:
        wake: Called, from its thread, when `finished` has something.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._computations: dict[str, Computation] = {}
        self._executables = Executables()
        self._pool = ThreadPoolExecutor(1, "timelyml-compile")
        self._done: deque[tuple[str, HostSlice, Future[Executable]]] = deque()

    def __bool__(self) -> bool:
        """Whether something is compiled that was not told yet."""
        return bool(self._done)

    def load(self, identity: str, slice_: HostSlice, pickled: bytes | None) -> None:
        """Compile a computation; `pickled` unless it came before for another slice."""
        if pickled is not None:
            self._computations[identity] = pickle.loads(pickled)  # noqa: S301 - of an authenticated client
        future = self._pool.submit(
            self._executables.load, self._computations[identity], slice_.devices
        )

        def compiled(done: Future[Executable]) -> None:
            self._done.append((identity, slice_, done))
            self._wake()

        future.add_done_callback(compiled)

    def finished(self) -> Iterator[tuple[str, HostSlice, Executable | bytes]]:
        """Return what was compiled, for which slice, or the pickled reason why not."""
        while self._done:
            identity, slice_, future = self._done.popleft()
            yield identity, slice_, _outcome(future)

    def close(self) -> None:
        """End its thread, without waiting for what it compiles."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _outcome(future: Future[Executable]) -> Executable | bytes:
    error = future.exception()
    if error is None:
        return future.result()
    if not isinstance(error, TimelyError):
        raise error  # a bug of ours: `load` gives users' errors a name
    return pack_error(error)
