"""Waits for what devices compute: when a launch is over, what it took, what it returned.

Each slice has a thread that does nothing but wait. It launches nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import jax

from timelyml.errors import TimelyError
from timelyml.ml.functions import Executable, run_failure, to_host
from timelyml.ml.hosts.buffers import Buffer, BufferStore
from timelyml.ml.hosts.copies import HostCopy
from timelyml.ml.hosts.messages import Done, Export, Pieces
from timelyml.ml.hosts.slices import gather, zeros
from timelyml.runtime.failure import pack_error

SMALL_BYTES = 4096
"""Results up to this size ride along with the news that they are there."""


@dataclass(frozen=True, slots=True)
class Started:
    """A computation under way whose end is looked at.

    Attributes:
        gang: Its number in its program.
        outputs: All arrays it returned.
        outs: The numbers of the buffers that the first of them are; 0 is none.
        error: Of an argument, which makes the results meaningless.
    """

    gang: int
    executable: Executable
    outputs: Sequence[jax.Array]
    outs: Sequence[int]
    error: bytes | None


@dataclass(frozen=True, slots=True)
class Launched:
    """What was launched in one place of the order, and is over once all of it is.

    Attributes:
        failures: What could not even start, by its gang.
    """

    sequence: int
    started: Sequence[Started]
    failures: tuple[tuple[int, bytes], ...]
    started_ns: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A buffer that is to be spilled was copied; or `error` says why it was not."""

    buffer: int
    copy: HostCopy | None
    error: bytes | None = None


Said = Done | tuple[int, Pieces] | Copied | Exception
"""A launch that is over, pieces for a peer, a copy of a buffer, or a bug, after which
nothing follows."""


class Waiter:
    """Waits for the launches of one slice, in their order.

    Args:
        name: Of the slice.
        say: Hears what came of each; called in the thread that waits.
        store: Is asked which buffers are still wanted, and which were given away.
    """

    def __init__(
        self, name: str, say: Callable[[Said], None], store: BufferStore
    ) -> None:
        self._say = say
        self._store = store
        self._jobs: SimpleQueue[Launched | Callable[[], None] | None] = SimpleQueue()
        self._newest = -1  # sequence of the last launch
        self._free_since_ns = 0
        # Launches whose results were all donated before they could be waited for, each
        # with a later launch by whose end it is over.
        self._eaten: deque[tuple[Launched, int]] = deque()
        self._thread = threading.Thread(
            target=self._serve, name=f"timelyml-wait-{name}", daemon=True
        )
        self._thread.start()

    def launched(self, launch: Launched) -> None:
        """Wait for this launch too."""
        self._newest = launch.sequence
        self._jobs.put(launch)

    def export(self, buffer: Buffer, export: Export) -> None:
        """Have pieces of a buffer sent once it is computed."""
        self._jobs.put(lambda: self._say((export.peer, _pieces(buffer, export))))

    def spill(self, number: int, buffer: Buffer) -> None:
        """Have a buffer copied to the host, once what was to be sent of it is sent."""
        self._jobs.put(lambda: self._say(_copied(number, buffer)))

    def close(self) -> None:
        """End the thread after what is under way; does not wait for it."""
        self._jobs.put(None)

    def _serve(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                if isinstance(job, Launched):
                    self._finish(job)
                else:
                    job()
                del job  # or what the last one holds would stay in memory
        except Exception as bug:  # noqa: BLE001 - or launches would seem to go on
            self._say(bug)

    def _finish(self, launch: Launched) -> None:
        errors: dict[int, bytes] = dict(launch.failures)
        is_alive = not launch.started
        for each in launch.started:
            error, is_alive = self._wait(each)
            if error is not None:
                errors[each.gang] = error
        if not (is_alive or errors) and launch.started[-1].outputs:
            self._eaten.append((launch, self._newest))
            return
        over = [launch]
        while self._eaten and self._eaten[0][1] <= launch.sequence:
            over.insert(-1, self._eaten.popleft()[0])
        now_ns = time.monotonic_ns()
        began_ns = max(self._free_since_ns, over[0].started_ns)
        self._free_since_ns = now_ns
        device_ns = (now_ns - began_ns) // len(over)
        for each_over in over:
            self._tell(each_over, device_ns, errors if each_over is launch else {})

    def _tell(self, launch: Launched, device_ns: int, errors: dict[int, bytes]) -> None:
        values: list[tuple[int, Any]] = []
        for each in launch.started:
            failure = each.error or errors.get(each.gang)
            if failure is None:
                failure = self._look(each, values)
            if failure is not None:
                errors[each.gang] = failure
        found = tuple(errors.items())
        self._say(Done(launch.sequence, device_ns, found, tuple(values)))

    def _look(self, launch: Started, values: list[tuple[int, Any]]) -> bytes | None:
        """Return what a check found; or note the results that are small."""
        failed = launch.executable.check(launch.outputs)
        if failed is not None:
            return pack_error(failed)
        types = launch.executable.computation.out_types
        for out, array, of in zip(launch.outs, launch.outputs, types, strict=False):
            # Keys would become words by a computation, which is not ours to launch.
            is_small = of.size_bytes <= SMALL_BYTES and of.key_impl is None
            is_whole = array.is_fully_addressable or array.is_fully_replicated
            # What the next launch takes is hardly ever looked at; who does can ask.
            is_wanted = out in self._store and not self._store.is_taken(out)
            if is_small and is_whole and is_wanted:
                with self._store.giving:
                    if not array.is_deleted():
                        values.append((out, to_host(array).copy()))
        return None

    def _wait(self, launch: Started) -> tuple[bytes | None, bool]:
        """Wait until a computation is over; return its error, and whether it was seen.

        The results of one launch come together, so one that still exists is enough.
        """
        for array in launch.outputs:
            try:
                array.block_until_ready()
            except Exception as error:  # noqa: BLE001 - whatever a computation raises
                with self._store.giving:  # or it may be half taken
                    is_taken = array.is_deleted()
                if is_taken:
                    continue
                return pack_failure(launch.executable, error), False
            return None, True
        return None, False


def pack_failure(executable: Executable, error: Exception) -> bytes:
    """Pickle what came of a computation that raised."""
    if isinstance(error, TimelyError):
        return pack_error(error)
    failure = run_failure(executable.computation.name, error)
    failure.__cause__ = error
    return pack_error(failure)


def _copied(number: int, buffer: Buffer) -> Copied:
    if buffer.array is None:
        return Copied(number, buffer.copy)
    try:
        return Copied(number, HostCopy.of(buffer.array))
    except Exception as raised:  # noqa: BLE001 - that of its computation
        return Copied(number, None, pack_error(run_failure("of a buffer", raised)))


def _pieces(buffer: Buffer, export: Export) -> Pieces:
    error = buffer.error
    if buffer.copy is not None and error is None:
        return Pieces(export.target, buffer.copy.pieces(export.boxes))
    if buffer.array is not None and error is None:
        try:
            buffer.array.block_until_ready()
        except Exception as raised:  # noqa: BLE001 - that of its computation
            error = pack_error(run_failure(f"that returned {export.type}", raised))
        else:
            pieces = gather(buffer.array, export.type, export.boxes)
            return Pieces(export.target, pieces)
    return Pieces(export.target, zeros(export.type, export.boxes), error)
