"""Random models with loops and branches, written once for JAX and once for a cluster.

In JAX, loops and branches are Python's, on the values that `jax.grad` has at hand: one
program that went where these values lead.
"""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp

from timelyml import ml

ROWS, WIDTH = 4, 3
MAX_STEPS = 4


def turn(i, x, y):
    return i + 1, jnp.sin(x + i) * y, jnp.tanh(y - 0.5 * x)


def fold(i, x, y):
    return i * 2 % 11, x[::-1] * 0.7 + jnp.cos(y), y * x.mean()


def swap(i, x, y):
    return i + (x.sum() > 0), y, x


def layer(w, i, x, y):
    return i, jnp.tanh(x @ w), y + 0.1 * x


def scale(w, i, x, y):
    return i - 1, x * w.sum(0) + i, y


OPS, WEIGHTED = [turn, fold, swap], [layer, scale]
PREDICATES = [lambda i, x, y: i % 2 == 1, lambda i, x, y: (x * y).sum() > 0.1]
CHOOSERS = [lambda i, x, y: i % 4 - 1, lambda i, x, y: jnp.int32(3 * x[0, 0])]
GOES_ON = [lambda left, x: left > 0, lambda left, x: (left > 0) & (x.sum() > -3)]
LESS = lambda left: left - 1  # noqa: E731
LOSS = lambda i, x, y: ((x * x).mean() + (x * y).sum() * 0.1, i)  # noqa: E731
DONATED = {fold: (1,), swap: (2,), layer: (2, 3)}


class InJax:
    """Functions as they are, and Python's own loops and branches."""

    @staticmethod
    def call(function, _where, *args):
        return function(*args)

    @staticmethod
    def cond(chooser, true, false, *args):
        return true(*args) if chooser else false(*args)

    @staticmethod
    def switch(chooser, branches, *args):
        return branches[min(max(int(chooser), 0), len(branches) - 1)](*args)

    @staticmethod
    def while_loop(goes_on, body, carried, max_steps):
        for _ in range(max_steps):
            if goes_on(carried):
                carried = body(carried)
        return carried


class OnSlices:
    """Every function compiled for one of some slices; some take memory of arguments."""

    cond = staticmethod(ml.cond)
    switch = staticmethod(ml.switch)

    def __init__(self, slices):
        self.checkpoint = False
        self._slices = slices
        self._compiled = {}

    def while_loop(self, goes_on, body, carried, max_steps):
        return ml.while_loop(
            goes_on, body, carried, max_steps=max_steps, checkpoint=self.checkpoint
        )

    def call(self, function, where, *args):
        key = function, where
        if key not in self._compiled:
            self._compiled[key] = ml.jit(
                function,
                slice=self._slices[where],
                donate_argnums=DONATED.get(function, ()),
            )
        return self._compiled[key](*args)


def block(rng, depth):
    """Draw a row of statements."""
    return [statement(rng, depth) for _ in range(rng.randint(1, 2))]


def statement(rng, depth):
    kind = rng.choice(["op", "weighted", "cond", "switch", "while", "while"])
    where = rng.randrange(2)
    if kind == "op" or depth == 0:
        return "op", rng.choice(OPS), where
    if kind == "weighted":
        return kind, (rng.choice(WEIGHTED), rng.choice("ab")), where
    if kind == "cond":
        blocks = [block(rng, depth - 1), rng.choice([[], block(rng, depth - 1)])]
        return kind, rng.choice(PREDICATES), where, blocks
    if kind == "switch":
        blocks = [block(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return kind, rng.choice(CHOOSERS), where, blocks
    times = rng.choice([0, 1, 2, 3])
    return kind, (times, rng.choice(GOES_ON)), where, [block(rng, depth - 1)]


def run(language, rows, state, weights):
    """Do a row of statements, in JAX or on slices."""
    for kind, what, where, *rest in rows:
        blocks = [
            lambda *state, inner=inner: run(language, inner, state, weights)
            for inner in (rest[0] if rest else ())
        ]
        if kind == "op":
            state = language.call(what, where, *state)
        elif kind == "weighted":
            function, name = what
            state = language.call(function, where, weights[name], *state)
        elif kind == "while":
            state = _repeated(language, where, what, blocks[0], state)
        else:
            chooser = language.call(what, where, *state)
            blocks = (*blocks,) if kind == "cond" else (blocks,)
            state = getattr(language, kind)(chooser, *blocks, *state)
    return tuple(state)


def _repeated(language, where, what, body, state):
    times, goes_on = what

    def again(carried):
        left, state = carried
        return language.call(LESS, where, left), body(*state)

    return language.while_loop(
        lambda carried: language.call(goes_on, where, carried[0], carried[1][1]),
        again,
        (jnp.int32(times), tuple(state)),
        max_steps=MAX_STEPS,
    )[1]


def drawn(seed):
    """Draw a model with at least a loop or a branch."""
    rng = random.Random(seed)
    rows = block(rng, 3)
    while all(each[0] in ("op", "weighted") for each in rows):
        rows = block(rng, 3)
    return rows


def model(language, rows):
    """Return the function of a model: a loss, and an integer beside."""

    def function(weights, x, y, i):
        return language.call(LOSS, 1, *run(language, rows, (i, x, y), weights))

    return function


def inputs(seed, dtype):
    """Return weights, the float state, and an integer."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = [(WIDTH, WIDTH)] * 2 + [(ROWS, WIDTH)] * 2
    a, b, x, y = (
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
    return {"a": a, "b": b}, x, y, jnp.int32(seed % 5)
