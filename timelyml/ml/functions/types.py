"""From what a function is called with to array types, and back to JAX's own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from timelyml.ml.functions.computation import ArrayType
from timelyml.ml.jax_private import ShapedArray


def type_of(value: Any) -> ArrayType:
    """Return the type that a value has as an argument of a compiled function.

    Args:
        value: An array of numpy or JAX, a Python number, a `jax.ShapeDtypeStruct`, or
            whatever has an array type as its `type`, as handles have.

    Raises:
        TypeError: It is no array, as JAX says.

    >>> type_of(1.5), type_of(np.arange(3, dtype=np.int8))
    (float32[], int8[3])
    """
    known = getattr(value, "type", None)
    if isinstance(known, ArrayType):
        return known
    if isinstance(value, (jax.ShapeDtypeStruct, ShapedArray)):
        dtype, is_weak = value.dtype, value.weak_type
        return ArrayType(tuple(value.shape), dtype_name(dtype), dtype.itemsize, is_weak)
    aval = jax.typeof(value)
    return ArrayType(
        tuple(aval.shape), dtype_name(aval.dtype), aval.dtype.itemsize, aval.weak_type
    )


def shaped(array_type: ArrayType) -> ShapedArray:
    """Return the type as JAX has it."""
    dtype = dtype_named(array_type.dtype)
    return ShapedArray(array_type.shape, dtype, weak_type=array_type.is_weak)


def abstract_array(
    array_type: ArrayType, sharding: jax.sharding.Sharding | None = None
) -> jax.ShapeDtypeStruct:
    """Return what stands for an array of the type when a function is traced."""
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]  # JAX is typed in part
        array_type.shape,
        dtype_named(array_type.dtype),
        weak_type=array_type.is_weak,
        sharding=sharding,
    )


def is_key(dtype: Any) -> bool:
    """Whether a type of elements is that of typed PRNG keys."""
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


@functools.cache
def dtype_name(dtype: Any) -> str:
    """Return how a type of elements is called.

    >>> dtype_name(jax.random.key(0).dtype)
    'key<threefry2x32>'
    """
    if not is_key(dtype):
        return str(np.dtype(dtype).name)
    names: list[str] = []
    # Only an array tells its implementation; one that is traced needs no device.
    jax.eval_shape(
        lambda key: names.append(str(jax.random.key_impl(key))),
        jax.ShapeDtypeStruct((), dtype),  # type: ignore[no-untyped-call]  # JAX is typed in part
    )
    return f"key<{names[0]}>"


@functools.cache
def dtype_named(name: str) -> Any:
    """Return the type of elements of that name.

    >>> dtype_named("bfloat16")
    dtype(bfloat16)
    """
    if not name.startswith("key<"):
        return jax.numpy.dtype(name)
    return jax.eval_shape(lambda: jax.random.key(0, impl=name[4:-1])).dtype
