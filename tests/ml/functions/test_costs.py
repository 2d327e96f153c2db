"""Operations are counted from what a function does, the same at every trace."""

import jax
import jax.numpy as jnp
import pytest

from timelyml.ml.functions.costs import flops_of

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
IMAGE = jax.ShapeDtypeStruct((2, 10, 10, 3), jnp.float32)
KERNEL = jax.ShapeDtypeStruct((3, 3, 3, 5), jnp.float32)


def scanned(x):
    return jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=7)[0]


def branching(x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x.T, lambda x: x[:, :8] * 2, x)


def convolved(image, kernel):
    return jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize(
    ("fun", "args", "expected"),
    [
        (lambda x: x * 2, [X], 128),
        (lambda x: x.sum(), [X], 128),
        (lambda x: x @ x.T, [X], 2 * 8 * 16 * 8 + 128),  # and the transposition
        (scanned, [X], 7 * 128),
        (convolved, [IMAGE, KERNEL], 2 * (2 * 8 * 8 * 5) * 27),
    ],
)
def test_operations_are_counted(fun, args, expected):
    assert flops_of(jax.jit(fun).trace(*args).jaxpr) == expected


def test_of_branches_the_dearest_counts():
    dearest = flops_of(jax.jit(lambda x: x @ x.T).trace(X).jaxpr)
    found = flops_of(jax.jit(branching).trace(X).jaxpr)
    assert dearest <= found < 1.5 * dearest
