"""The executables of a process: each is compiled once, and launched as suits it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeAlias

import jax

from timelyml.ml.functions.by_device import ExecutableByDevice, load_by_device
from timelyml.ml.functions.computation import Computation
from timelyml.ml.functions.loading import Executable, load

Loaded: TypeAlias = Executable | ExecutableByDevice


class Executables:
    """Executables of a process, each compiled once, by whichever thread asks first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[tuple[str, tuple[int, ...]], Future[Loaded]] = {}

    def load(self, computation: Computation, devices: Sequence[jax.Device]) -> Loaded:
        """Return the executable; compile it, or wait for the thread that does.

        Raises:
            TimelyError: As `load`, at every try.
        """
        key = computation.identity, tuple(device.id for device in devices)
        with self._lock:
            future = self._loaded.get(key)
            is_first = future is None
            if future is None:
                future = self._loaded[key] = Future()
        if is_first:
            try:
                future.set_result(_load(computation, devices))
            except BaseException as error:
                with self._lock:
                    del self._loaded[key]
                future.set_exception(error)
                raise
        return future.result()

    def find(
        self, computation: Computation, devices: Sequence[jax.Device]
    ) -> Loaded | None:
        """Return the executable if it is compiled; never waits."""
        key = computation.identity, tuple(device.id for device in devices)
        future = self._loaded.get(key)
        if future is None or not future.done() or future.exception() is not None:
            return None
        return future.result()

    def forget(self, identity: str) -> None:
        """Drop what was compiled of a computation, on whatever devices."""
        with self._lock:
            for key in [key for key in self._loaded if key[0] == identity]:
                del self._loaded[key]


def _load(computation: Computation, devices: Sequence[jax.Device]) -> Loaded:
    is_placed = len(devices) == computation.mesh.size  # else `load` says so
    if computation.shard is not None and is_placed:
        return load_by_device(computation, devices)
    return load(computation, devices)
