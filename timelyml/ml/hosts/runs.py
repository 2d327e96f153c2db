"""Calls of programs on a host: what each has computed so far, and what it launches next.

A call has a list of values, most of which never get a name outside of it. Its blocks are
launched when their turn comes in the order of the island, as single calls are; inputs,
and what other hosts send, were looked for when the call came.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from timelyml.errors import BufferLostError
from timelyml.ml.hosts.buffers import Buffer, BufferStore
from timelyml.ml.hosts.compiling import Loaded
from timelyml.ml.hosts.messages import Cancel, Expect, Export, Run
from timelyml.ml.hosts.plans import Code, Plan, PlannedBlock, Step
from timelyml.ml.hosts.slices import HostSlice
from timelyml.ml.hosts.waiting import Launched, Started, Waiter, pack_failure
from timelyml.ml.programs import Slot
from timelyml.ml.programs.sparse import SparseMove
from timelyml.ml.scheduling import GangKey
from timelyml.runtime.failure import pack_error


@dataclass(slots=True)
class _State:
    """A call under way.

    Attributes:
        slots: The values that blocks still need.
        errors: Pickled, why a value means nothing.
        users_left: Of slots that several blocks use, how many are to come.
        blocks_left: To be launched.
    """

    run: Run
    plan: Plan
    slots: list[Any]
    errors: dict[Slot, bytes]
    users_left: dict[Slot, int]
    blocks_left: set[int]


class Runs:
    """The calls of programs on one host; owned by the thread that launches.

    Args:
        store: The buffers that have names.
        slices: All slices of the host.
        code: What is compiled, or why it could not be.
        waiters: Of each slice.
        export: Takes what is to be sent of a named buffer.
        came: Hears of each named buffer that is there from now on.
    """

    def __init__(
        self,
        store: BufferStore,
        slices: Mapping[str, HostSlice],
        code: Mapping[Code, Loaded | bytes],
        waiters: Mapping[str, Waiter],
        *,
        export: Callable[[Export], None],
        came: Callable[[int], None],
    ) -> None:
        self._store = store
        self._slices = slices
        self._code = code
        self._waiters = waiters
        self._export = export
        self._came = came
        self._states: dict[str, _State] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._states

    def begin(self, run: Run, plan: Plan) -> None:
        """Take a call: expect what others send, have what they need sent to them."""
        if plan.blocks:
            self._states[run.name] = _State(
                run,
                plan,
                [None] * len(plan.program.values),
                {},
                dict(plan.num_users),
                set(plan.blocks),
            )
        own = plan.program.slices
        values = [plan.program.values[slot] for slot in plan.program.inputs]
        for number, error in run.failed:
            slice_name = str(values[number].slice)
            if slice_name in own and run.inputs[number] not in self._store:
                buffer = Buffer(slice_name, None, error)
                self._store.put(run.inputs[number], buffer)
        self._store.promise([run.outputs[each] for each in plan.own_outputs])
        self._store.take(run.inputs)
        for move in plan.senders:
            self._expect(run, plan, move)
        for number, move in plan.sent_inputs:
            for export in self._exports(run, plan, run.inputs[number], move):
                self._export(export)

    def missing(self, name: str, block: PlannedBlock) -> set[Any]:
        """Return what a block needs that is neither there nor promised."""
        state = self._states[name]
        inputs = [state.run.inputs[number] for _, number in block.inputs]
        found: set[Any] = set(self._store.not_at_hand(inputs))
        arrivals = [state.run.first_move + move for _, move in block.arrivals]
        found.update(each for each in arrivals if each not in self._store)
        found.update(x.code for x in block.steps if x.code not in self._code)
        return found

    def launch(self, key: GangKey, sequence: int) -> Iterator[jax.Array]:
        """Launch a block; in between, return what has to be computed to go on."""
        state = self._states[key.program]
        block = state.plan.blocks[key.gang]
        self._gather(state, block)
        started: list[Started] = []
        failures: list[tuple[int, bytes]] = []
        exports: list[tuple[Buffer, Export]] = []
        named: list[int] = []
        started_ns = time.monotonic_ns()
        quick = state.plan.quick.get(block.number)
        if quick is None:
            quick = state.plan.quick[block.number] = self._quick_of(block)
        slots, errors = state.slots, state.errors
        for step, each in zip(block.steps, quick, strict=True):
            if each is not None and not errors and _launch_quickly(slots, step, *each):
                continue
            yield from self._pending(state, step)
            failure = self._launch(state, step, started)
            if failure is not None:
                failures.append((step.gang, failure))
            named += self._name(state, block, step)
            if step.sent:
                exports += self._send(state, block, step)
            for slot in step.freed:
                state.slots[slot] = None
        waiter = self._waiters[block.slice]
        waiter.launched(Launched(sequence, tuple(started), tuple(failures), started_ns))
        for buffer, export in exports:
            waiter.export(buffer, export)
        self._leave(state, block)
        for out in named:
            self._came(out)

    def cancel(self, cancel: Cancel) -> Iterator[GangKey]:
        """Drop what is left of a call; return the gangs that will not be launched."""
        state = self._states.pop(cancel.name, None)
        if state is None:
            return
        first, origins = state.run.first_move, state.plan.program.origins
        for move in state.plan.senders:
            origin = origins.get(move, -1)
            is_coming = origin < 0 or origin in cancel.ordered
            self._store.give_up(first + move, is_coming=is_coming)
        self._store.release(state.run.outputs[x] for x in state.plan.own_outputs)
        for block in sorted(state.blocks_left):
            yield GangKey(cancel.name, block, 0)

    def _expect(self, run: Run, plan: Plan, move: int) -> None:
        value = plan.program.values[plan.program.moves[move].target]
        name = str(value.slice)
        number = run.first_move + move
        expect = Expect(
            number,
            name,
            value.type,
            value.spec or (),
            senders=plan.senders[move],
            num_elements=_num_expected(run, plan, move),
        )
        if self._store.expect(expect, self._slices[name]):
            self._came(number)

    def _exports(
        self, run: Run, plan: Plan, buffer: int, move: int
    ) -> Iterator[Export]:
        node = plan.program.moves[move]
        array_type = plan.program.values[node.source].type
        target = run.first_move + move
        if isinstance(node.pieces, SparseMove):
            sent = node.pieces.sends(plan.host, run.matrix)
            rest = tuple((0, length) for length in array_type.shape[1:])
            for peer, rows in sent.items():
                boxes = tuple(((x.start, x.start + x.num_rows), *rest) for x in rows)
                starts = tuple((x.target_start, *(0 for _ in rest)) for x in rows)
                yield Export(buffer, array_type, int(peer), target, boxes, starts)
            return
        for each in plan.parcels[move]:
            yield Export(buffer, array_type, each.peer, target, each.boxes)

    def _gather(self, state: _State, block: PlannedBlock) -> None:
        """Take the inputs of a block, and what was sent for it, from the store."""
        for slot, number in block.inputs:
            buffer = self._store.get(state.run.inputs[number])
            self._fill(state, slot, buffer)
        for slot, move in block.arrivals:
            number = state.run.first_move + move
            buffer = self._store.get(number)
            if buffer is not None:  # or an earlier block has taken it
                self._fill(state, slot, buffer)
                self._store.release((number,))

    def _fill(self, state: _State, slot: Slot, buffer: Buffer | None) -> None:
        if buffer is None:
            state.errors[slot] = pack_error(
                BufferLostError("an argument is not there any more; got none of it")
            )
            return
        state.slots[slot] = buffer.array
        if buffer.error is not None:
            state.errors[slot] = buffer.error

    def _quick_of(self, block: PlannedBlock) -> list[Any]:
        """Return what launches each step that nobody looks at in between, else None."""
        codes = [self._code[step.code] for step in block.steps]
        return [
            code.quick if is_inner and not isinstance(code, bytes) else None
            for code, is_inner in zip(codes, block.inner, strict=True)
        ]

    def _pending(self, state: _State, step: Step) -> Sequence[jax.Array]:
        code = self._code[step.code]
        if isinstance(code, bytes):
            return ()
        return code.pending([state.slots[slot] for slot in step.operands])

    def _launch(
        self, state: _State, step: Step, started: list[Started]
    ) -> bytes | None:
        """Launch a step; return why that was not possible, if so."""
        slots = state.slots
        operands = [slots[slot] for slot in step.operands]
        error = _error_of(state, step) if state.errors else None
        code = self._code[step.code]
        if isinstance(code, bytes):
            return _fail(state, step, code)
        if error is not None and any(each is None for each in operands):
            return _fail(state, step, error)
        try:
            outputs = self._call(state, step, code, operands)
        except Exception as raised:  # noqa: BLE001 - whatever XLA refuses
            return _fail(state, step, pack_failure(code, raised))
        for slot, array in zip(step.outputs, outputs, strict=True):
            slots[slot] = array
        if error is not None:
            state.errors.update(dict.fromkeys(step.outputs, error))
        of = code.computation
        if step.is_waited or step.results or of.has_effects or of.shard is not None:
            outs = [0] * len(outputs) if step.results else []
            for position, number in step.results:
                outs[position] = state.run.outputs[number]
            started.append(Started(step.gang, code, outputs, outs, error))
        return None

    def _call(
        self, state: _State, step: Step, code: Loaded, operands: list[Any]
    ) -> list[jax.Array]:
        if not step.destroyed:
            return code(*operands)
        program, run = state.plan.program, state.run
        shared = {program.inputs[number] for number in run.copied}
        for position, slot in step.destroyed:
            if position in step.copied or slot in shared:
                operands[position] = copy_of(operands[position])
        with self._store.giving:
            return code(*operands)

    def _name(self, state: _State, block: PlannedBlock, step: Step) -> list[int]:
        """Put results of the program into the store; return their numbers."""
        named = []
        for position, number in step.results:
            slot = step.outputs[position]
            buffer = Buffer(block.slice, state.slots[slot], state.errors.get(slot))
            self._store.put(state.run.outputs[number], buffer)
            named.append(state.run.outputs[number])
        return named

    def _send(
        self, state: _State, block: PlannedBlock, step: Step
    ) -> Iterator[tuple[Buffer, Export]]:
        for move in step.sent:
            slot = state.plan.program.moves[move].source
            buffer = Buffer(block.slice, state.slots[slot], state.errors.get(slot))
            for export in self._exports(state.run, state.plan, 0, move):
                yield buffer, export

    def _leave(self, state: _State, block: PlannedBlock) -> None:
        for slot in block.shared:
            state.users_left[slot] -= 1
            if not state.users_left[slot]:
                state.slots[slot] = None
        state.blocks_left.discard(block.number)
        if not state.blocks_left:
            del self._states[state.run.name]


def _num_expected(run: Run, plan: Plan, move: int) -> int | None:
    """Return how many elements a move of rows brings here; None of another move."""
    node = plan.program.moves[move]
    if not isinstance(node.pieces, SparseMove):
        return None
    row = plan.program.values[node.target].type.shape[1:]
    return node.pieces.num_received(plan.host, run.matrix) * math.prod(row)


def _launch_quickly(
    slots: list[Any], step: Step, execute: Callable[..., Any], handlers: Any
) -> bool:
    """Launch what nobody looks at in between; False to have it launched with care."""
    try:
        outputs = execute([slots[slot] for slot in step.operands])
        outputs = outputs.consume_with_handlers(handlers)
    except Exception:  # noqa: BLE001 - it is tried again, and said what it was
        return False
    for slot, array in zip(step.outputs, outputs, strict=True):
        slots[slot] = array
    for slot in step.freed:
        slots[slot] = None
    return True


def copy_of(array: Any) -> jax.Array:
    """Return a copy of an array, to have its memory taken in its place."""
    copied: jax.Array = jax.device_put(array, array.sharding, may_alias=False)
    return copied


def _fail(state: _State, step: Step, error: bytes) -> bytes:
    state.errors.update(dict.fromkeys(step.outputs, error))
    return error


def _error_of(state: _State, step: Step) -> bytes | None:
    found = (state.errors.get(slot) for slot in step.operands)
    return next((error for error in found if error is not None), None)
