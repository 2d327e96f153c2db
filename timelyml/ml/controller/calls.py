"""Calls of computations: from a client's word to orders for hosts, and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

from timelyml.errors import (
    BufferLostError,
    HandleError,
    ProgramError,
    RunStoppedError,
    TimelyError,
)
from timelyml.ml.controller.buffers import Buffers, no_such_slice
from timelyml.ml.controller.messages import Call, Failed
from timelyml.ml.controller.records import (
    BufferRecord,
    CallRecord,
    Outbox,
    SliceRecord,
    State,
)
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
from timelyml.runtime.failure import pack_error


class Calls:
    """All calls that are not over.

    Args:
        slices: All slices, also those that are lost.
        buffers: The directory.
        computations: Those that are registered, by identity.
        outbox: Takes what follows.
        on_idle: Called with a slice when a call on it is over.
    """

    def __init__(
        self,
        slices: Mapping[str, SliceRecord],
        buffers: Buffers,
        computations: Mapping[str, Computation],
        outbox: Outbox,
        on_idle: Callable[[SliceRecord], None],
    ) -> None:
        self.islands = Islands()
        self._slices = slices
        self._buffers = buffers
        self._computations = computations
        self._outbox = outbox
        self._on_idle = on_idle
        self._calls: dict[str, CallRecord] = {}
        self._by_sequence: dict[tuple[str, int], CallRecord] = {}
        self._graphs: dict[tuple[str, str, int], SpreadGraph] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._calls)

    def start(self, client: int, message: Call) -> None:
        """Take a call; what cannot run fails its results, and nothing else."""
        try:
            self._start(client, message)
        except TimelyError as error:
            self._refuse(client, message, pack_error(error))

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
        """Drop calls of which nothing is ordered yet, because of `error`."""
        for call in [call for call in self._calls.values() if is_meant(call)]:
            if not call.is_ordered:
                call.error = call.error or error
                self.follow(self.islands.cancel(call.program))

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
                self._finish(self._calls.pop(effect.program), effect.outcome)

    def _start(self, client: int, message: Call) -> None:
        slice_, computation = self._target(client, message)
        args = [self._argument(client, each) for each in message.args]
        failed = next((each.error for each in args if each.error is not None), None)
        if failed is not None or slice_.error is not None:
            self._refuse(client, message, failed or slice_.error or b"")
            return
        placed, exported = self._placed(args, slice_, computation)
        copied = self._give_up_donated(client, args, placed, computation)
        program = str(next(self._numbers))
        call = CallRecord(
            program, client, slice_.name,
            tuple({id(each): each for each in (*args, *placed)}.values()),
            exported, message.outs,
        )  # fmt: skip
        for record in call.uses:
            self._buffers.use(record)
        for record in exported:
            record.num_exports += 1
        self._make_results(client, message, computation, program)
        waits = self._waits(args, call)
        graph = self._graph(computation.identity, slice_, len(waits))
        key = GangKey(program, 0, 0)
        prepare = Prepare(
            key, computation.identity, slice_.name,
            tuple(each.buffer for each in placed), copied, message.outs,
        )  # fmt: skip
        call.num_waits = len(waits)
        self._calls[program] = call
        slice_.num_calls += 1
        for slot, producer in enumerate(waits):
            producer.dependants.append((program, slot))
        for host in slice_.hosts:
            self._outbox.book(host).prepares.append(prepare)
        try:
            effects = self.islands.submit(str(client), program, graph)
        except TimelyError as error:
            call.error = pack_error(error)
            self._finish(self._calls.pop(program), Outcome.FAILED)
            return
        self.follow(effects)

    def _target(self, client: int, message: Call) -> tuple[SliceRecord, Computation]:
        slice_ = self._slices.get(message.slice)
        if slice_ is None or slice_.client != client or slice_.is_dropped:
            raise no_such_slice(message.slice)
        if message.computation not in slice_.loaded and slice_.error is None:
            raise ProgramError(
                f"computation {message.computation[:12]} is not registered for slice "
                f"{message.slice!r}; got a call of it; expected it to be; register it",
                slice=message.slice,
            )
        return slice_, self._computations[message.computation]

    def _argument(self, client: int, buffer: int) -> BufferRecord:
        record = self._buffers.get(buffer)
        if record is None or record.client != client or not record.is_held:
            raise HandleError(
                "an argument is not there; got a buffer that was released, donated or "
                "never made; expected one that its client still holds",
                buffer=buffer,
            )
        return record

    def _placed(
        self, args: list[BufferRecord], slice_: SliceRecord, computation: Computation
    ) -> tuple[list[BufferRecord], tuple[BufferRecord, ...]]:
        """Bring arguments to where the computation wants them; return what moves too."""
        placed, exported = [], []
        for record, spec in zip(args, computation.in_specs, strict=True):
            if (record.slice, record.spec) == (slice_.name, spec):
                placed.append(record)
            else:
                placed.append(self._buffers.transfer(record, slice_, spec))
                exported.append(record)
        return placed, tuple(exported)

    def _give_up_donated(
        self,
        client: int,
        args: list[BufferRecord],
        placed: list[BufferRecord],
        computation: Computation,
    ) -> tuple[int, ...]:
        """Let go of what is donated; return what has to be copied, as others use it.

        A call before this one on the same slice needs no copy: XLA itself waits.
        """
        copied = []
        for position in computation.donated:
            record = placed[position]
            is_shared = sum(each is record for each in placed) > 1
            if is_shared or record.num_exports or record.client not in (0, client):
                copied.append(position)
        for position in computation.donated:
            args[position].is_held = False
        return tuple(copied)

    def _make_results(
        self, client: int, message: Call, computation: Computation, program: str
    ) -> None:
        results = zip(
            message.outs, computation.out_types, computation.out_specs, strict=False
        )
        for out, array_type, spec in results:
            self._buffers.add(
                BufferRecord(
                    out,
                    client,
                    message.slice,
                    array_type,
                    spec,
                    State.PENDING,
                    producer=program,
                    num_uses=1 if program else 0,  # until it is there
                )
            )

    def _waits(self, args: list[BufferRecord], call: CallRecord) -> list[CallRecord]:
        """Calls that have to be ordered before this one, and might not be otherwise.

        On one slice the calls of a client that wait for nothing are ordered as they
        come.
        """
        found = {}
        for record in args:
            producer = self._calls.get(record.producer or "")
            if producer is None or producer.is_ordered:
                continue
            is_in_line = (
                not producer.num_waits
                and producer.slice == call.slice
                and producer.client == call.client
            )
            if not is_in_line:
                found[producer.program] = producer
        return list(found.values())

    def _graph(self, identity: str, slice_: SliceRecord, waits: int) -> SpreadGraph:
        known = identity, slice_.name, waits
        graph = self._graphs.get(known)
        if graph is None:
            gang = PlacedGang(slice_.island, identity, slice_.name, num_external=waits)
            graph = self._graphs[known] = SpreadGraph([gang])
        return graph

    def _grant(self, island: str, grant: Grant) -> list[tuple[str, Effect]]:
        call = self._calls[grant.key.program]
        call.is_ordered = True
        self._by_sequence[island, grant.sequence] = call
        devices = self._slices[call.slice].devices_by_host
        for host, ticket in tickets_of(grant, devices).items():
            self._outbox.book(int(host)).tickets.append(ticket)
        opened: list[tuple[str, Effect]] = []
        for program, slot in call.dependants:
            if program in self._calls:  # it may be cancelled
                self._calls[program].num_waits -= 1
                opened += self.islands.open(program, 0, slot)
        return opened

    def _finish(self, call: CallRecord, outcome: Outcome) -> None:
        error = next((each.error for each in call.uses if each.error), call.error)
        if error is None and outcome is not Outcome.FINISHED:
            error = pack_error(
                RunStoppedError(f"a call did not run; got it {outcome}; call it again")
            )
        records = [self._buffers.get(out) for out in call.outs]
        for record in records:
            if record is not None and record.state is State.PENDING:
                if error is None:
                    self._buffers.ready(record)
                else:
                    self._buffers.fail(record, error)
        if error is None:
            self._outbox.finished(call.client, call.outs, call.values)
        else:
            self._outbox.tell(call.client, Failed(1, call.outs, error))
        self._end(call)

    def _end(self, call: CallRecord) -> None:
        slice_ = self._slices[call.slice]
        if not call.is_ordered and slice_.error is None:
            for host in slice_.hosts:
                self._outbox.book(host).forgets.append(GangKey(call.program, 0, 0))
        for record in call.exported:
            record.num_exports -= 1
        for record in call.uses:
            self._buffers.unuse(record)
        for result in map(self._buffers.get, call.outs):
            if result is not None:
                self._buffers.unuse(result)
        if not call.is_ordered and call.dependants:
            # Those that wait for it will never be ordered either.
            error = call.error or pack_error(
                BufferLostError("a call before it was dropped")
            )
            waiting = {program for program, _ in call.dependants}
            self.cancel(lambda other: other.program in waiting, error)
        slice_.num_calls -= 1
        self._on_idle(slice_)

    def _refuse(self, client: int, message: Call, error: bytes) -> None:
        """Fail the results of a call that does not even begin."""
        computation = self._computations.get(message.computation)
        if computation is not None:
            self._make_results(client, message, computation, "")
            # The client has given them up already.
            self._buffers.drop(client, _donated(message, computation))
        for out in message.outs:
            record = self._buffers.get(out)
            if record is not None:
                self._buffers.fail(record, error)
        self._outbox.tell(client, Failed(1, message.outs, error))


def _donated(message: Call, computation: Computation) -> list[int]:
    return [
        message.args[position]
        for position in computation.donated
        if position < len(message.args)
    ]
