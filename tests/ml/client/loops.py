"""A loop of which some tests take the gradient."""

from __future__ import annotations

import jax.numpy as jnp

from timelyml import ml


def sine_loop(here, there, *, max_steps, **shardings):
    """A program of a loop whose number of steps is an argument; `there` counts them.

    Returns:
        `f(w, x, n)`: the sum of x, after `sin(w * x)` n times.
    """
    less = ml.jit(lambda i, n: i < n, slice=there)
    step = ml.jit(lambda i, w, x: (i + 1, jnp.sin(w * x)), slice=here, **shardings)
    total = ml.jit(lambda x: x.sum(), slice=here)

    @ml.program
    def f(w, x, n):
        _, x = ml.while_loop(
            lambda carried: less(carried[0], n),
            lambda carried: step(carried[0], w, carried[1]),
            (0, x),
            max_steps=max_steps,
        )
        return total(x)

    return f
