"""Compiling in the background, in a thread of its own."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax

from timelyml.errors import ComputationError, TimelyError
from timelyml.ml.functions import Computation, MemoryNeeds
from timelyml.ml.hosts.slices import HostSlice
from timelyml.runtime.failure import pack_error


class Loaded(Protocol):
    """A computation that can be launched: an `Executable`, or what stands for one.

    Attributes:
        quick: As of `Executable`.
    """

    quick: tuple[Callable[[list[jax.Array]], Any], Any] | None

    @property
    def computation(self) -> Computation:
        """What it is."""

    @property
    def memory(self) -> MemoryNeeds:
        """What it needs on each device."""

    def pending(self, arrays: Sequence[jax.Array | None]) -> Sequence[jax.Array]:
        """Return which arguments have to be computed to know where to start it."""

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """Start it; return its outputs, which may not be ready yet."""

    def check(self, outputs: Sequence[Any]) -> ComputationError | None:
        """Return why outputs that are ready mean nothing, if so."""


class Loader(Protocol):
    """Makes computations ready to be launched."""

    def load(self, computation: Computation, devices: Sequence[jax.Device]) -> Loaded:
        """Return what launches a computation on these devices; takes its time."""

    def forget(self, identity: str) -> None:
        """Drop what was compiled of a computation."""


class Compiler:
    """Compiles computations for slices, one after the other.

    Args:
        wake: Called, from its thread, when `finished` has something.
        executables: Compiles, or has what was compiled before.
    """

    def __init__(self, wake: Callable[[], None], executables: Loader) -> None:
        self._wake = wake
        self._computations: dict[str, Computation] = {}
        self._executables = executables
        self._pool = ThreadPoolExecutor(1, "timelyml-compile")
        self._done: deque[tuple[str, HostSlice, Future[Loaded], int]] = deque()

    def __bool__(self) -> bool:
        """Whether something is compiled that was not told yet."""
        return bool(self._done)

    def load(
        self, identity: str, slice_: HostSlice, pickled: bytes | None, epoch: int
    ) -> None:
        """Compile a computation; `pickled` unless it came before for another slice."""
        if pickled is not None:
            self._computations[identity] = pickle.loads(pickled)  # noqa: S301 - of an authenticated client
        future = self._pool.submit(
            self._executables.load, self._computations[identity], slice_.devices
        )

        def compiled(done: Future[Loaded]) -> None:
            self._done.append((identity, slice_, done, epoch))
            self._wake()

        future.add_done_callback(compiled)

    def finished(self) -> Iterator[tuple[str, HostSlice, Loaded | bytes, int]]:
        """Return what was compiled, for which slice, or the pickled reason why not.

        And the epoch of the order.
        """
        while self._done:
            identity, slice_, future, epoch = self._done.popleft()
            yield identity, slice_, _outcome(future), epoch

    def forget(self, identities: Iterable[str]) -> None:
        """Drop computations, and what was compiled of them."""
        for identity in identities:
            self._computations.pop(identity, None)
            self._executables.forget(identity)

    def close(self) -> None:
        """End its thread, without waiting for what it compiles."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _outcome(future: Future[Loaded]) -> Loaded | bytes:
    error = future.exception()
    if error is None:
        return future.result()
    if not isinstance(error, TimelyError):
        raise error  # a bug of ours: `load` gives users' errors a name
    return pack_error(error)
