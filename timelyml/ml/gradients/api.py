"""`ml.grad` and `ml.value_and_grad`: of programs, compiled functions and dataflows.

The gradient of a program is a program: it prints, runs by one message, can be called in
other programs, and be differentiated again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from timelyml.errors import ConfigError, TraceError
from timelyml.ml import sharded
from timelyml.ml.functions import JitFunction, recording, type_of
from timelyml.ml.gradients.making import Maker
from timelyml.ml.gradients.planning import is_real
from timelyml.ml.gradients.tape import Tape
from timelyml.ml.gradients.transposing import Transposer
from timelyml.ml.programs import ProgramFunction, program


def value_and_grad(
    function: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    keeps: bool = True,
    name: str = "model",
) -> Callable[..., Any]:
    """Return what computes a function and its gradient, as `jax.value_and_grad` does.

    Each call of the block is differentiated on its own slice; cotangents go back where
    values came from, and gradients end up on the slice of their argument, sharded as
    it is; of a host array, on the slice that uses it first on the way back.

    Args:
        function: A program whose result is a real scalar, or a compiled function of
            that kind. What it donates is gone after the call, as without a gradient.
            Or a function of a dataflow: see `sharded.value_and_grad`.
        argnums: Positions of the arguments that gradients are wanted of, trees of floats.
        has_aux: The function returns a pair, of which the first is differentiated.
        keeps: Keep what the way back needs in the object store; else compute it again
            there, call by call. `jax.checkpoint` in a function says so for a part of it.
        name: Prefix of the operators of a dataflow.

    Returns:
        For programs a program with the same parameters, that returns the value (with
        `has_aux` a pair of it and the rest), and the gradients.

    Raises:
        ConfigError: `argnums` is malformed, or names a static argument, or one that is
            not there.
        TraceError: The result is no real scalar, an argument is not of floats, or a
            function cannot be differentiated; at the call.
    """
    if isinstance(function, JitFunction):
        function = _as_program(function)
    if not isinstance(function, ProgramFunction):
        numbers = argnums if isinstance(argnums, int) else tuple(argnums)
        return sharded.value_and_grad(function, numbers, has_aux=has_aux, name=name)
    return function.derived(_Gradient(function, argnums, has_aux=has_aux, keeps=keeps))


def grad(
    function: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    keeps: bool = True,
    name: str = "model",
) -> Callable[..., Any]:
    """Like `value_and_grad`, without the value; with `has_aux`, gradients and aux."""
    both = value_and_grad(function, argnums, has_aux=has_aux, keeps=keeps, name=name)

    @functools.wraps(both)
    def only(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return both.derived(only) if isinstance(both, ProgramFunction) else only


class _Gradient:
    """The block of a gradient: calls the block of a program, and goes back through it."""

    def __init__(
        self,
        function: ProgramFunction,
        argnums: int | Sequence[int],
        *,
        has_aux: bool,
        keeps: bool,
    ) -> None:
        self._function = function
        self._is_single = isinstance(argnums, int)
        self._argnums = _checked(argnums)
        self._has_aux = has_aux
        self._keeps = keeps
        self._maker = Maker()
        functools.update_wrapper(self, function.function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record value and gradient into the program that is being traced."""
        name = self._function.name
        split = self._function.split(args, kwargs)
        leaves, tree = jax.tree.flatten((split.args, split.kwargs))
        chosen = self._chosen(
            len(args), [position for position, _ in split.static_args]
        )
        tape = Tape(name)
        stands = [tape.argument(leaf, f"argument {i}") for i, leaf in enumerate(leaves)]
        given, named = jax.tree.unflatten(tree, stands)
        wrt = [given[position] for position in chosen]
        self._check_arguments(wrt)
        merged, merged_named = split.merge(given, named)
        with recording(tape):
            result = self._function.function(*merged, **merged_named)
        loss, aux = self._parted(result)
        recorded = tape.program(jax.tree.leaves((loss, aux)), is_fusible=False)
        transposer = Transposer(
            tape,
            recorded,
            recorded.results[0],
            [each.ref for each in jax.tree.leaves(wrt)],
            leaves,
            keeps=self._keeps,
            maker=self._maker,
        )
        found = transposer.run()
        gradients = jax.tree.unflatten(jax.tree.structure(wrt), found)
        value, beside = jax.tree.map(transposer.result, (loss, aux))
        return (
            (value, beside) if self._has_aux else value,
            gradients[0] if self._is_single else tuple(gradients),
        )

    def _chosen(self, num_args: int, static: Sequence[int]) -> list[int]:
        """Return the places of the differentiated arguments among the traced ones."""
        places = []
        for number in self._argnums:
            position = number + num_args if number < 0 else number
            if not 0 <= position < num_args:
                self._refuse_argnums(f"{num_args} arguments by position")
            if position in static:
                self._refuse_argnums(f"a static argument at position {position}")
            places.append(position - sum(each < position for each in static))
        return places

    def _refuse_argnums(self, got: str) -> None:
        raise ConfigError(
            f"gradient of program {self._function.name!r} cannot be taken by argnums="
            f"{self._argnums}; got {got}; expected positions of traced arguments; "
            f"pass what is differentiated by position",
            option="argnums",
        )

    def _check_arguments(self, wrt: Sequence[Any]) -> None:
        for leaf in jax.tree.leaves(wrt):
            if not is_real(leaf.type):
                self._refuse(
                    "differentiates with respect to what has no gradient",
                    f"an argument {leaf.type}",
                    "trees of floats, or complex numbers",
                    "leave it out of argnums, or split the tree",
                )

    def _parted(self, result: Any) -> tuple[Any, Any]:
        """Return loss and aux, checked."""
        if self._has_aux and not (isinstance(result, tuple) and len(result) == 2):
            self._refuse(
                "has no aux",
                f"{type(result).__name__} as its result",
                "a pair of the loss and anything else",
                "return both, or leave out has_aux",
            )
        loss, aux = result if self._has_aux else (result, ())
        leaves = jax.tree.leaves(loss)
        types = [type_of(leaf) for leaf in leaves]
        is_scalar = len(leaves) == 1 and leaves[0] is loss
        is_float = is_scalar and types[0].shape == () and is_real(types[0])
        if not is_float or types[0].dtype.startswith("complex"):
            self._refuse(
                "has no gradient",
                f"a result {types[0] if is_scalar else types}",
                "one real scalar",
                "sum it up in a compiled function; return the rest with has_aux",
            )
        return loss, aux

    def _refuse(self, what: str, got: str, expected: str, do: str) -> None:
        name = self._function.name
        raise TraceError(
            f"program {name!r} {what}; got {got}; expected {expected}; {do}",
            function=name,
        )


def _checked(argnums: int | Sequence[int]) -> tuple[int, ...]:
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if not numbers or any(not isinstance(each, int) for each in numbers):
        raise ConfigError(
            f"argnums cannot be used; got {argnums!r}; expected int values; give one "
            f"or a tuple of them",
            option="argnums",
        )
    return numbers


def _as_program(function: JitFunction) -> ProgramFunction:
    options = function.options
    made: ProgramFunction = program(
        function,
        static_argnums=options.static_argnums,
        static_argnames=options.static_argnames,
    )
    return made
