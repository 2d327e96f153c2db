"""Random nests of loops and branches, written once for JAX and once for a cluster.

All numbers are small integers, so that results are the same bits however XLA compiles.
"""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp

from timelyml import ml

OPS = {
    "turn": lambda i, x: (i + 1, (x * 3 + i) % 17),
    "fold": lambda i, x: (i * 2 % 11, (x[::-1] + x * 2) % 13),
    "mix": lambda i, x: (i + x.sum().astype("int32") % 5, (x + i) % 19),
}
PREDICATES = {
    "odd": lambda i, x: i % 2 == 1,
    "large": lambda i, x: x.sum() > 20,
}
CHOOSERS = {"by_i": lambda i, x: i % 4 - 1, "by_x": lambda i, x: x[0].astype("int32")}
BIASED = lambda i, x, bias: (i, (x + bias) % 23)  # noqa: E731
LEFT = lambda left: left > 0  # noqa: E731
LESS = lambda left: left - 1  # noqa: E731


class InJax:
    """Everything as one function of JAX."""

    cond = staticmethod(jax.lax.cond)
    switch = staticmethod(jax.lax.switch)
    while_loop = staticmethod(jax.lax.while_loop)

    def call(self, name, _where, *args):
        return FUNCTIONS[name](*args)


class OnSlices:
    """Every function compiled for one of some slices; in place of others it may take."""

    cond = staticmethod(ml.cond)
    switch = staticmethod(ml.switch)
    while_loop = staticmethod(ml.while_loop)

    def __init__(self, slices):
        self._compiled = {
            (name, where): ml.jit(
                function,
                slice=slice_,
                donate_argnums=(1,) if name in ("fold", "mix") else (),
            )
            for name, function in FUNCTIONS.items()
            for where, slice_ in enumerate(slices)
        }

    def call(self, name, where, *args):
        return self._compiled[name, where](*args)


FUNCTIONS = {**OPS, **PREDICATES, **CHOOSERS}
FUNCTIONS |= {"biased": BIASED, "left": LEFT, "less": LESS}


def block(rng, depth):
    """Draw a row of statements."""
    return [statement(rng, depth) for _ in range(rng.randint(1, 3))]


def statement(rng, depth):
    kind = rng.choice(["op", "op", "biased", "cond", "switch", "while"])
    where = rng.randrange(2)
    if kind == "op" or depth == 0:
        return "op", rng.choice([*OPS]), where
    if kind == "biased":
        return kind, "biased", where
    if kind == "cond":
        blocks = [block(rng, depth - 1), rng.choice([[], block(rng, depth - 1)])]
        return kind, rng.choice([*PREDICATES]), where, blocks
    if kind == "switch":
        blocks = [block(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return kind, rng.choice([*CHOOSERS]), where, blocks
    return kind, rng.randint(0, 3), where, [block(rng, depth - 1)]


def run(language, rows, state, bias):
    """Do a row of statements, in JAX or on slices."""
    for kind, what, where, *rest in rows:
        blocks = [
            lambda state, inner=inner: run(language, inner, state, bias)
            for inner in (rest[0] if rest else ())
        ]
        if kind == "op":
            state = language.call(what, where, *state)
        elif kind == "biased":
            state = language.call(what, where, *state, bias)
        elif kind == "while":
            state = _repeated(language, where, what, blocks[0], state)
        else:
            chooser = language.call(what, where, *state)
            blocks = (*blocks,) if kind == "cond" else (blocks,)
            state = getattr(language, kind)(chooser, *blocks, state)
    return state


def _repeated(language, where, times, body, state):
    def again(carried):
        return language.call("less", where, carried["left"]), body(carried["state"])

    carried = {"left": jnp.int32(times), "state": state}
    found = language.while_loop(
        lambda carried: language.call("left", where, carried["left"]),
        lambda carried: dict(zip(("left", "state"), again(carried), strict=True)),
        carried,
    )
    return found["state"]


def drawn(seed):
    """Draw a nest with at least a loop or a branch."""
    rng = random.Random(seed)
    rows = block(rng, 3)
    while all(each[0] in ("op", "biased") for each in rows):
        rows = block(rng, 3)
    return rows
