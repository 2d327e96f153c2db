"""From a tape to the program of its gradient: its nodes again, and back through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from timelyml.ml.functions.types import dtype_named
from timelyml.ml.gradients.making import Maker
from timelyml.ml.gradients.planning import plan
from timelyml.ml.gradients.regions import Nesting
from timelyml.ml.gradients.tape import Tape
from timelyml.ml.programs import Program, Ref


class Transposer(Nesting):
    """Records the gradient of a tape into the program that is being traced.

    Args:
        tape: The block.
        program: What the tape recorded.
        loss: The scalar that is differentiated.
        wrt: What gradients are wanted of.
        arguments: What the block was given, in the program that is being traced.
        keeps: Keep residuals; else functions are computed again.
        maker: Makes the functions.
    """

    def __init__(
        self,
        tape: Tape,
        program: Program,
        loss: Ref,
        wrt: Sequence[Ref],
        arguments: Sequence[Any],
        *,
        keeps: bool,
        maker: Maker,
    ) -> None:
        values = {Ref(i): leaf for i, leaf in enumerate(arguments)}
        steps = plan(tape, program, loss, wrt, keeps=keeps)
        super().__init__(tape, program.nodes, steps, maker, {**tape.outside, **values})
        self._loss = loss
        self._wrt = tuple(wrt)
        self._types = program.value

    def run(self) -> list[Any]:
        """Record both ways; return the gradients, in the order of `wrt`."""
        self.go()
        self.back()
        return [
            self.sums.total(self.seeded(ref), self._types(ref)) for ref in self._wrt
        ]

    def seeded(self, ref: Ref) -> list[Any]:
        """Return the parts of a cotangent, and 1 for the loss."""
        parts = super().seeded(ref)
        if ref != self._loss:
            return parts
        return [np.ones((), dtype_named(self._types(ref).type.dtype)), *parts]

    def recalled(self, value: Any) -> Any:
        """Return the value: both ways are in one program."""
        return value

    def result(self, leaf: Any) -> Any:
        """Return what a value of the block is in the program that is being traced."""
        ref = self._tape.ref_of(leaf)
        return leaf if ref is None else self.value(ref)
