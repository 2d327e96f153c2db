"""Compiling in the background, in a thread of its own."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax

from timelyml.errors import ComputationError, TimelyError, TraceError
from timelyml.ml.functions import Computation, MemoryNeeds
from timelyml.ml.functions.blame import compile_error
from timelyml.ml.hosts.messages import NO_NEEDS, Compiled, Load
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
        host: Its name, for errors.
        wake: Called, from its thread, when `finished` has something.
        executables: Compiles, or has what was compiled before.
    """

    def __init__(
        self, host: str, wake: Callable[[], None], executables: Loader
    ) -> None:
        self._host = host
        self._wake = wake
        self._computations: dict[str, Computation] = {}
        self._executables = executables
        self._pool = ThreadPoolExecutor(1, "timelyml-compile")
        self._done: deque[tuple[Load, HostSlice, Future[Loaded], int]] = deque()
        self._under_way: dict[Future[Loaded], HostSlice] = {}

    def __bool__(self) -> bool:
        """Whether something is compiled that was not told yet."""
        return bool(self._done)

    def load(self, load: Load, slice_: HostSlice, epoch: int) -> None:
        """Compile a computation; it comes once, though it be for several slices."""
        if load.pickled is not None:
            computation = pickle.loads(load.pickled)  # noqa: S301 - of an authenticated client
            self._computations[load.identity] = computation
        future = self._pool.submit(
            self._executables.load, self._computations[load.identity], slice_.devices
        )
        self._under_way[future] = slice_

        def compiled(done: Future[Loaded]) -> None:
            self._done.append((load, slice_, done, epoch))
            self._wake()

        future.add_done_callback(compiled)

    def finished(self) -> Iterator[tuple[Compiled, HostSlice, Loaded | bytes, int]]:
        """Return what there is to tell, for which slice, and what was compiled for it.

        Or, in place of that, the pickled reason why nothing was, which is empty if its
        slice was given up. And the epoch of the order.
        """
        while self._done:
            load, slice_, future, epoch = self._done.popleft()
            del self._under_way[future]
            made = b"" if future.cancelled() else self._outcome(future, load.line)
            if isinstance(made, bytes):
                news = Compiled(load.identity, slice_.name, NO_NEEDS, made)
            else:
                news = Compiled(load.identity, slice_.name, made.memory)
            yield news, slice_, made, epoch

    def give_up(self, slice_: HostSlice) -> None:
        """Compile nothing more for a slice, so that others need not wait for it."""
        for future in [x for x, of in self._under_way.items() if of is slice_]:
            future.cancel()

    def forget(self, identities: Iterable[str]) -> None:
        """Drop computations, and what was compiled of them."""
        for identity in identities:
            self._computations.pop(identity, None)
            self._executables.forget(identity)

    def close(self) -> None:
        """End its thread, without waiting for what it compiles."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _outcome(self, future: Future[Loaded], line: str) -> Loaded | bytes:
        error = future.exception()
        if error is None:
            return future.result()
        if not isinstance(error, TimelyError):
            raise error  # a bug of ours: `load` gives users' errors a name
        return pack_error(_placed(error, line, self._host))


def _placed(error: TimelyError, line: str, host: str) -> TimelyError:
    """Say which call could not be compiled, and where."""
    cause = error.__cause__
    if isinstance(error, TraceError) and cause is not None:
        placed = compile_error(error.function, cause, line, host)
        placed.__cause__ = cause
        return placed
    placed_error = error.anew()  # one is raised for all who ask for it
    placed_error.add_note(f"called at {line}, to run on host {host}")
    return placed_error
