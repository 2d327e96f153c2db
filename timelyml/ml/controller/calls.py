"""Calls of single computations: what they take and make, and what hosts are told."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from timelyml.errors import TimelyError
from timelyml.ml.controller.buffers import Buffers, no_such_slice
from timelyml.ml.controller.claims import (
    claim_of,
    copied_args,
    error_of,
    placed_args,
)
from timelyml.ml.controller.code import Code, not_registered
from timelyml.ml.controller.dispatching import Dispatch
from timelyml.ml.controller.messages import Call
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.records import SliceRecord, label_of
from timelyml.ml.controller.work import CallRecord
from timelyml.ml.functions import Computation
from timelyml.ml.hosts import NO_NEEDS, Done, Prepare
from timelyml.ml.scheduling import GangKey, Grant, PlacedGang, SpreadGraph
from timelyml.ml.store import Buffer, Claim
from timelyml.progress import new_tuple
from timelyml.runtime.failure import pack_error


class Calls:
    """Calls of computations.

    Args:
        dispatch: Takes them through all gates.
        slices: All slices, also those that are lost.
        buffers: Those that calls take and make.
        code: Computations that are registered.
        outbox: Takes what hosts are told.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        slices: Mapping[str, SliceRecord],
        buffers: Buffers,
        code: Code,
        outbox: Outbox,
    ) -> None:
        self._dispatch = dispatch
        self._slices = slices
        self._buffers = buffers
        self._code = code
        self._outbox = outbox
        self._graphs: dict[tuple[str, str, str, int], SpreadGraph] = {}
        self._numbers = itertools.count(1)
        # By client, slice and order that it declared, until it is ordered or over.
        self._last: dict[tuple[int, str, int], CallRecord] = {}

    def start(self, client: int, message: Call) -> None:
        """Take a call; what cannot run fails its results, and nothing else."""
        try:
            self._start(client, message)
        except TimelyError as error:
            self._refuse(client, message, pack_error(error))

    def forget_slice(self, slice_name: str) -> None:
        """Drop what is kept for calls on a slice which is gone."""
        for key in [key for key in self._graphs if key[1] == slice_name]:
            del self._graphs[key]

    def place_again(self, work: CallRecord) -> None:
        """Move what does not lie any more where a call wants it."""
        slice_ = self._slices[work.slice]
        now = placed_args(work.args, work.computation, slice_, self._slices)
        pairs = zip(work.is_placed, now, strict=True)
        # What was to be moved still can be; others count on its not being taken.
        work.place(tuple([before and still for before, still in pairs]))
        work.copied = tuple(each for each in work.copied if work.is_placed[each])

    def codes(self, work: CallRecord) -> tuple[tuple[str, str], ...]:
        """Return what has to be compiled for a call."""
        return ((work.computation.identity, work.slice),)

    def refusal(self, work: CallRecord) -> bytes | None:
        """Return why a call cannot begin, if so."""
        slice_ = self._slices[work.slice]
        wrong = error_of(work.args) or slice_.error
        return wrong or self._code.error(work.computation.identity, slice_)

    def claim(self, work: CallRecord) -> Claim:
        """Return the memory that a call takes."""
        slice_ = self._slices[work.slice]
        needs = self._code.needs(work.computation.identity, slice_) or NO_NEEDS
        return claim_of(work, slice_, needs)

    def prepare(self, work: CallRecord) -> None:
        """Move what a call takes from elsewhere, and let hosts prepare it."""
        slice_ = self._slices[work.slice]
        placed = work.args
        if work.exported:
            placed = list(placed)
            for position, entry in enumerate(work.args):
                if not work.is_placed[position]:
                    spec = work.computation.in_specs[position]
                    placed[position] = self._buffers.transfer(entry, slice_, spec)
                    self._buffers.directory.use([placed[position]])
                    work.uses.append(placed[position])
        fields = (
            new_tuple(GangKey, (work.program, 0, 0)), work.computation.identity,
            work.slice, tuple([each.number for each in placed]), work.copied,
            work.outs,
        )  # fmt: skip
        prepare: Prepare = new_tuple(Prepare, fields)
        for host in slice_.hosts:
            self._outbox.book(host).prepares.append(prepare)

    def graph(
        self, work: CallRecord, num_waits: int
    ) -> tuple[SpreadGraph, tuple[tuple[int, int], ...]]:
        """Return the one gang of a call, and its inputs from elsewhere."""
        identity = work.computation.identity
        order = self._slices[work.slice].order
        known = identity, work.slice, order, num_waits
        if known not in self._graphs:
            gang = PlacedGang(order, identity, work.slice, num_external=num_waits)
            self._graphs[known] = SpreadGraph([gang])
        return self._graphs[known], ((0, 0),)

    def limit(self, work: CallRecord, gang: int) -> tuple[float, str] | None:
        """Return how long a call may run, if it states that, and what it is."""
        del gang
        limit_s = work.computation.deadline_s
        if limit_s is None:
            return None
        return limit_s, f"computation {work.computation.name!r}"

    def is_alone(self, work: CallRecord, gang: int) -> bool:
        """Return that there is nothing else of it."""
        del work, gang
        return True

    def described(
        self, work: CallRecord, gang: int
    ) -> tuple[str, str, tuple[int, ...]]:
        """Return what a call is of, where it runs, and what it makes."""
        del gang
        return work.computation.name, work.slice, work.outs

    def overdue(self, work: CallRecord, gang: int, error: bytes) -> None:
        """Hear that it runs for too long."""
        del gang
        work.error = work.error or error

    def granted(self, work: CallRecord, grant: Grant) -> None:
        """Note that a call is ordered."""
        del grant
        work.is_ordered = True
        self._let_pass(work)

    def reported(self, work: CallRecord, gang: int, done: Done) -> bool:
        """Note what a host says of a call; return whether it failed there."""
        del gang
        if done.errors:
            work.error = work.error or done.errors[0][1]
        return bool(done.errors)

    def output_errors(self, work: CallRecord) -> dict[int, bytes]:
        """Return the error of a call for all that it returns, if it has one."""
        error = error_of(work.uses) or work.error
        return {} if error is None else dict.fromkeys(work.outs, error)

    def ended(self, work: CallRecord) -> None:
        """Have nothing wait for a call any more."""
        self._let_pass(work)

    def forget(self, work: CallRecord) -> None:
        """Have hosts drop a call that will not be launched."""
        slice_ = self._slices[work.slice]
        for host in slice_.hosts if slice_.error is None else ():
            self._outbox.book(host).forgets.append(GangKey(work.program, 0, 0))

    def _start(self, client: int, message: Call) -> None:
        slice_, computation = self._target(client, message)
        directory = self._buffers.directory
        args = [directory.readable(client, each) for each in message.args]
        if error := error_of(args) or slice_.error:
            self._refuse(client, message, error)
            return
        is_placed = placed_args(args, computation, slice_, self._slices)
        copied = copied_args(client, args, is_placed, computation, directory)
        key = client, slice_.name, message.order
        before = self._last.get(key) if message.order else None
        call = CallRecord(
            str(next(self._numbers)), client, self, computation, args,
            where=slice_.name, outs=message.outs, is_placed=is_placed, copied=copied,
            order=message.order,
        )  # fmt: skip
        if before is not None:
            call.before.append(before)
        self._dispatch.start(call, self._outputs(message, computation))
        if message.order and not call.is_ordered and call.error is None:
            self._last[key] = call

    def _let_pass(self, work: CallRecord) -> None:
        """Have the next call of its order wait for it no more."""
        key = work.client, work.slice, work.order
        if work.order and self._last.get(key) is work:
            del self._last[key]

    def _target(self, client: int, message: Call) -> tuple[SliceRecord, Computation]:
        slice_ = self._slices.get(message.slice)
        if slice_ is None or slice_.client != client or slice_.is_dropped:
            raise no_such_slice(message.slice)
        computation = self._code.get(message.computation)
        is_loaded = message.computation in slice_.loaded or slice_.error is not None
        if computation is None or not is_loaded:
            raise not_registered(message.computation, message.slice)
        return slice_, computation

    def _outputs(self, message: Call, computation: Computation) -> list[Buffer]:
        slice_ = self._slices.get(message.slice)
        if slice_ is not None:
            return slice_.new_results(message.outs, computation)
        results = zip(
            message.outs, computation.out_types, computation.out_specs, strict=False
        )
        where = message.slice
        return [
            Buffer(out, where, array_type, spec, 0, 0, label_of(position, computation))
            for position, (out, array_type, spec) in enumerate(results)
        ]

    def _refuse(self, client: int, message: Call, error: bytes) -> None:
        computation = self._code.get(message.computation)
        outputs: list[Buffer] = []
        given: list[int] = []
        if computation is not None:
            outputs = self._outputs(message, computation)
            given = [
                message.args[position]
                for position in computation.donated
                if position < len(message.args)
            ]
        self._buffers.refuse(client, message.outs, outputs, given, error)
