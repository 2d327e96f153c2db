"""Waits for what devices compute: when a launch is over, what it took, what it returned.

The thread that launches looks which are over; threads that launch nothing wait for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

import jax

from timelyml.errors import TimelyError
from timelyml.ml.functions import run_failure, to_host
from timelyml.ml.hosts.buffers import Buffer, BufferStore
from timelyml.ml.hosts.compiling import Loaded
from timelyml.ml.hosts.copies import HostCopy
from timelyml.ml.hosts.lost_peers import Torn
from timelyml.ml.hosts.messages import Done, Export, Left, Pieces, Spilled
from timelyml.ml.hosts.paced import PacedArray
from timelyml.ml.hosts.sending import exported, is_quick
from timelyml.ml.jax_private import is_ready
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
    executable: Loaded
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


@dataclass(frozen=True, slots=True)
class Over:
    """A launch that is over.

    Attributes:
        is_awaited: Whether it has news for somebody who may wait for it: a result that
            no later launch takes, or an error.
    """

    done: Done
    is_awaited: bool


Said = Over | Left | Spilled | tuple[int, Pieces] | Torn | Copied | Exception
"""A launch that is over, pieces for a peer, a copy of a buffer, or a bug, after which
nothing follows."""


class Line:
    """Launches on the same devices, on whichever slices that have just these.

    Attributes:
        num_users: Waiters that look for the end of what is launched on them.
        newest: Sequence of the last launch.
        eaten: Launches whose results were all donated before they could be waited for,
            perhaps to one on another slice: whose they are, and a later launch by whose
            end they are over.
    """

    def __init__(self) -> None:
        self.num_users = 0
        self.newest = -1
        self.eaten: deque[tuple[Waiter, Launched, int]] = deque()


Lines: TypeAlias = dict[tuple[str, ...], Line]
"""By own devices, as long as somebody waits for what is launched on them."""


class Waiter:
    """Finds out which launches of one slice are over, in their order.

    The thread that launches asks for them in its turns, which costs next to nothing. A
    thread of each waiter waits on its behalf while it sleeps, and does nothing else;
    another copies what is to be sent or spilled.

    Args:
        name: Of the slice.
        say: Hears what came of each; called in the thread that settles or copies.
        store: Is asked which buffers are still wanted, and which were given away.
        wake: Called, from a thread of its own, when `settle` has something to do.
        devices: Own devices of the slice.
        free_ns: Since when each device has nothing to do; shared by all slices, so that
            no time of a device counts twice.
        lines: What was launched on which devices; shared by all slices.
    """

    def __init__(
        self,
        name: str,
        say: Callable[[Said], None],
        store: BufferStore,
        wake: Callable[[], None],
        *,
        devices: Sequence[str] = (),
        free_ns: dict[str, int] | None = None,
        lines: Lines | None = None,
    ) -> None:
        self._devices = devices
        self._free_ns = {} if free_ns is None else free_ns
        self._name = name
        self._say = say
        self._store = store
        self._wake = wake
        self._under_way: deque[Launched] = deque()
        self._is_watched = False  # the first of them, by the thread that waits
        self._seen = -1  # sequence of the last that it saw end well
        self._watches: SimpleQueue[Launched | None] = SimpleQueue()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lines = {} if lines is None else lines
        self._line = self._lines.setdefault(tuple(devices), Line())
        self._line.num_users += 1
        self._start(self._watch, "wait")
        self._is_copying = False
        self._given_up: bytes | None = None

    def launched(self, launch: Launched) -> None:
        """Look for the end of this launch too."""
        self._line.newest = launch.sequence
        self._under_way.append(launch)

    def over(self) -> int | None:
        """Return the sequence of its first launch if that is over, to be settled."""
        if self._under_way and self._is_over(self._under_way[0]):
            return self._under_way[0].sequence
        return None

    def give_up(self, before: Waiter, error: bytes) -> None:
        """Close another of the same slice, and wait no more for any launch on it.

        All are over with an error as they are, also those that follow: what they wait for
        may never come, and what was ordered behind them must go on.
        """
        mine = [each for of, each, _ in before._line.eaten if of is before]
        before.close()
        self._given_up = error
        self._under_way.extend([*mine, *before._under_way])

    def settle(self) -> None:
        """Tell of the first launch, which is over."""
        self._finish(self._under_way.popleft())

    def is_due(self) -> bool:
        """Whether `settle` has something to tell; if not, `wake` is called once it has."""
        if not self._under_way:
            return False
        if self._is_over(self._under_way[0]):
            return True
        if not self._is_watched:
            self._is_watched = True
            self._watches.put(self._under_way[0])
        return False

    def export(self, buffer: Buffer, export: Export) -> None:
        """Have pieces of a buffer sent once it is computed.

        Small ones that are there are sent at once: of a chain of small computations over
        several slices, most of the time would be spent waking threads.
        """
        if is_quick(buffer, export):
            self._say(exported(buffer, export))
        else:
            self._copy(lambda: self._say(exported(buffer, export)))

    def spill(self, number: int, buffer: Buffer) -> None:
        """Have a buffer copied to the host, once what was to be sent of it is sent."""
        self._copy(lambda: self._say(_copied(number, buffer)))

    def tell(self, left: Left) -> None:
        """Say this once all before it is said."""
        self._copy(lambda: self._say(left))

    def close(self) -> None:
        """End the threads after what is under way; neither waits for it nor tells of it."""
        self._watches.put(None)
        self._jobs.put(None)
        line = self._line
        line.eaten = deque(each for each in line.eaten if each[0] is not self)
        line.num_users -= 1
        if not line.num_users:
            self._lines.pop(tuple(self._devices), None)

    def _start(self, target: Callable[[], None], what: str) -> None:
        name = f"timelyml-{what}-{self._name}"
        threading.Thread(target=target, name=name, daemon=True).start()

    def _copy(self, job: Callable[[], None]) -> None:
        if not self._is_copying:
            self._is_copying = True
            self._start(self._serve, "copy")
        self._jobs.put(job)

    def _watch(self) -> None:
        while (launch := self._watches.get()) is not None:
            is_well = True
            for each in launch.started:
                is_well = _is_awaited(each.outputs) and is_well
                del each
            if is_well:
                self._seen = launch.sequence
            del launch  # or what the last one holds would stay in memory
            self._is_watched = False
            self._wake()

    def _serve(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
                del job  # or what the last one holds would stay in memory
        except Exception as bug:  # noqa: BLE001 - or launches would seem to go on
            self._say(bug)

    def _is_over(self, launch: Launched) -> bool:
        """Whether nothing would be waited for to finish a launch."""
        if self._given_up is not None:
            return True
        if launch.sequence == self._seen:  # to ask again takes 17 us with 8 devices
            return True
        for each in launch.started:
            for array in reversed(each.outputs):  # what is not donated is mostly last
                if not array.is_deleted():
                    if not is_ready(array):
                        return False
                    break
        return True

    def _finish(self, launch: Launched) -> None:
        errors: dict[int, bytes] = dict(launch.failures)
        if self._given_up is not None:
            lost = dict.fromkeys((x.gang for x in launch.started), self._given_up)
            self._tell(launch, 0, time.monotonic_ns(), lost | errors)
            return
        is_alive = not launch.started or launch.sequence == self._seen
        for each in () if is_alive else launch.started:
            error, is_alive = self._wait(each)
            if error is not None:
                errors[each.gang] = error
        if not (is_alive or errors) and launch.started[-1].outputs:
            self._line.eaten.append((self, launch, self._line.newest))
            return
        over = [launch]
        eaten = self._line.eaten
        while eaten and eaten[0][2] <= launch.sequence:
            over.insert(-1, eaten.popleft()[1])
        now_ns = _ended_ns(launch)
        free_ns = [self._free_ns.get(device, 0) for device in self._devices]
        began_ns = max(over[0].started_ns, *free_ns, 0)
        self._free_ns.update(dict.fromkeys(self._devices, now_ns))
        device_ns = (now_ns - began_ns) // len(over)
        for num_before, each_over in enumerate(over, 1 - len(over)):
            ended_ns = now_ns + num_before * device_ns
            failed = errors if each_over is launch else {}
            self._tell(each_over, device_ns, ended_ns, failed)

    def _tell(
        self,
        launch: Launched,
        device_ns: int,
        ended_ns: int,
        errors: dict[int, bytes],
    ) -> None:
        values: list[tuple[int, Any]] = []
        for each in launch.started:
            failure = each.error or errors.get(each.gang)
            if failure is None:
                failure = self._look(each, values)
            if failure is not None:
                errors[each.gang] = failure
        found = tuple(errors.items())
        left_out = [getattr(x.outputs, "num_left_out", 0) for x in launch.started]
        done = Done(
            launch.sequence, device_ns, found, tuple(values), ended_ns, sum(left_out)
        )
        is_awaited = any(self._store.wanted(each.outs) for each in launch.started)
        self._say(Over(done, is_awaited=bool(found) or is_awaited))

    def _look(self, launch: Started, values: list[tuple[int, Any]]) -> bytes | None:
        """Return what a check found; or note the results that are small."""
        failed = launch.executable.check(launch.outputs)
        if failed is not None:
            return pack_error(failed)
        wanted = set(self._store.wanted(launch.outs))
        if not wanted:
            return None
        types = launch.executable.computation.out_types
        for out, array, of in zip(launch.outs, launch.outputs, types, strict=False):
            if out not in wanted:  # hardly ever what the next launch takes
                continue
            # Keys would become words by a computation, which is not ours to launch.
            is_small = of.size_bytes <= SMALL_BYTES and of.key_impl is None
            if is_small and (array.is_fully_addressable or array.is_fully_replicated):
                with self._store.giving:
                    if not array.is_deleted():
                        values.append((out, to_host(array).copy()))
        return None

    def _wait(self, launch: Started) -> tuple[bytes | None, bool]:
        """Wait until a computation is over; return its error, and whether it was seen.

        The results of one launch come together, so one that still exists is enough.
        """
        for array in launch.outputs:
            if array.is_deleted():  # costs a hundredth of what waiting for it would
                continue
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


def _ended_ns(launch: Launched) -> int:
    """Return when a launch ended: now, unless its devices are paced and know better."""
    arrays: list[Any] = [x.outputs[0] for x in launch.started if x.outputs]
    known = [each.ready_ns for each in arrays if isinstance(each, PacedArray)]
    return max(known) if known else time.monotonic_ns()


def _is_awaited(arrays: Sequence[jax.Array]) -> bool:
    """Wait for one that is not donated in the meantime; False if none came to be.

    Then whoever settles finds out why.
    """
    for array in arrays:
        if array.is_deleted():
            continue
        with contextlib.suppress(Exception):  # the computation's own, or it is gone
            array.block_until_ready()
            return True
    return False


def pack_failure(executable: Loaded, error: Exception) -> bytes:
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
