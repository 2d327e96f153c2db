"""Dispatch: the gates that calls and programs go through, and what is heard of them.

Work goes through three gates. Its memory can be asked for once it is known how much
that is, and once the work before it has asked: who holds memory then waits for nobody
who has none. With its memory it begins: hosts are told to prepare, and the schedulers
get it. It is ordered after all work that makes what it takes.

What calls are made of is for their owners to know (`calls.py`, `programs.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from timelyml.errors import RunStoppedError, TimelyError
from timelyml.ml.controller.awaited import Awaited
from timelyml.ml.controller.barriers import Barriers
from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.claims import error_of, waits_of, work_before
from timelyml.ml.controller.clients import Clients
from timelyml.ml.controller.code import Code
from timelyml.ml.controller.deadlines import Deadlines
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.outcomes import Outcomes
from timelyml.ml.controller.readers import begin_reading, end_reading
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.controller.turns import InTurn
from timelyml.ml.controller.usage import DeviceTime
from timelyml.ml.controller.work import Work, is_final_part
from timelyml.ml.hosts import Done
from timelyml.ml.scheduling import (
    Effect,
    GangDone,
    Grant,
    Islands,
    Outcome,
    ProgramDone,
    Report,
    tickets_of,
)
from timelyml.ml.store import Buffer, BufferState
from timelyml.progress import new_tuple
from timelyml.runtime.failure import pack_error

_SLICE = "slice"  # what work waits for that is no computation: one that is closed


class Dispatch:
    """All work that is not over.

    Args:
        slices: All slices, also those that are lost.
        buffers: Those that work takes and makes.
        code: Computations that are registered.
        outbox: Takes what follows.
        on_idle: Called with a slice when work on it is over.
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
        self.device_time = DeviceTime()
        self.clients = Clients(self.islands, self.device_time)
        self._slices = slices
        self._buffers = buffers
        self._code = code
        self._outbox = outbox
        self._on_idle = on_idle
        self._works: dict[str, Work] = {}
        self.by_sequence: dict[tuple[str, int], tuple[Work, int]] = {}
        self._outcomes = Outcomes(slices, buffers, self.clients, outbox)
        self._unknown = Awaited()  # what has to be known to ask for memory
        self._unsettled = Awaited()  # work that made arguments and is not over
        self._barriers = Barriers(slices, buffers.held)
        self.num_moves = 0  # counted up before a slice stands elsewhere
        self._turns = InTurn()
        self._pending: deque[tuple[str, Effect]] = deque()
        self._parts_over: deque[tuple[Work, Mapping[int, bytes]]] = deque()
        self.deadlines = Deadlines(self.by_sequence, self.islands)

    def __len__(self) -> int:
        return len(self._works)

    def start(self, work: Work, outputs: Iterable[Buffer]) -> None:
        """Take work whose arguments are there or promised.

        Raises:
            AdmissionError: Its client has as much as it may.
        """
        self.take(work, outputs)
        self._turns.do(self._claim, [work.program])

    def take(self, work: Work, outputs: Iterable[Buffer]) -> None:
        """Take work made of parts, which its owner starts; the `final_part` ends it.

        Raises:
            AdmissionError: As `start`.
        """
        directory, admission = self._buffers.directory, self._buffers.admission
        outputs = list(outputs)
        if work.parent is None:
            admission.check_call(work.client, outputs, work.given)
            admission.begin_call(work.client)
        work.before = work_before(work, self._works)
        directory.use(work.uses)
        directory.use(work.exported, is_exported=True)
        begin_reading(work)
        self._buffers.follow(directory.give_up(work.client, work.given))
        work.results += self._buffers.add(work.client, outputs, work.program)
        directory.use(work.results)  # until they are there
        self._works[work.program] = work
        for name in work.slices:
            self._slices[name].num_calls += 1
        work.num_moves, work.since_s = self.num_moves, admission.now_s

    def close(self, slice_: SliceRecord, *, is_in_turn: bool) -> None:
        """Let nothing begin on a slice but, if `is_in_turn`, what came before."""
        self._barriers.close(slice_, self._works.values() if is_in_turn else ())

    def is_drained(self, slice_: SliceRecord) -> bool:
        """Whether all that was to begin on a closed slice has its memory, or is over."""
        waiting = self._buffers.memory.ledger.waiting_on(slice_.name)
        return not (waiting or self._barriers.is_passing(slice_))

    def reopen(self, slice_: SliceRecord) -> None:
        """Go on with work that waited for a slice; if it is still closed, to read it."""
        self._barriers.reopen(slice_)
        for thing in (_SLICE, *slice_.loaded):  # what is compiled elsewhere may be here
            self._turns.do(self._claim, self._unknown.provide((thing, slice_.name)))

    def parts_over(self) -> Iterator[tuple[Work, Mapping[int, bytes]]]:
        """Return the parts that are over, and the errors of what they did not make."""
        while self._parts_over:
            yield self._parts_over.popleft()

    def compiled(self, identity: str, slice_name: str) -> None:
        """Go on with work that waited for what a computation takes."""
        self._turns.do(self._claim, self._unknown.provide((identity, slice_name)))

    def finished(self, island: str, host: int, done: Iterable[Done]) -> None:
        """Take a host's word that gangs are over."""
        reports, name = list[Report](), str(host)
        for each in done:
            work, gang = self.by_sequence[island, each.sequence]
            if each.values:
                work.values.update(each.values)
            failed = work.owner.reported(work, gang, each)
            if each.num_left_out:
                self.device_time.left_out(work.client, each.num_left_out)
            fields = name, each.sequence, each.device_ns, failed
            reports.append(new_tuple(Report, fields))
        self.follow(self.islands.finished(island, reports))

    def cancel(self, is_meant: Callable[[Work], bool], error: bytes) -> None:
        """Drop what is not ordered of work; `Memory` refuses what waits for memory."""
        for work in [work for work in self._works.values() if is_meant(work)]:
            self._cancel(work, error)

    def lose(
        self, order: str, host: int, slices: Collection[str], error: bytes
    ) -> None:
        """End the work on slices that lost a host; what has no memory yet may go on."""
        for work in list(self._works.values()):
            if not work.is_claimed or not any(name in slices for name in work.slices):
                continue
            if work.is_apart and work.is_begun:
                work.error = work.error or error
                self.follow(self.islands.cancel_part(order, work.program))
            else:
                self._cancel(work, work.owner.refusal(work) or error)
                work.error = work.error or error
        scheduler = self.islands.schedulers[order]
        self.follow(self.islands.follow(order, scheduler.lose(str(host))))
        self._turns.do(self._claim, [x for x in self._works if self.is_waiting(x)])

    def find(self, program: str | None) -> Work | None:
        """Return the work of a name, if it is not over."""
        return None if program is None else self._works.get(program)

    def is_waiting(self, program: str | None) -> bool:
        """Whether this work is there and has not asked for its memory."""
        return program in self._unknown

    def follow(self, effects: Iterable[tuple[str, Effect]]) -> None:
        """Do what the schedulers decided."""
        is_inner = bool(self._pending)  # what ends lets others begin: in later places
        self._pending += effects
        while self._pending and not is_inner:
            island, effect = self._pending[0]
            if isinstance(effect, Grant):
                self._pending += self._grant(island, effect)
            elif isinstance(effect, GangDone):
                work, _ = self.by_sequence.pop((island, effect.sequence))
                work.device_ns += effect.device_ns
                self.device_time.charge(effect)
            elif isinstance(effect, ProgramDone):
                self._finish(self._works[effect.program], effect.outcome)
            self._pending.popleft()

    def _cancel(self, work: Work, error: bytes) -> None:
        if work.is_ordered or work.final_part or work.program not in self._works:
            return
        if work.is_begun:
            work.error = work.error or error
            self.follow(self.islands.cancel(work.program))
        elif not work.is_claimed:
            self._drop(work, error)

    def _unmet(self, work: Work) -> list[object]:
        """What has to be known or done before work may ask for its memory."""
        missing: list[object] = [
            each.program
            for each in work.before
            if not each.is_claimed and each.program in self._works
        ]
        missing += [
            code
            for code in work.owner.codes(work)
            if self._code.needs(code[0], self._slices[code[1]]) is None
        ]
        return missing + [(_SLICE, name) for name in self._barriers.of(work)]

    def _place_again(self, work: Work) -> bool:
        work.num_moves = self.num_moves
        before = work.exported
        end_reading(work)
        work.owner.place_again(work)
        begin_reading(work)
        self._buffers.directory.use(work.exported, is_exported=True)
        self._buffers.unuse(before, is_exported=True)
        return self._unknown.wait(work.program, self._unmet(work))

    def _claim(self, program: str) -> None:
        """Ask for the memory of work, once all is known for that."""
        work = self._works.get(program)
        if work is None or work.is_claimed:
            return  # it was cancelled, or let go on by two at once
        if error := work.owner.refusal(work):
            self._drop(work, error)
            return
        if not self._unknown.wait(work.program, self._unmet(work)):
            return
        if work.num_moves != self.num_moves and not self._place_again(work):
            return
        work.is_claimed = True
        self._barriers.passed(work)
        self._buffers.memory.admit(
            work.owner.claim(work),
            partial(self._begin, work),
            partial(self._drop, work),
        )
        self._turns.do(self._claim, self._unknown.provide(work.program))
        if is_final_part(work):
            work.parent.is_claimed = True
            self._turns.do(self._claim, self._unknown.provide(work.parent.program))

    def _begin(self, work: Work) -> None:
        """Let hosts prepare work that has its memory, and have it ordered."""
        if error := work.owner.refusal(work):
            self._buffers.memory.release(work.program, has_run=False)
            self._drop(work, error)
            return
        work.is_begun = True
        work.owner.prepare(work)
        waits = waits_of(work, self._works) if work.before else []
        work.before = []
        work.num_waits = len(waits)
        graph, inputs = work.owner.graph(work, len(waits))
        for slot, each in enumerate(waits):
            each.dependants.extend([(work.program, gang, slot) for gang, _ in inputs])
        try:
            effects = self.islands.submit(
                str(work.client), work.program, graph,
                priority=self.clients.priority(work.client), is_apart=work.is_apart,
            )  # fmt: skip
        except TimelyError as refusal:
            self._drop(work, pack_error(refusal))
            return
        self.follow(effects)

    def _grant(self, island: str, grant: Grant) -> list[tuple[str, Effect]]:
        work = self._works[grant.key.program]
        work.owner.granted(work, grant)
        self.by_sequence[island, grant.sequence] = work, grant.key.gang
        self.deadlines.watch(island, grant, work)
        for host, ticket in tickets_of(grant).items():
            self._outbox.book(int(host)).tickets.append(ticket)
        if not work.is_ordered:
            return []
        end_reading(work)
        opened = self._open_dependants(work)
        if is_final_part(work):
            work.parent.is_ordered = True
            end_reading(work.parent)
            opened += self._open_dependants(work.parent)
        return opened

    def _open_dependants(self, work: Work) -> list[tuple[str, Effect]]:
        opened: list[tuple[str, Effect]] = []
        if not work.dependants:
            return opened
        for program in {program for program, _, _ in work.dependants}:
            if program in self._works:  # it may be cancelled
                self._works[program].num_waits -= 1
        for program, gang, slot in work.dependants:
            opened += self.islands.open(program, gang, slot)
        return opened

    def _drop(self, work: Work, error: bytes | None) -> None:
        """End work that the scheduler does not have."""
        self._unknown.forget(work.program)
        work.error = work.error or error
        self._finish(work, Outcome.FAILED)

    def _finish(self, work: Work, outcome: Outcome) -> None:
        """Take note that work is over; what it means depends on its arguments.

        News of those may come later, from other hosts.
        """
        if outcome is not Outcome.FINISHED:
            work.error = work.error or pack_error(
                RunStoppedError(f"a call did not run; got it {outcome}; call it again")
            )
        pending = BufferState.PENDING
        waited_for = [each.producer for each in work.args if each.state is pending]
        producers = [x for x in waited_for if x is not None and x in self._works]
        is_clear = work.error is not None and not (work.is_apart and work.is_begun)
        if is_clear or self._unsettled.wait(work.program, producers):
            self.settle(work)

    def settle(self, work: Work) -> None:
        """Say what became of the results of work, once."""
        if self._works.pop(work.program, None) is None:
            return
        if work.parent is None or is_final_part(work):
            self._buffers.admission.end_call(work.client)
        self._barriers.passed(work)
        good, errors = self._outcomes.of(work)
        work.owner.ended(work)
        if work.parent is not None and not is_final_part(work):
            self._parts_over.append((work, errors))
            self._end(work)
            return
        self._outcomes.tell(work, good, errors)
        self._end(work)
        if is_final_part(work):
            del self._works[work.parent.program]
            self._end(work.parent)

    def _end(self, work: Work) -> None:
        if work.is_begun:
            self._buffers.memory.release(work.program, has_run=work.has_run)
            if not work.is_ordered:
                work.owner.forget(work)
        if not work.is_ordered:
            end_reading(work)
        if work.exported:
            self._buffers.unuse(work.exported, is_exported=True)
        self._buffers.unuse([*work.uses, *work.results])
        if not work.is_ordered:
            self._free_dependants(work)
        self._turns.do(self._claim, self._unknown.provide(work.program))
        late = self._unsettled.provide(work.program)
        self._turns.do(self.settle, [self._works[x] for x in late if x in self._works])
        for name in work.slices:
            slice_ = self._slices[name]
            slice_.num_calls -= 1
            self._on_idle(slice_)

    def _free_dependants(self, work: Work) -> None:
        """Let work go on that waited for some which will not run, or end with it."""
        for program, _, _ in work.dependants:
            other = self._works.get(program)
            if other is None or other.is_apart:
                continue
            if (error := error_of(other.args)) is not None:
                self._cancel(other, error)
        self.follow(self._open_dependants(work))
