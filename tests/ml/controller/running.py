"""Calls of programs on hosts that only pretend to compute."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from timelyml.exchange import Lane
from timelyml.ml.hosts import Piece, Pieces
from timelyml.ml.hosts.boxes import size_of
from timelyml.ml.scheduling import GangKey


@dataclass
class Running:
    """What was launched and is not over."""

    sequence: int
    outs: tuple  # buffers that are not computed yet
    errors: tuple
    output_errors: dict  # what the buffers will be found to be: an error, or None
    scratch: tuple | None = None  # slice, and bytes on a device while it runs


@dataclass
class FakeRun:
    """A call of a program: a value is the error that it carries, or None."""

    host: object
    run: object
    plan: object
    values: dict = field(default_factory=dict)
    left: set = field(default_factory=set)

    def __post_init__(self):
        plan, run, host = self.plan, self.run, self.host
        assert len(run.inputs) == len(plan.program.inputs)
        self.left = set(plan.blocks)
        self.prepared = set()
        values = plan.program.values
        for number, error in run.failed:
            if values[plan.program.inputs[number]].slice not in host.slices:
                continue
            host.buffers.setdefault(run.inputs[number], error)
            slice_name = values[plan.program.inputs[number]].slice
            host.sizes.setdefault(run.inputs[number], (slice_name, 0))
        host.promised.update(run.outputs[each] for each in plan.own_outputs)
        for move in plan.senders:
            layout = plan.program.moves[move].pieces
            pieces = layout.receives(str(host.index)).values()
            sizes = [size_of(x.source_index) for each in pieces for x in each]
            target = run.first_move + move
            host.expected[target] = [sum(sizes), None]
            host.sizes[target] = self.size_of(plan.program.moves[move].target)
            for early in host.early.pop(target, []):
                host.add(early)
        self.unsent = list(plan.sent_inputs)

    def size_of(self, slot):
        """The slice of a value, and its bytes on a device."""
        value = self.plan.program.values[slot]
        pieces = math.prod(self.host.slices[value.slice].axis_sizes)
        return value.slice, value.type.size_bytes // (pieces if value.spec else 1)

    def ready(self):
        """The gangs that can be launched from now on."""
        host, plan, run = self.host, self.plan, self.run
        for number, move in list(self.unsent):
            buffer = run.inputs[number]
            if buffer in host.buffers and not host.is_running(buffer):
                self.unsent.remove((number, move))
                self.send(move, host.buffers[buffer])
        for peer, error in host.gone.items():
            for move, senders in plan.senders.items():
                target = run.first_move + move
                if peer in senders and target in host.expected:
                    host.buffers[target] = host.expected.pop(target)[1] or error
        found = []
        for number in sorted(self.left - self.prepared):
            block = plan.blocks[number]
            inputs = [run.inputs[each] for _, each in block.inputs]
            arrivals = [run.first_move + move for _, move in block.arrivals]
            at_hand = [each in host.buffers or each in host.promised for each in inputs]
            if all(at_hand) and all(
                each in host.buffers or slot in self.values
                for each, (slot, _) in zip(arrivals, block.arrivals, strict=True)
            ):
                self.prepared.add(number)
                found.append(GangKey(run.name, number, 0))
        self.end_if_over()
        return found

    def launch(self, ticket):
        """Launch a block."""
        host, plan, run = self.host, self.plan, self.run
        block = plan.blocks[ticket.key.gang]
        for slot, number in block.inputs:
            self.values[slot] = host.buffers.get(run.inputs[number], b"gone")
        for slot, move in block.arrivals:
            if run.first_move + move in host.buffers:
                self.values[slot] = host.buffers.pop(run.first_move + move)
        errors, output_errors, sends = [], {}, []
        for step in block.steps:
            found = [self.values[slot] for slot in step.operands]
            error = next((each for each in found if each is not None), None)
            error = error or host.world.failures.get(step.code[0])
            if error is not None:
                errors.append((step.gang, error))
            self.values.update(dict.fromkeys(step.outputs, error))
            for position, number in step.results:
                out = run.outputs[number]
                output_errors[out] = self.values[step.outputs[position]]
                host.promised.discard(out)
                host.buffers[out] = None
                host.sizes[out] = self.size_of(step.outputs[position])
            sends += step.sent
        for move in sends:
            self.send(move, self.values[plan.program.moves[move].source])
        host.launched.append((run.name, block.number))
        self.left.discard(block.number)
        self.end_if_over()
        return Running(
            ticket.sequence, tuple(output_errors), tuple(errors), output_errors
        )

    def send(self, move, error):
        for parcel in self.plan.parcels[move]:
            pieces = tuple(
                Piece(tuple(a for a, _ in box), np.zeros([b - a for a, b in box]))
                for box in parcel.boxes
            )
            body = Pieces(self.run.first_move + move, pieces, error)
            if parcel.peer == self.host.index:
                self.host.add(body)
            else:
                self.host.world.send(self.host.index, parcel.peer, body, Lane.BULK)

    def cancel(self, ordered):
        host, run = self.host, self.run
        for move in self.plan.senders:
            target = run.first_move + move
            origin = self.plan.program.origins.get(move, -1)
            host.buffers.pop(target, None)
            if target in host.expected and origin in (-1, *ordered):
                host.dropped.add(target)
            else:
                host.expected.pop(target, None)
        for number in self.plan.own_outputs:
            out = run.outputs[number]
            host.promised.discard(out)
            host.buffers.pop(out, None)
        for number in self.left:
            host.gate.forget(GangKey(run.name, number, 0))

    def end_if_over(self):
        if not self.left and not self.unsent:
            self.host.runs.pop(self.run.name, None)
