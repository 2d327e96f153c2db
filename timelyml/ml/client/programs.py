"""Programs run as the calls that they consist of, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from timelyml.ml.client.handle import Handle
from timelyml.ml.client.slices import Slice
from timelyml.ml.functions import TracedCall
from timelyml.ml.functions.types import dtype_named
from timelyml.ml.programs import Arg, Call, Constant, Program


class Caller(Protocol):
    """Who runs the calls: a client."""

    def call(self, call: TracedCall) -> Sequence[Handle]:
        """Start a call; return a handle for each result."""


def run_program(
    caller: Caller,
    program: Program,
    operands: Sequence[Any],
    slices: Mapping[str, Slice],
) -> list[Any]:
    """Start every computation of a program; return a value for each of its results.

    None of them waits for another: a call takes handles to what is still computed.

    Args:
        caller: Runs the calls.
        program: As it was traced; transfers follow from where calls want values.
        operands: Of the call of the program.
        slices: Those of the client, by name.
    """
    values: list[Sequence[Any]] = []
    for node in program.nodes:
        match node:
            case Arg():
                values.append((operands[node.position],))
            case Constant():
                values.append((_array_of(node),))
            case Call():
                arguments = tuple(values[ref.node][ref.output] for ref in node.operands)
                call = TracedCall(
                    node.computation, slices[node.slice], arguments, out_tree=None
                )
                values.append(caller.call(call))
            case _:
                raise AssertionError(f"a traced program has no {type(node).__name__}")
    return [values[ref.node][ref.output] for ref in program.results]


def _array_of(constant: Constant) -> Any:
    array_type = constant.value.type.physical
    array = np.frombuffer(constant.data, dtype_named(array_type.dtype))
    return array.reshape(array_type.shape)
