"""The executor: the only one that launches computations on the devices of its host.

One thread owns it and launches everything, in the order of the island; its gate sees to
that. It looks itself which launches are over; others wait only while it sleeps. Compiling
and copying happen in threads of their own and come back through `advance`. A launch
takes futures: nothing here waits for a device.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax

from timelyml.ml.hosts.buffers import Buffer, BufferStore, failure_of
from timelyml.ml.hosts.compiling import Compiler, Loaded, Loader
from timelyml.ml.hosts.lost_peers import Torn, given_up, never_came
from timelyml.ml.hosts.mailbox import Mailbox
from timelyml.ml.hosts.messages import (
    Done,
    Expect,
    Export,
    Gone,
    Leave,
    Left,
    Orders,
    Pieces,
    Prepare,
    RemapSlice,
    Run,
    Spilled,
)
from timelyml.ml.hosts.plans import Code, Plan, plan_for
from timelyml.ml.hosts.runs import Runs, copy_of
from timelyml.ml.hosts.slices import HostSlice
from timelyml.ml.hosts.turns import Turn, Turns
from timelyml.ml.hosts.upkeep_messages import Result
from timelyml.ml.hosts.waiting import (
    Copied,
    Launched,
    Lines,
    Over,
    Said,
    Started,
    Waiter,
    pack_failure,
)
from timelyml.ml.scheduling import GangKey, LaunchGate, Ticket
from timelyml.progress import new_tuple

TURN_S = 1e-3
"""How long launches may go on that end at once, before those that are over are told."""

News: TypeAlias = Over | Result | Spilled | Left | tuple[int, Pieces] | Torn
"""What a host has to tell: the controller, or of pieces the peer that they are for."""


class Executor:
    """Launches the gangs of one host.

    Args:
        host: Its name in the island's order.
        wake: Called, from any thread, when `advance` has something to do.
        executables: Makes computations ready to be launched.
    """

    def __init__(
        self, host: str, wake: Callable[[], None], executables: Loader
    ) -> None:
        self.store = BufferStore()
        self._wake = wake
        self._host = host
        self._gate = LaunchGate(host, generation=0)
        self.slices: dict[str, HostSlice] = {}
        self._waiters: dict[str, Waiter] = {}
        self._free_ns: dict[str, int] = {}
        self._lines: Lines = {}
        self.code: dict[Code, Loaded | bytes] = {}  # or why there is none
        self.compiler = Compiler(host, wake, executables)
        self._mailbox = Mailbox(wake)
        self._hear = self._mailbox.say
        self._prepares: dict[GangKey, Prepare] = {}
        self._turns = Turns(self._turn_of, wake)
        # What a gang still needs before it can be launched, and who needs it.
        self._missing: dict[GangKey, set[Any]] = {}
        self._awaited: dict[Any, list[GangKey]] = {}
        # Of buffers that are not there yet, or about to be spilled.
        self._exports: dict[int, list[Export]] = {}
        self._spills: set[int] = set()
        self.plans: dict[int, Plan] = {}
        self._runs = Runs(
            self.store,
            self.slices,
            self.code,
            self._waiters,
            export=self._export,
            came=self._came,
        )

    def add_slice(self, slice_: HostSlice) -> None:
        """Make a slice known."""
        self.slices[slice_.name] = slice_
        self._gate.place(slice_.name, slice_.own_devices)
        self._waiters[slice_.name] = self._waiter_of(slice_)

    def leave(self, leave: Leave) -> None:
        """Send buffers to where their slice will stand, and forget them here."""
        self._spills.difference_update(leave.buffers)
        for export in leave.exports:
            self._export(export)
        coming = self.store.coming(leave.buffers)
        self.store.leave(leave.buffers)
        for buffer in leave.buffers:
            for late in self._exports.pop(buffer, ()):
                if buffer in coming or late in leave.exports:
                    self._hear(never_came(late, self._host))
        self._waiters[leave.slice].tell(Left(leave.slice))

    def abandon(self, slices: Iterable[str]) -> None:
        """Take what runs on slices for over; what is there of them can be sent."""
        found = tuple(slices)
        self._turns.hurry(found)
        for name in found:
            before = self._waiters[name]
            self._waiters[name] = self._waiter_of(self.slices[name])
            self._waiters[name].give_up(before, given_up(name))

    def remap(self, remap: RemapSlice) -> None:
        """Let a slice be where another was made for it; nothing of it is on devices."""
        slice_, waiter = self.slices.pop(remap.target), self._waiters.pop(remap.target)
        self._drop_slices([name for name in (remap.slice,) if name in self.slices])
        slice_.name = remap.slice
        self.slices[remap.slice], self._waiters[remap.slice] = slice_, waiter
        self._gate.unplace(remap.target)
        self._gate.place(remap.slice, slice_.own_devices)
        for identity, of in [code for code in self.code if code[1] == remap.target]:
            self.code[identity, remap.slice] = self.code.pop((identity, of))
        self.store.moved(slice_)
        for expect in remap.expects:
            self._expect(expect)

    def load_program(self, number: int, pickled: bytes) -> None:
        """Work out what is to be done of a program, and keep it."""
        program = pickle.loads(pickled)  # noqa: S301 - made by the controller
        self.plans[number] = plan_for(program, int(self._host))

    def take(self, orders: Orders) -> None:
        """Do what the controller decided."""
        self.store.bring_back(orders.returns)
        for expect in orders.expects:
            self._expect(expect)
        for prepare in orders.prepares:
            self._prepare(prepare)
        for run in orders.runs:
            self._begin(run)
        for export in orders.exports:
            self._export(export)
        for cancel in orders.cancels:
            for key in self._runs.cancel(cancel):
                self._unprepare(key)
        for key in orders.forgets:
            self.store.release(self._prepares.pop(key).outs)
            self._unprepare(key)
        self._spills.update(orders.spills)
        for buffer in orders.spills:
            self._spill(buffer)
        self._spills.difference_update(orders.releases)
        for buffer in self._exports.keys() & orders.releases:
            del self._exports[buffer]
        self.store.release(orders.releases)
        self._turns.take(self._gate.admit(orders.tickets))
        self._drop_slices(orders.dropped)

    def add(self, pieces: Pieces) -> int:
        """Take pieces of a buffer; return when they were where they belong."""
        is_there, arrived_ns = self.store.add(pieces), time.monotonic_ns()
        if is_there:
            self._came(pieces.target)
        return arrived_ns

    def lost(self, gone: Gone) -> None:
        """Go on without what another host would have sent."""
        for buffer in self.store.lost(gone):
            self._came(buffer)

    @property
    def num_ordered(self) -> int:
        """Gangs that were ordered here and are not over."""
        return self._gate.num_ordered

    def advance(self) -> list[News]:
        """Go on with what became possible; return what there is to tell."""
        said: list[News] = []
        self._mailbox.own()
        for compiled, slice_, made, epoch in self.compiler.finished():
            if self.slices.get(slice_.name) is not slice_:  # it stands elsewhere by now
                said.append(Result(epoch))
                continue
            code = compiled.identity, compiled.slice
            self.code[code] = made
            said.append(Result(epoch, compiled))
            self._provide(code)
        self._turns.go_on()
        until = time.monotonic() + TURN_S
        while self._settle() and time.monotonic() < until:
            while self._mailbox:
                said += self._hear_out(self._mailbox.next())
        return said

    def has_news(self) -> bool:
        """Whether `advance` would do anything; if not, `wake` is called once it would."""
        due = list(map(Waiter.is_due, self._waiters.values()))  # all, so each watches
        return bool(self._mailbox or self.compiler or self._turns.is_due() or any(due))

    def close(self) -> None:
        """End all threads, without waiting for what runs."""
        self.compiler.close()
        for waiter in self._waiters.values():
            waiter.close()

    def _drop_slices(self, names: Iterable[str]) -> None:
        for name in names:
            self.compiler.give_up(self.slices.pop(name))
            self._gate.unplace(name)
            self._waiters.pop(name).close()
            for code in [code for code in self.code if code[1] == name]:
                del self.code[code]
            plans = self.plans.items()
            for number in [x for x, plan in plans if name in plan.program.slices]:
                del self.plans[number]

    def _settle(self) -> bool:
        """Look what is over; return whether anything was said."""
        waiters = self._waiters.values()
        while found := [
            (x, each) for each in waiters if (x := each.over()) is not None
        ]:
            min(found, key=lambda each: each[0])[1].settle()  # as devices did them
        return bool(self._mailbox)

    def _hear_out(self, said: Said) -> list[News]:
        """Go on with what a waiter said; return what of it there is to tell."""
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Copied):
            return self._spilled(said)
        if isinstance(said, Over):
            self._turns.take(self._gate.finish(said.done.sequence))
        return [said]

    def _waiter_of(self, slice_: HostSlice) -> Waiter:
        return Waiter(
            slice_.name,
            self._hear,
            self.store,
            self._wake,
            devices=slice_.own_devices,
            free_ns=self._free_ns,
            lines=self._lines,
        )

    def _expect(self, expect: Expect) -> None:
        if self.store.expect(expect, self.slices[expect.slice]):
            self._came(expect.buffer)

    def _prepare(self, prepare: Prepare) -> None:
        key, code = prepare.key, (prepare.computation, prepare.slice)
        self._prepares[key] = prepare
        missing: set[Any] = set(self.store.not_at_hand(prepare.args))
        if code not in self.code:
            missing.add(code)
        self.store.promise(prepare.outs)
        self.store.take(prepare.args)
        self._await(key, missing)

    def _begin(self, run: Run) -> None:
        plan = self.plans[run.program]
        self._runs.begin(run, plan)
        for number, _ in run.failed:
            self._came(run.inputs[number])
        waiting = [
            (block, self._runs.missing(run.name, block))
            for block in plan.blocks.values()
        ]
        for block, missing in waiting:  # none may be launched before all are looked at
            key = GangKey(run.name, block.number, 0)
            # What XLA hangs with, if there is much of it, is collectives.
            is_single = len(self.slices[block.slice].devices) == 1
            self._await(key, missing, 1 if is_single else len(block.steps))

    def _await(self, key: GangKey, missing: set[Any], num_launches: int = 1) -> None:
        """Have a gang launched in its turn, once nothing of what it needs is missing."""
        self._gate.weigh(key, num_launches)
        if not missing:
            self._turns.take(self._gate.prepare(key))
            return
        self._missing[key] = missing
        for each in missing:
            self._awaited.setdefault(each, []).append(key)

    def _unprepare(self, key: GangKey) -> None:
        """Drop what was prepared for a gang that will not be launched."""
        for thing in self._missing.pop(key, ()):
            self._awaited[thing].remove(key)
        self._gate.forget(key)

    def _came(self, buffer: int) -> None:
        """A buffer is there: send what others want of it, launch what needs it."""
        for export in self._exports.pop(buffer, ()):
            self._export(export)
        self._provide(buffer)
        if buffer in self._spills:
            self._spill(buffer)
        elif (there := self.store.get(buffer)) is not None and there.copy is not None:
            self._hear(Spilled((buffer,)))  # it came with its slice

    def _spill(self, number: int) -> None:
        """Have a buffer copied if it is there; else once it came."""
        if (buffer := self.store.get(number)) is not None:
            self._waiters[buffer.slice].spill(number, buffer)

    def _spilled(self, copied: Copied) -> list[News]:
        """Give up the memory of a buffer that was copied."""
        if copied.buffer not in self._spills:
            return []  # it was released in the meantime
        self._spills.discard(copied.buffer)
        self.store.spill(copied.buffer, copied.copy, copied.error)
        for export in self._exports.pop(copied.buffer, ()):
            self._export(export)
        return [Spilled((copied.buffer,))]

    def _provide(self, thing: Any) -> None:
        for key in self._awaited.pop(thing, ()):
            missing = self._missing[key]
            missing.discard(thing)
            if not missing:
                del self._missing[key]
                self._turns.take(self._gate.prepare(key))

    def _export(self, export: Export) -> None:
        buffer = self.store.get(export.buffer)
        if buffer is None or export.buffer in self._spills:
            self._exports.setdefault(export.buffer, []).append(export)
            return
        self._waiters[buffer.slice].export(buffer, export)

    def _turn_of(self, ticket: Ticket) -> Turn:
        prepare = self._prepares.pop(ticket.key, None)
        if prepare is None:
            return self._runs.launch(ticket.key, ticket.sequence)
        return self._launch_one(ticket.sequence, prepare)

    def _launch_one(self, sequence: int, prepare: Prepare) -> Iterator[jax.Array]:
        code = self.code[prepare.computation, prepare.slice]
        buffers = [self.store.get(each) for each in prepare.args]
        failure = failure_of(code, buffers)
        if failure is None and not isinstance(code, bytes):
            yield from code.pending([None if x is None else x.array for x in buffers])
            failure = self._start(sequence, prepare, code, buffers)
        if failure is not None:
            for out in prepare.outs:
                self.store.put(out, Buffer(prepare.slice, None, failure))
            self._hear(Over(Done(sequence, 0, ((0, failure),), ()), is_awaited=True))
        if self._exports or self._awaited or self._spills:  # mostly nobody waits
            for out in filter(self.store.__contains__, prepare.outs):
                self._came(out)

    def _start(
        self,
        sequence: int,
        prepare: Prepare,
        executable: Loaded,
        buffers: list[Buffer | None],
    ) -> bytes | None:
        """Launch; return why that was not possible, if so."""
        arrays = [each.array for each in buffers if each is not None]
        error = next((e.error for e in buffers if e is not None and e.error), None)
        started_ns = time.monotonic_ns()
        is_taking = bool(executable.computation.donated)
        try:
            for position in prepare.copied:
                arrays[position] = copy_of(arrays[position])
            with self.store.giving if is_taking else contextlib.nullcontext():
                outputs = executable(*arrays)  # type: ignore[arg-type]  # none is None
        except Exception as raised:  # noqa: BLE001 - whatever XLA refuses
            return pack_failure(executable, raised)
        made = [new_tuple(Buffer, (prepare.slice, x, error, None)) for x in outputs]
        self.store.put_all(prepare.outs, made)
        started = Started(0, executable, outputs, prepare.outs, error)
        self._waiters[prepare.slice].launched(
            Launched(sequence, (started,), (), started_ns)
        )
        return None
