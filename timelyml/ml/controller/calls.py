"""Calls of computations: from a client's word to orders for hosts, and back.

A call goes through three gates. Its memory can be asked for once it is known how much
that is, and once the calls before it have asked: who holds memory then waits for nobody
who has none. With its memory it begins: hosts are told to prepare, and the scheduler
gets it. It is ordered after all calls that make what it takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from timelyml.errors import ProgramError, RunStoppedError, TimelyError
from timelyml.ml.controller.awaited import Awaited
from timelyml.ml.controller.buffers import Buffers, no_such_slice
from timelyml.ml.controller.claims import (
    claim_of,
    copied_args,
    error_of,
    placed_args,
    waits_of,
)
from timelyml.ml.controller.code import Code
from timelyml.ml.controller.messages import Call, Failed
from timelyml.ml.controller.readers import Readers
from timelyml.ml.controller.records import CallRecord, Outbox, SliceRecord
from timelyml.ml.controller.turns import InTurn
from timelyml.ml.functions import Computation
from timelyml.ml.hosts import Done, Prepare
from timelyml.ml.scheduling import (
    Effect,
    GangDone,
    GangKey,
    Grant,
    Islands,
    Outcome,
    PlacedGang,
    ProgramDone,
    Report,
    SpreadGraph,
    tickets_of,
)
from timelyml.ml.store import Buffer, BufferState, Entry
from timelyml.runtime.failure import pack_error


class Calls:
    """All calls that are not over.

    Args:
        slices: All slices, also those that are lost.
        buffers: Those that calls take and make.
        code: Computations that are registered.
        outbox: Takes what follows.
        on_idle: Called with a slice when a call on it is over.
    """

    def __init__(
        self,
        slices: Mapping[str, SliceRecord],
        buffers: Buffers,
        code: Code,
        outbox: Outbox,
        on_idle: Callable[[SliceRecord], None],
    ) -> None:
        self.islands = Islands()
        self._slices = slices
        self._buffers = buffers
        self._code = code
        self._outbox = outbox
        self._on_idle = on_idle
        self._calls: dict[str, CallRecord] = {}
        self._by_sequence: dict[tuple[str, int], CallRecord] = {}
        self._graphs: dict[tuple[str, str, int], SpreadGraph] = {}
        self._unknown = Awaited()  # what has to be known to ask for memory
        self._unsettled = Awaited()  # calls that made arguments and are not over
        self._readers = Readers()
        self._turns = InTurn()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._calls)

    def start(self, client: int, message: Call) -> None:
        """Take a call; what cannot run fails its results, and nothing else."""
        try:
            self._start(client, message)
        except TimelyError as error:
            self._refuse(client, message, pack_error(error))

    def compiled(self, identity: str, slice_name: str) -> None:
        """Go on with calls that waited for what a computation takes."""
        self._soon(self._claim, self._unknown.provide((identity, slice_name)))

    def finished(self, island: str, host: int, done: Iterable[Done]) -> None:
        """Take a host's word that launches are over."""
        reports = []
        for each in done:
            call = self._by_sequence[island, each.sequence]
            call.error = call.error or each.error
            call.values.update(each.values)
            failed = each.error is not None
            reports.append(Report(str(host), each.sequence, each.device_ns, failed))
        self.follow(self.islands.finished(island, reports))

    def cancel(self, is_meant: Callable[[CallRecord], bool], error: bytes) -> None:
        """Drop calls of which nothing is ordered yet, because of `error`.

        Those that wait for memory are for `Memory` to refuse.
        """
        for call in [call for call in self._calls.values() if is_meant(call)]:
            self._cancel(call, error)

    def _cancel(self, call: CallRecord, error: bytes) -> None:
        if call.program not in self._calls or call.is_ordered:
            return
        if call.is_begun:
            call.error = call.error or error
            self.follow(self.islands.cancel(call.program))
        elif not call.is_claimed:
            self._drop(call, error)

    def lose(self, island: str, error: bytes) -> None:
        """End all calls on an island that is gone."""

        def is_there(call: CallRecord) -> bool:
            return self._slices[call.slice].island == island

        self.cancel(is_there, error)
        for call in self._calls.values():
            if is_there(call):
                call.error = call.error or error
        scheduler = self.islands.schedulers[island]
        self.follow(self.islands.follow(island, scheduler.restart()))

    def follow(self, effects: Iterable[tuple[str, Effect]]) -> None:
        """Do what the schedulers decided."""
        pending = list(effects)
        while pending:
            island, effect = pending.pop(0)
            if isinstance(effect, Grant):
                pending += self._grant(island, effect)
            elif isinstance(effect, GangDone):
                self._by_sequence.pop((island, effect.sequence), None)
            elif isinstance(effect, ProgramDone):
                self._finish(self._calls[effect.program], effect.outcome)

    def _start(self, client: int, message: Call) -> None:
        slice_, computation = self._target(client, message)
        directory = self._buffers.directory
        args = [directory.readable(client, each) for each in message.args]
        if error := error_of(args) or slice_.error:
            self._refuse(client, message, error)
            return
        program = str(next(self._numbers))
        is_placed = placed_args(args, computation, slice_, self._slices)
        copied = copied_args(client, args, is_placed, computation, directory)
        call = CallRecord(
            program, client, slice_.name, computation, args, message.outs, is_placed,
            copied, uses=list({id(each): each for each in args}.values()),
        )  # fmt: skip
        call.before = self._before(call)
        for entry in call.uses:
            directory.use(entry)
        for entry, is_here in zip(args, is_placed, strict=True):
            if not is_here:
                directory.use(entry, is_exported=True)
        self._readers.add(call)
        self._give_up_donated(client, message, computation)
        call.results = self._make_results(client, message, computation, program)
        for entry in call.results:
            directory.use(entry)  # until it is there
        self._calls[program] = call
        slice_.num_calls += 1
        self._claim_once_known(call, slice_)

    def _target(self, client: int, message: Call) -> tuple[SliceRecord, Computation]:
        slice_ = self._slices.get(message.slice)
        if slice_ is None or slice_.client != client or slice_.is_dropped:
            raise no_such_slice(message.slice)
        computation = self._code.get(message.computation)
        is_loaded = message.computation in slice_.loaded or slice_.error is not None
        if computation is None or not is_loaded:
            raise ProgramError(
                f"computation {message.computation[:12]} is not registered for slice "
                f"{message.slice!r}; got a call of it; expected it to be; register it",
                slice=message.slice,
            )
        return slice_, computation

    def _before(self, call: CallRecord) -> list[CallRecord]:
        """Calls that make what a call takes, or read what it destroys."""
        found = {
            producer.program: producer
            for entry in call.args
            if (producer := self._calls.get(entry.producer or "")) is not None
        }
        for number in call.taken:
            found.update((each.program, each) for each in self._readers.of(number))
        return [each for each in found.values() if not each.is_ordered]

    def _make_results(
        self, client: int, message: Call, computation: Computation, program: str
    ) -> list[Entry]:
        slice_, made = self._slices.get(message.slice), []
        results = zip(
            message.outs, computation.out_types, computation.out_specs, strict=False
        )
        for position, (out, array_type, spec) in enumerate(results):
            label = f"output {position} of {computation.name}"
            if slice_ is None:
                buffer = Buffer(out, message.slice, array_type, spec, 0, 0, label)
            else:
                buffer = slice_.new_buffer(out, array_type, spec, label)
            made.append(self._buffers.add(client, buffer, program))
        return made

    def _claim_once_known(self, call: CallRecord, slice_: SliceRecord) -> None:
        identity = call.computation.identity
        missing: list[object] = [e.program for e in call.before if not e.is_claimed]
        if self._code.needs(identity, slice_) is None:
            missing.append((identity, slice_.name))
        if self._unknown.wait(call.program, missing):
            self._soon(self._claim, [call.program])

    def _soon(
        self, action: Callable[[CallRecord], None], programs: Iterable[str]
    ) -> None:
        def act(program: str) -> None:
            if program in self._calls:  # it may be cancelled
                action(self._calls[program])

        self._turns.do([partial(act, program) for program in programs])

    def _claim(self, call: CallRecord) -> None:
        """Ask for the memory of a call."""
        slice_ = self._slices[call.slice]
        needs = self._code.needs(call.computation.identity, slice_)
        error = error_of(call.args) or slice_.error
        if error is not None or needs is None:
            self._drop(call, error)
            return
        call.is_claimed = True
        self._buffers.memory.admit(
            claim_of(call, slice_, needs),
            partial(self._begin, call),
            partial(self._drop, call),
        )
        self._soon(self._claim, self._unknown.provide(call.program))

    def _begin(self, call: CallRecord) -> None:
        """Let hosts prepare a call that has its memory, and have it ordered."""
        slice_ = self._slices[call.slice]
        if error := error_of(call.args) or slice_.error:
            self._buffers.memory.release(call.program, has_run=False)
            self._drop(call, error)
            return
        call.is_begun = True
        placed = []
        for position, entry in enumerate(call.args):
            if call.is_placed[position]:
                placed.append(entry)
                continue
            spec = call.computation.in_specs[position]
            placed.append(self._buffers.transfer(entry, slice_, spec))
            self._buffers.directory.use(placed[-1])
            call.uses.append(placed[-1])
        waits = waits_of(call, self._calls)
        key = GangKey(call.program, 0, 0)
        prepare = Prepare(
            key, call.computation.identity, call.slice,
            tuple(each.buffer.number for each in placed), call.copied, call.outs,
        )  # fmt: skip
        for slot, before in enumerate(waits):
            before.dependants.append((call.program, slot))
        call.num_waits = len(waits)
        call.before = []
        for host in slice_.hosts:
            self._outbox.book(host).prepares.append(prepare)
        graph = self._graph(call.computation.identity, slice_, len(waits))
        try:
            effects = self.islands.submit(str(call.client), call.program, graph)
        except TimelyError as refusal:
            self._drop(call, pack_error(refusal))
            return
        self.follow(effects)

    def _graph(self, identity: str, slice_: SliceRecord, waits: int) -> SpreadGraph:
        known = identity, slice_.name, waits
        if known not in self._graphs:
            gang = PlacedGang(slice_.island, identity, slice_.name, num_external=waits)
            self._graphs[known] = SpreadGraph([gang])
        return self._graphs[known]

    def _grant(self, island: str, grant: Grant) -> list[tuple[str, Effect]]:
        call = self._calls[grant.key.program]
        call.is_ordered = True
        self._by_sequence[island, grant.sequence] = call
        devices = self._slices[call.slice].devices_by_host
        for host, ticket in tickets_of(grant, devices).items():
            self._outbox.book(int(host)).tickets.append(ticket)
        self._readers.remove(call)
        return self._open_dependants(call)

    def _open_dependants(self, call: CallRecord) -> list[tuple[str, Effect]]:
        opened: list[tuple[str, Effect]] = []
        for program, slot in call.dependants:
            if program in self._calls:  # it may be cancelled
                self._calls[program].num_waits -= 1
                opened += self.islands.open(program, 0, slot)
        return opened

    def _drop(self, call: CallRecord, error: bytes | None) -> None:
        """End a call that the scheduler does not have."""
        self._unknown.forget(call.program)
        call.error = call.error or error
        self._finish(call, Outcome.FAILED)

    def _finish(self, call: CallRecord, outcome: Outcome) -> None:
        """Take note that a call is over; what it means depends on its arguments.

        News of those may come later, from other hosts.
        """
        if outcome is not Outcome.FINISHED:
            call.error = call.error or pack_error(
                RunStoppedError(f"a call did not run; got it {outcome}; call it again")
            )
        producers = {
            entry.producer
            for entry in call.args
            if entry.state is BufferState.PENDING and entry.producer in self._calls
        }
        if call.error or self._unsettled.wait(call.program, producers):
            self._settle(call)

    def _settle(self, call: CallRecord) -> None:
        """Say what became of the results of a call."""
        del self._calls[call.program]
        error = error_of(call.uses) or call.error
        if error is None:
            self._buffers.follow(self._buffers.directory.ready(call.outs))
            self._outbox.finished(call.client, call.outs, call.values)
        else:
            for entry in call.results:
                self._buffers.fail(entry, error)
            self._outbox.tell(call.client, Failed(1, call.outs, error))
        self._end(call)

    def _end(self, call: CallRecord) -> None:
        slice_ = self._slices[call.slice]
        if call.is_begun:
            self._buffers.memory.release(call.program, has_run=call.is_ordered)
        if call.is_begun and not call.is_ordered and slice_.error is None:
            for host in slice_.hosts:
                self._outbox.book(host).forgets.append(GangKey(call.program, 0, 0))
        if not call.is_ordered:
            self._readers.remove(call)
        for entry, is_here in zip(call.args, call.is_placed, strict=True):
            if not is_here:
                self._buffers.unuse(entry, is_exported=True)
        for entry in call.uses:
            self._buffers.unuse(entry)
        for entry in call.results:
            self._buffers.unuse(entry)
        if not call.is_ordered:
            self._free_dependants(call)
        self._soon(self._claim, self._unknown.provide(call.program))
        self._soon(self._settle, self._unsettled.provide(call.program))
        slice_.num_calls -= 1
        self._on_idle(slice_)

    def _free_dependants(self, call: CallRecord) -> None:
        """Let calls go on that waited for one which will not run, or end with it."""
        waiting = [self._calls.get(program) for program, _ in call.dependants]
        for other in waiting:
            if other is not None and (error := error_of(other.args)) is not None:
                self._cancel(other, error)
        self.follow(self._open_dependants(call))

    def _refuse(self, client: int, message: Call, error: bytes) -> None:
        """Fail the results of a call that does not even begin."""
        computation = self._code.get(message.computation)
        if computation is not None:
            for entry in self._make_results(client, message, computation, ""):
                self._buffers.fail(entry, error)
            self._give_up_donated(client, message, computation)
        self._outbox.tell(client, Failed(1, message.outs, error))

    def _give_up_donated(
        self, client: int, message: Call, computation: Computation
    ) -> None:
        """Take away from a client what it gave to a call."""
        for position in computation.donated:
            if position < len(message.args):
                number = message.args[position]
                self._buffers.follow(self._buffers.directory.give_up(client, number))
