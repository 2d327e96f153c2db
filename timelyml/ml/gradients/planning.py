"""Which calls of a tape gradients go through, and what of their derivatives is wanted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import jax.numpy as jnp

from timelyml.errors import TraceError
from timelyml.ml.functions import ArrayType
from timelyml.ml.functions.types import dtype_named
from timelyml.ml.gradients.derivatives import Derivative
from timelyml.ml.gradients.tape import Tape
from timelyml.ml.programs import Arg, Constant, Program, Ref


@dataclass(frozen=True, slots=True)
class Step:
    """A call between what gradients are wanted of and the loss.

    Attributes:
        is_joint: Whether nothing but the loss comes of it, so that its way back can
            follow at once, in the same computation.
    """

    derivative: Derivative
    is_joint: bool


def plan(
    tape: Tape, program: Program, loss: Ref, wrt: Collection[Ref], *, keeps: bool
) -> dict[int, Step]:
    """Return the steps of a gradient by their node, in the order of the program.

    Args:
        tape: What recorded the program.
        program: Its nodes.
        loss: The scalar that is differentiated.
        wrt: What gradients are wanted of.
        keeps: Keep residuals; else functions are computed again.

    Raises:
        TraceError: There is more in the program than calls.
    """
    for index, node in enumerate(program.nodes):
        if index not in tape.calls and not isinstance(node, Arg | Constant):
            raise TraceError(
                f"program {program.name!r} has no gradient; got a "
                f"{type(node).__name__.lower()} in it; expected calls of compiled "
                f"functions alone; put what is decided by values into a function",
                function=program.name,
            )
    wanted, active = _active(tape, program, wrt)
    found: dict[int, Step] = {}
    used: set[Ref] = set()
    for index in reversed(tape.calls):
        live = [
            ref
            for ref in results_of(tape, index)
            if ref in active and (ref in used or ref == loss)
        ]
        if not (live and wanted[index]):
            continue
        derivative = Derivative(
            tape.calls[index].flat,
            wanted[index],
            tuple(ref.output for ref in live),
            frozenset(ref.output for ref in live if ref == loss),
            keeps,
        )
        found[index] = Step(derivative, live == [loss] and loss not in used)
        operands = program.nodes[index].operands
        used |= {operands[position] for position in wanted[index]}
    return dict(reversed(found.items()))


def results_of(tape: Tape, index: int) -> list[Ref]:
    """Return what a call of the tape returns, without what tells of its checks."""
    count = tape.calls[index].computation.num_results
    return [Ref(index, output) for output in range(count)]


def is_real(array_type: ArrayType) -> bool:
    """Whether there are gradients of an array: it is one of floats, or complex."""
    return bool(jnp.issubdtype(dtype_named(array_type.dtype), jnp.inexact))


def _active(
    tape: Tape, program: Program, wrt: Collection[Ref]
) -> tuple[dict[int, tuple[int, ...]], set[Ref]]:
    """Return the operands of each call, and all values, that depend on `wrt`."""
    active = set(wrt)
    wanted = {}
    for index in tape.calls:
        operands = program.nodes[index].operands
        here = tuple(i for i, ref in enumerate(operands) if ref in active)
        wanted[index] = here
        if here:
            results = results_of(tape, index)
            active |= {ref for ref in results if is_real(program.value(ref).type)}
    return wanted, active
