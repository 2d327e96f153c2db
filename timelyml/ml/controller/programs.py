"""Programs: registered once, lowered for where their slices stand, and called by number.

A call costs one entry for each input and output and, for each host, one message with
their numbers; what is between is known to the hosts alone.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from timelyml.errors import HandleError, ProgramError, TimelyError
from timelyml.ml.controller.buffers import Buffers, no_such_slice
from timelyml.ml.controller.code import Code
from timelyml.ml.controller.collected import Collected
from timelyml.ml.controller.cuts import Ancestry, Cut, RegisteredProgram
from timelyml.ml.controller.dispatching import Dispatch
from timelyml.ml.controller.flow_calls import RegisteredFlow
from timelyml.ml.controller.flows import Flows
from timelyml.ml.controller.messages import CallProgram, RegisterProgram
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.program_calls import ProgramRecord
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.controller.work import Work
from timelyml.ml.hosts import Cancel, Done, LoadProgram, Run
from timelyml.ml.programs import LoweredProgram, Lowerings, Value
from timelyml.ml.programs.flows import WholeFlow
from timelyml.ml.programs.lowering import lower_again
from timelyml.ml.scheduling import Dispatch as When
from timelyml.ml.scheduling import Grant, SpreadGraph
from timelyml.ml.store import Buffer, Claim, Entry
from timelyml.runtime.failure import pack_error, unpack_error


class Programs:
    """Programs that clients registered, and their calls.

    Args:
        dispatch: Takes calls through all gates.
        slices: All slices, also those that are lost.
        buffers: Those that calls take and make.
        code: Computations that are registered.
        outbox: Takes what hosts are told.

    Attributes:
        collected: Those that are calls which only travel together.
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
        self._lowerings = Lowerings(make=lower_again)
        self._known: dict[tuple[int, int], RegisteredProgram | RegisteredFlow] = {}
        self._cut_numbers = itertools.count(1)
        self._call_numbers = itertools.count(1)
        self.collected = Collected(buffers, outbox, dispatch.find)
        self._flows = Flows(dispatch, buffers, slices, self)

    def register(self, client: int, message: RegisterProgram) -> None:
        """Learn a program."""
        when = When.SEQUENTIAL if message.is_sequential else When.PARALLEL
        program = pickle.loads(message.pickled)  # noqa: S301 - of an authenticated client
        self._known[client, message.program] = (
            RegisteredFlow(program, when, message.given)
            if isinstance(program, WholeFlow)
            else RegisteredProgram(program, when, message.given, message.is_collected)
        )

    def forget_slice(self, slice_name: str) -> None:
        """Drop the programs that use a slice which is gone."""
        self._lowerings.forget(slice_name)
        for key, known in list(self._known.items()):
            if slice_name in known.slices:
                del self._known[key]

    def start(self, client: int, message: CallProgram) -> None:
        """Take a call; what cannot run at all fails its results, and nothing else."""
        known = self._known.get((client, message.program))
        outputs: list[Buffer] = []
        given: list[int] = []
        try:
            if known is None:
                raise ProgramError(
                    f"program {message.program} is not registered; got a call of it; "
                    f"expected it to be; register it, and keep its slices"
                )
            given = [message.inputs[each] for each in known.given]
            outputs = self.outputs(message.outs, known.outputs, known.name)
            args = self._args(client, message, known)
            self._check_slices(client, known.slices)
            if isinstance(known, RegisteredFlow):
                self._flows.start(
                    f"p{next(self._call_numbers)}", client, known, args, outputs
                )
            else:
                self._start(client, known, args, outputs)
        except TimelyError as error:
            refused = pack_error(error)
            self._buffers.refuse(client, message.outs, outputs, given, refused)

    def place_again(self, work: ProgramRecord) -> None:
        """Lower a call for where its slices stand now."""
        if self.refusal(work) is None:
            work.lowered = self._lowered(work.known)
            work.cut = self._cut(work.known, work.lowered)

    def go_on(self) -> None:
        """Take the next steps of programs that have branches and loops."""
        self._flows.go_on()

    def codes(self, work: ProgramRecord) -> tuple[tuple[str, str], ...]:
        """Return what has to be compiled for a call."""
        return work.known.codes

    def refusal(self, work: ProgramRecord) -> bytes | None:
        """Return why a call cannot begin: a slice of it is gone."""
        for name in work.known.slices:
            error = self._slices[name].error
            if error is not None:
                return error
        return None

    def claim(self, work: ProgramRecord) -> Claim:
        """Return the memory that a call takes."""
        copied: dict[str, int] = {}
        for number in set(work.known.destroyed) & {*work.copied, *work.cut.sent}:
            buffer = work.args[number].buffer
            before = copied.get(buffer.placement, 0)
            copied[buffer.placement] = before + buffer.size_bytes
        scratch = work.known.scratch(self._code, self._slices)
        return Claim(
            work.client,
            work.program,
            tuple([entry.number for entry in work.uses]),
            work.taken,
            tuple([entry.buffer for entry in work.results]),
            {name: size + copied.get(name, 0) for name, size in scratch.items()},
            f"a call of program {work.lowered.name!r}",
        )

    def prepare(self, work: ProgramRecord) -> None:
        """Let hosts prepare all blocks of a call, unless it is sequential."""
        inputs = tuple([entry.number for entry in work.args])
        failed = tuple(
            (number, entry.error)
            for number, entry in enumerate(work.args)
            if entry.error is not None
        )
        first_move = self._buffers.numbers(len(work.lowered.moves)).start
        work.run = Run(
            work.program,
            work.cut.number,
            inputs,
            work.outs,
            work.copied,
            first_move,
            failed,
            work.matrix,
        )
        is_sequential = work.known.dispatch is When.SEQUENTIAL
        for host in work.cut.first_hosts if is_sequential else work.cut.hosts:
            self._tell(work, host)

    def graph(
        self, work: ProgramRecord, num_waits: int
    ) -> tuple[SpreadGraph, list[tuple[int, int]]]:
        """Return the blocks of a call as gangs, and their inputs from elsewhere."""
        return work.cut.graph(num_waits), work.cut.roots

    def limit(self, work: ProgramRecord, gang: int) -> tuple[float, str] | None:
        """Return how long a block may run, if all of it states that, and what it is."""
        return work.cut.limits.get(gang)

    def is_alone(self, work: ProgramRecord, gang: int) -> bool:
        """Whether all other blocks that are ordered are over."""
        blocks = work.cut.blocks
        return all(
            work.reports.get(x, 0) >= len(self._slices[blocks[x].slice].hosts)
            for x in work.ordered
            if x != gang
        )

    def described(
        self, work: ProgramRecord, gang: int
    ) -> tuple[str, str, tuple[int, ...]]:
        """Return what a block is of, where it runs, and what it makes of the results."""
        name, outputs = work.cut.made[gang]
        slice_name = work.cut.blocks[gang].slice
        return name, slice_name, tuple(work.outs[each] for each in outputs)

    def overdue(self, work: ProgramRecord, gang: int, error: bytes) -> None:
        """Hear that a block runs for too long."""
        for each in work.cut.blocks[gang].gangs:
            work.errors.setdefault(each, error)

    def granted(self, work: ProgramRecord, grant: Grant) -> None:
        """Note that a block is ordered; tell its hosts of the call if they do not know."""
        work.ordered.add(grant.key.gang)
        if len(work.told) < len(work.cut.hosts):
            for host, _ in grant.positions:
                self._tell(work, int(host))

    def reported(self, work: ProgramRecord, gang: int, done: Done) -> bool:
        """Note what a host says of a block."""
        work.reports[gang] = work.reports.get(gang, 0) + 1
        for each, error in done.errors:
            work.errors.setdefault(each, error)
        num_launches = len(work.cut.blocks[gang].gangs)
        is_alone = self._dispatch.clients.is_alone(work, self._slices)
        work.known.measured(done.device_ns, num_launches, is_alone=is_alone)
        return False

    def output_errors(self, work: ProgramRecord) -> dict[int, bytes]:
        """Return the error of each output that depends on something that failed."""
        error = work.error
        if error is not None and not work.is_begun:
            return dict.fromkeys(work.outs, error)
        failed = work.errors if error is None else self._failed(work, error)
        if not failed and all(entry.error is None for entry in work.args):
            return {}
        ancestry = Ancestry(work.lowered)
        output_errors = {}
        for number, out in enumerate(work.outs):
            inputs, gangs = ancestry.of(number)
            causes = [work.args[each].error for each in sorted(inputs)]
            causes += [work.placed(failed[each]) for each in gangs if each in failed]
            cause = next((each for each in causes if each is not None), None)
            if cause is not None:
                output_errors[out] = cause
        return output_errors

    def ended(self, work: ProgramRecord) -> None:
        """Nothing is kept for a call."""

    def forget(self, work: ProgramRecord) -> None:
        """Have hosts drop what is left of a call."""
        cancel = Cancel(work.program, tuple(sorted(work.ordered)))
        for host in work.told:
            self._outbox.book(host).cancels.append(cancel)

    def _failed(self, work: ProgramRecord, error: bytes) -> dict[int, bytes]:
        """Return errors of gangs, those included that an error kept from running.

        Of what did not run on all of its hosts, it is what the others failed of too.
        """
        failed = dict(work.errors)
        for number, block in enumerate(work.cut.blocks):
            if work.reports.get(number, 0) < len(self._slices[block.slice].hosts):
                failed.update(dict.fromkeys(block.gangs, error))
        return failed

    def _start(
        self,
        client: int,
        known: RegisteredProgram,
        args: list[Entry],
        outputs: list[Buffer],
    ) -> None:
        directory = self._buffers.directory
        taken = [
            number
            for number in known.given
            if directory.may_donate(client, args[number])
        ]
        work = self._record(client, known, args, outputs, taken)
        self._dispatch.start(work, outputs)

    def part(
        self,
        whole: Work,
        known: RegisteredProgram,
        args: list[Entry],
        outputs: Sequence[Buffer],
        taken: Collection[int],
        *,
        where: str,
        matrix: Any = None,
    ) -> ProgramRecord:
        """Return a part of other work, to be started.

        Args:
            whole: What it is part of.
            known: What it runs.
            args: What it takes.
            outputs: What it makes.
            taken: Those of its inputs whose memory it may take.
            where: For errors.
            matrix: If it moves rows, how many go from which shard to which.

        Raises:
            TimelyError: A slice is gone.
        """
        self._check_slices(whole.client, known.slices)
        work = self._record(whole.client, known, args, outputs, taken)
        work.parent, work.where, work.matrix = whole, where, matrix
        return work

    def _record(
        self,
        client: int,
        known: RegisteredProgram,
        args: list[Entry],
        outputs: Sequence[Buffer],
        taken: Collection[int],
    ) -> ProgramRecord:
        lowered = self._lowered(known)
        return ProgramRecord(
            f"p{next(self._call_numbers)}",
            client,
            self,
            known,
            lowered,
            cut=self._cut(known, lowered),
            args=args,
            outs=tuple([each.number for each in outputs]),
            copied=tuple([each for each in known.destroyed if each not in taken]),
        )

    def _check_slices(self, client: int, names: Iterable[str]) -> None:
        for name in names:
            slice_ = self._slices.get(name)
            if slice_ is None or slice_.client != client or slice_.is_dropped:
                raise no_such_slice(name)
            if slice_.error is not None:
                raise unpack_error(slice_.error)

    def _lowered(self, known: RegisteredProgram) -> LoweredProgram:
        """Return a program for where its slices stand now."""
        slices = [self._slices[name] for name in known.slices]
        # Hosts drop what they know of programs when a slice leaves, if it comes back too.
        placements = tuple([(each.devices, each.num_remaps) for each in slices])
        if known.lowered is None or placements != known.placements:
            places = {each.name: each.place for each in slices}
            lowered = self._lowerings.lower(known.program, places, known.dispatch)
            known.place(lowered, placements)
        assert known.lowered is not None  # noqa: S101 - for the type
        return known.lowered

    def _cut(self, known: RegisteredProgram, lowered: LoweredProgram) -> Cut:
        cut = known.cuts.get(known.most)
        if cut is None:
            number = next(self._cut_numbers)
            cut = Cut(number, lowered, known.dispatch, known.most)
            known.cuts[known.most] = cut
            for host, pickled in cut.pickled():
                self._outbox.order(host, LoadProgram(number, pickled))
        return cut

    def _args(
        self,
        client: int,
        message: CallProgram,
        known: RegisteredProgram | RegisteredFlow,
    ) -> list[Entry]:
        found = []
        for number, value in zip(message.inputs, known.taken, strict=True):
            entry = self._buffers.directory.readable(client, number)
            buffer = entry.buffer
            lies = buffer.placement, buffer.spec, buffer.type
            if lies != (value.slice, value.spec, value.type):
                raise HandleError(
                    f"an argument lies otherwise than the program wants it; got "
                    f"{buffer.type} over {buffer.spec} on {buffer.placement!r}; expected "
                    f"{value.type} over {value.spec} on {value.slice!r}; trace the "
                    f"program with it",
                    buffer=number,
                )
            found.append(entry)
        return found

    def outputs(
        self, outs: Sequence[int], values: Sequence[Value], name: str
    ) -> list[Buffer]:
        """Return the buffers that a program or a part of it makes."""
        found = []
        for number, (out, value) in enumerate(zip(outs, values, strict=True)):
            label = f"output {number} of program {name}"
            where, spec = str(value.slice), value.spec or ()
            if (slice_ := self._slices.get(where)) is None:
                found.append(Buffer(out, where, value.type, spec, 0, 0, label))
            else:
                found.append(slice_.new_buffer(out, value.type, spec, label))
        return found

    def _tell(self, work: ProgramRecord, host: int) -> None:
        if host not in work.told and work.run is not None:
            work.told.add(host)
            self._outbox.book(host).runs.append(work.run)
