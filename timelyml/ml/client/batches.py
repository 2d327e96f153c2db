"""Calls that were collected, and parts of them as programs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from timelyml.ml.client.handle import Handle
from timelyml.ml.client.slices import Slice
from timelyml.ml.functions import ArrayType, Computation, Spec
from timelyml.ml.functions.specs import logical_mesh
from timelyml.ml.programs import Arg, Program, Ref, SliceNode, Value
from timelyml.ml.programs import Call as CallNode

_Operand: TypeAlias = tuple[int, int]
"""A call of a part and which of its results; or -1 and a place among the inputs."""

Key: TypeAlias = tuple[object, ...]
"""What calls have in common that are the same program."""


@dataclass(slots=True)
class Batch:
    """Calls that were collected, all on one slice.

    Attributes:
        most: How many calls it may become.
        began_s: When the first of them came.
        calls: Of each, the computation, the buffers that it takes, and those it makes.
        inputs: Handles that come from outside.
        results: Of each call, its handles; whoever wants them holds them.
        made: Type and sharding of what the calls make.
    """

    slice: Slice
    most: int
    began_s: float
    calls: list[tuple[Computation, tuple[int, ...], tuple[int, ...]]] = field(
        default_factory=list
    )
    inputs: dict[int, Handle] = field(default_factory=dict)
    results: list[weakref.ref[Handle]] = field(default_factory=list)
    made: dict[int, tuple[ArrayType, Spec]] = field(default_factory=dict)

    def add(
        self,
        computation: Computation,
        operands: Sequence[Handle],
        results: Sequence[Handle],
    ) -> None:
        """Add a call."""
        args, outs, made = [], [], self.made
        for each in operands:
            number = each.buffer
            if number not in made:
                self.inputs[number] = each
            args.append(number)
        for each in results:
            number = each.buffer
            self.results.append(weakref.ref(each))
            made[number] = each.type, each.spec
            outs.append(number)
        self.calls.append((computation, tuple(args), tuple(outs)))

    def type_of(self, buffer: int) -> tuple[ArrayType, Spec]:
        """Return type and sharding of what is an input, or made."""
        given = self.inputs.get(buffer)
        return self.made[buffer] if given is None else (given.type, given.spec)


class Part:
    """Some calls of a batch, in a row.

    Attributes:
        calls: As those of the batch.
        inputs: Buffers that come from outside of the part, each once.
        places: Of each call, where its operands come from.
        wanted: What of its results somebody holds, or a later part takes.
        outs: The buffers of these.
    """

    def __init__(self, batch: Batch, start: int, stop: int, held: set[int]) -> None:
        self.calls = batch.calls[start:stop]
        inputs: dict[int, int] = {}
        made: dict[int, _Operand] = {}
        self.places: list[tuple[_Operand, ...]] = []
        for number, (_, args, outs) in enumerate(self.calls):
            self.places.append(
                tuple(
                    [
                        made.get(x) or (-1, inputs.setdefault(x, len(inputs)))
                        for x in args
                    ]
                )
            )
            made.update((out, (number, i)) for i, out in enumerate(outs))
        later = {x for _, args, _ in batch.calls[stop:] for x in args}
        self.inputs = tuple(inputs)
        self.outs = tuple([x for x in made if x in held or x in later])
        self.wanted = tuple([made[each] for each in self.outs])

    def key(self, batch: Batch) -> Key:
        """Return what makes it the same as another, but for the numbers of buffers."""
        identities = [computation.identity for computation, _, _ in self.calls]
        types = map(batch.type_of, self.inputs)
        places = tuple(self.places)
        return batch.slice.name, tuple(identities), places, tuple(types), self.wanted

    def program(self, batch: Batch) -> Program:
        """Return the program that its calls are, if so much of them is wanted."""
        num_inputs, slice_ = len(self.inputs), batch.slice

        def ref(place: _Operand) -> Ref:
            number, position = place
            return Ref(position) if number < 0 else Ref(num_inputs + number, position)

        args = [
            Arg(position, f"x{position}", Value(*batch.type_of(each), slice_.name))
            for position, each in enumerate(self.inputs)
        ]
        calls = [
            CallNode(computation, slice_.name, tuple(map(ref, operands)))
            for (computation, _, _), operands in zip(
                self.calls, self.places, strict=True
            )
        ]
        node = SliceNode(slice_.name, logical_mesh(slice_.mesh), slice_.platform)
        name = " ".join(dict.fromkeys(each.name for each, _, _ in self.calls))
        results = tuple(map(ref, self.wanted))
        return Program(name, (node,), (*args, *calls), results, num_inputs)
