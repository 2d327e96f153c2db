"""Programs as a client calls them: registered at the first call, then one message each."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from timelyml.ml.client.handle import Handle
from timelyml.ml.client.slices import Slice
from timelyml.ml.controller.messages import CallProgram, RegisterProgram
from timelyml.ml.functions import ArrayType, Computation, Spec
from timelyml.ml.functions.types import dtype_named
from timelyml.ml.programs import Arg, Constant, Place, Program, ProgramCall, Ref
from timelyml.ml.programs.lowering import run_passes
from timelyml.ml.programs.shipped import Input, inputs_of, outputs_of
from timelyml.ml.programs.splitter import split


class Caller(Protocol):
    """Who sends for the programs: a client."""

    def new_handle(self, slice_: Slice, array_type: ArrayType, spec: Spec) -> Handle:
        """Return a handle of a value to come."""

    def put_array(
        self, value: Any, slice_: Slice, array_type: ArrayType, spec: Spec
    ) -> Handle:
        """Send a host array to a slice."""

    def register(self, computation: Computation, slice_: Slice, line: str = "") -> None:
        """Have a computation compiled for a slice, or raise why it cannot be."""

    def check_compiled(self, codes: Iterable[tuple[str, str]]) -> None:
        """Raise why computations cannot be compiled, as far as that is known."""

    def start(self, message: Any) -> None:
        """Send what counts as a call, once there are few enough."""

    def send(self, message: Any) -> None:
        """Send a message."""


@dataclass(frozen=True, slots=True)
class _Registered:
    """A program that the controller has.

    Attributes:
        inputs: What a call brings, and on which slice.
        kept: Values of constants, by their place among the inputs.
        outputs: Slice, type and sharding of what it computes.
        results: For each result, its place among the outputs, or what it is otherwise.
        donated: Positions of operands that are dead after a call.
        codes: Its computations, each with the slice that it is for.
    """

    number: int
    inputs: tuple[tuple[Input, Slice], ...]
    kept: Mapping[int, Handle]
    outputs: tuple[tuple[Slice, ArrayType, Spec], ...]
    results: tuple[int | Arg | Constant, ...]
    donated: frozenset[int]
    codes: tuple[tuple[str, str], ...]


class Programs:
    """The programs that a client has called.

    Args:
        caller: Sends for them.
        slices: Those of the client, by name.
    """

    def __init__(self, caller: Caller, slices: Mapping[str, Slice]) -> None:
        self._caller = caller
        self._slices = slices
        self._numbers = itertools.count(1)
        self._registered: dict[tuple[str, str], _Registered] = {}

    def call(self, call: ProgramCall) -> list[Any]:
        """Start a program; return a value for each of its results."""
        key = call.program.identity, call.dispatch
        known = self._registered.get(key)
        if known is None:
            known = self._registered[key] = self._register(call.program, call.dispatch)
        else:
            self._caller.check_compiled(known.codes)
        operands = call.operands
        # Puts are held until the call is sent: a handle that goes is released.
        inputs = [
            self._input(number, each, slice_, operands, known)
            for number, (each, slice_) in enumerate(known.inputs)
        ]
        for position in known.donated:
            operands[position].give_away(f"donated to {call.program.name!r}")
        new_handle = self._caller.new_handle
        handles = [new_handle(*output) for output in known.outputs]
        self._caller.start(
            CallProgram(
                known.number,
                tuple([each.buffer for each in inputs]),
                tuple([each.buffer for each in handles]),
            )
        )
        for number, (each, _) in enumerate(known.inputs):
            if each.is_put and number not in known.kept:
                inputs[number].give_away("given to a program")
        return [
            handles[each] if isinstance(each, int) else _as_it_was(each, operands)
            for each in known.results
        ]

    def register(self, program: Program) -> int:
        """Have calls ready that are to travel as a program; return its number."""
        return self._register(program, "parallel", is_collected=True).number

    def _input(
        self,
        number: int,
        wanted: Input,
        slice_: Slice,
        operands: Sequence[Any],
        known: _Registered,
    ) -> Handle:
        if wanted.is_put:
            kept = known.kept.get(number)
            return self._put(wanted, slice_, operands) if kept is None else kept
        handle: Handle = operands[wanted.position]
        handle.check()
        return handle

    def _put(self, wanted: Input, slice_: Slice, operands: Sequence[Any]) -> Handle:
        source, value = wanted.source, wanted.value
        array = _as_it_was(source, operands)
        return self._caller.put_array(array, slice_, value.type, value.spec or ())

    def _register(
        self, traced: Program, dispatch: str, *, is_collected: bool = False
    ) -> _Registered:
        names = [each.name for each in traced.slices]
        places = {name: _place(self._slices[name]) for name in names}
        program = run_passes(traced, places).program
        flow = None if program.is_regular else split(program)
        codes: dict[tuple[str, str], None] = {}
        for each in [program] if flow is None else flow.programs():
            for _, call in each.calls():
                slice_ = self._slices[call.slice]
                self._caller.register(call.computation, slice_, call.line)
                codes[call.computation.identity, call.slice] = None
        inputs = tuple(
            (each, self._slices[str(each.value.slice)]) for each in inputs_of(program)
        )
        kept = {
            number: self._put(each, slice_, ())
            for number, (each, slice_) in enumerate(inputs)
            if isinstance(each.source, Constant) and not each.is_destroyed
        }
        given = tuple(
            number
            for number, (each, _) in enumerate(inputs)
            if (each.is_put and number not in kept)
            or (not each.is_put and each.position in traced.donated_args)
        )
        number = next(self._numbers)
        is_sequential = dispatch == "sequential"
        pickled = pickle.dumps(flow or program)
        self._caller.send(
            RegisterProgram(number, pickled, given, is_sequential, is_collected)
        )
        refs = outputs_of(program)
        values = [program.value(ref) for ref in refs]
        return _Registered(
            number,
            inputs,
            kept,
            tuple((self._slices[str(x.slice)], x.type, x.spec or ()) for x in values),
            tuple(_result(program, refs, ref) for ref in program.results),
            traced.donated_args,
            tuple(codes),
        )


def array_of(constant: Constant) -> Any:
    """Return the array that a constant is; of keys, their words."""
    array_type = constant.value.type.physical
    array = np.frombuffer(constant.data, dtype_named(array_type.dtype))
    return array.reshape(array_type.shape)


def _result(program: Program, refs: list[Ref], ref: Ref) -> int | Arg | Constant:
    node = program.nodes[ref.node]
    return node if isinstance(node, Arg | Constant) else refs.index(ref)


def _as_it_was(node: Arg | Constant, operands: Sequence[Any]) -> Any:
    return operands[node.position] if isinstance(node, Arg) else array_of(node)


def _place(slice_: Slice) -> Place:
    return Place(
        slice_.island,
        tuple(f"{host}:{index}" for host, index in slice_.devices),
        tuple(str(host) for host, _ in slice_.devices),
    )
