"""A traced function as what JAX differentiates: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from timelyml.ml.functions.computation import ArrayType
from timelyml.ml.functions.options import Arguments
from timelyml.ml.functions.shipped import dataclasses_in, register
from timelyml.ml.functions.types import dtype_named


@dataclass(frozen=True, slots=True)
class FlatFunction:
    """A Python function of the operands of its computation; returns its leaves.

    Equal for the same function with the same types and static arguments, so that what
    is made of one is made once.

    Attributes:
        in_tree: Of `(args, kwargs)` without those that are static.
        in_types: Of all its leaves.
        used: Positions of the operands among them; the others change no result.
    """

    function: Callable[..., Any]
    static_args: tuple[tuple[int, Any], ...]
    static_kwargs: tuple[tuple[str, Any], ...]
    in_tree: Any
    in_types: tuple[ArrayType, ...]
    used: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        skeleton = jax.tree.unflatten(self.in_tree, range(self.in_tree.num_leaves))
        classes = tuple(dataclasses_in(self.in_tree).items())
        rest = self.static_args, self.static_kwargs, self.in_types, self.used
        return _rebuilt, (self.function, skeleton, classes, rest)

    @property
    def operand_types(self) -> tuple[ArrayType, ...]:
        """The types of the operands."""
        return tuple(self.in_types[position] for position in self.used)

    def __call__(self, *operands: Any) -> list[Any]:
        """Call the function."""
        given = dict(zip(self.used, operands, strict=True))
        leaves = [
            given[position] if position in given else _zeros(array_type)
            for position, array_type in enumerate(self.in_types)
        ]
        fixed = Arguments((), {}, self.static_args, self.static_kwargs)
        args, kwargs = fixed.merge(*jax.tree.unflatten(self.in_tree, leaves))
        return list(jax.tree.leaves(self.function(*args, **kwargs)))


def _rebuilt(
    function: Callable[..., Any],
    skeleton: Any,
    classes: tuple[tuple[type, tuple[str, ...]], ...],
    rest: tuple[Any, ...],
) -> FlatFunction:
    """Put together what was pickled: JAX's structures cannot be."""
    for cls, data_fields in classes:
        register(cls, data_fields)
    static_args, static_kwargs, *types = rest
    in_tree = jax.tree.structure(skeleton)
    return FlatFunction(function, static_args, static_kwargs, in_tree, *types)


def _zeros(array_type: ArrayType) -> Any:
    if array_type.key_impl is None:
        return jnp.zeros(array_type.shape, dtype_named(array_type.dtype))
    key = jax.random.key(0, impl=array_type.key_impl)
    return jnp.broadcast_to(key, array_type.shape)
