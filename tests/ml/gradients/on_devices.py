"""Differentiates random programs on eight devices; a script.

A drawn block is written once and run twice: as a program, whose gradient is lowered and
run by the interpreter, and by JAX alone, which differentiates it as one program. Prints
the largest differences, relative to the largest absolute value of each leaf, as JSON.
"""

from __future__ import annotations

import json
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.ml.functions.fakes import Client, Slice, Value
from tests.ml.programs.interpreter import Interpreter
from tests.ml.programs.on_devices import MESHES, places
from timelyml import ml
from timelyml.ml.functions import jit, type_of
from timelyml.ml.programs import Lowerings, program

ROWS, WIDTH = 8, 4
EXACT = 1e-5  # in float32; beyond, it is asked how exact JAX is itself


def layer(w, x):
    return jnp.tanh(x @ w)


def mix(x, y):
    return x * jnp.cos(y) + y.sum(0)


def route(x, index):
    return 2 * x[index]


def masked(x, mask):
    return jnp.where(mask, x, x * x / 4)


def both(x):
    return jnp.sin(x), x.argmax(-1)


def consume(x, y):
    return x * y + jnp.exp(-x * x)


@jax.custom_vjp
def tripled(x):
    return x


tripled.defvjp(lambda x: (x, None), lambda _, dy: (3 * dy,))


def custom(x):
    return tripled(x) * 0.5


def looped(w, x):
    return jax.lax.scan(lambda y, _: (jnp.sin(y @ w), None), x, None, length=3)[0]


def loss(x, y):
    return jnp.mean(x**2) + jnp.mean(x * y)


FUNCTIONS = {  # on which slices, and what of: weights, values, the index, the mask
    layer: (("pair", "four"), "wv", {"in_shardings": (P(), P("data"))}),
    mix: (("grid", "lone"), "vv", {}),
    route: (("pair",), "vi", {"in_shardings": (P("data"), None)}),
    masked: (("four",), "vm", {}),
    both: (("lone",), "v", {}),
    consume: (("pair",), "vv", {"donate_argnums": 0}),
    custom: (("four",), "v", {"out_shardings": P(None, "data")}),
    looped: (("lone",), "wv", {}),
}


class World:
    """The functions, compiled for slices, with and without."""

    def __init__(self):
        client = Client()
        self.slices = {
            name: Slice(client, name, mesh) for name, (mesh, _, _) in MESHES.items()
        }
        self.functions = [
            (jit(fun, slice=self.slices[name], **options), fun, kinds)
            for fun, (names, kinds, options) in FUNCTIONS.items()
            for name in names
        ]
        self.loss = jit(loss, slice=self.slices["grid"], in_shardings=P("data")), loss
        self.lowerings = Lowerings()
        devices = {f"d{i}": device for i, device in enumerate(jax.devices())}
        self.interpreter = Interpreter(devices)


def random_block(seed, world):
    """A block with a loss, as one that records calls and one that computes; its slope."""
    chance = random.Random(seed)
    steps, live, count = [], [0], 1
    while len(steps) < 3 + seed % 5:
        choice = chance.choice(world.functions)
        operands = [chance.choice(live) for kind in choice[2] if kind == "v"]
        if choice[1] is consume:
            if operands[0] in operands[1:] or len(live) == 1:
                continue
            live.remove(operands[0])
        steps.append((choice, operands, chance.choice("ab")))
        live.append(count)
        count += 1
    ends = chance.choice(live), live[-1]

    def block(which):
        def run(params, x, index, mask):
            values, picked = [x], []
            for choice, operands, weight in steps:
                more = iter(operands)
                given = {
                    "w": lambda w=weight: params[w],
                    "v": lambda m=more: values[next(m)],
                }
                given |= {"i": lambda: index, "m": lambda: mask}
                found = choice[which](*(given[kind]() for kind in choice[2]))
                if choice[1] is both:
                    found, indices = found
                    picked.append(indices)
                values.append(found)
            return world.loss[which](*(values[end] for end in ends)), picked

        return run

    is_true = all(choice[1] is not custom for choice, _, _ in steps)
    return block(0), block(1), is_true  # a custom rule is not the slope


def inputs(seed, dtype):
    rng = np.random.default_rng(seed)
    params = {name: rng.normal(size=(WIDTH, WIDTH)).astype(dtype) for name in "ab"}
    index, mask = rng.integers(0, ROWS, ROWS), rng.random((ROWS, WIDTH)) < 0.5
    x = rng.normal(size=(ROWS, WIDTH)).astype(dtype)
    return params, x, index.astype(np.int32), mask


def found_by(recorded, world, given, seed):
    """Value, aux and gradients of the program, one after the other."""
    differentiated = ml.value_and_grad(
        program(recorded), (0, 1), has_aux=True, keeps=seed % 3 > 0
    )
    params, x, index, mask = given
    on_pair = Value(world.slices["pair"], type_of(params["a"]), ("data",))
    on_four = Value(world.slices["four"], type_of(x), (None, "data"))
    args = {"a": on_pair, "b": params["b"]}, on_four, index, mask
    call = differentiated.trace_call(*args)
    for name, ref in zip("ax", (-3, -1), strict=True):  # gradients lie as arguments
        value = call.program.value(call.program.results[ref])
        argument = {"a": on_pair, "x": on_four}[name]
        assert (value.slice, value.spec) == (argument.slice.name, argument.spec)
    lowered = world.lowerings.lower(call.program, places())
    return world.interpreter.run(lowered, jax.tree.leaves(given), seed)


def difference(mine, theirs):
    mine, theirs = np.asarray(mine), np.asarray(theirs)
    assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    largest = np.abs(theirs).max()
    return float(np.abs(mine - theirs).max() / (largest or 1))


def slope(plain, given, gradients, step=1e-6):
    """How far gradients are off the slope of the loss in a random direction."""
    rng = np.random.default_rng(1)
    moved = given[:2]
    along = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), moved)

    def value_at(distance):
        there = jax.tree.map(lambda a, b: a + distance * b, moved, along)
        return plain(*there, *given[2:])[0]

    measured = float(value_at(step) - value_at(-step)) / (2 * step)
    pairs = zip(jax.tree.leaves(along), gradients, strict=True)
    expected = sum(float((a * g).sum()) for a, g in pairs)
    return abs(measured - expected) / max(1.0, abs(expected))


def doubt(plain, given, expected):
    """How far JAX alone is off in float32, where small gradients are large sums."""
    with jax.enable_x64(True):
        exact = jax.tree.map(
            lambda leaf: np.float64(leaf) if leaf.dtype == np.float32 else leaf, given
        )
        found = jax.value_and_grad(plain, (0, 1), has_aux=True)(*exact)
    pairs = zip(expected, jax.tree.leaves(found), strict=True)
    return max(difference(np.float64(a), np.float64(b)) for a, b in pairs)


def run(seed, world, name, differences):
    recorded, plain, is_true = random_block(seed, world)
    given = inputs(seed, name)
    found = found_by(recorded, world, given, seed)
    both_ways = jax.value_and_grad(plain, (0, 1), has_aux=True)
    expected = jax.tree.leaves(both_ways(*given))
    differences[name][seed] = max(map(difference, found, expected))
    if name == "float32" and differences[name][seed] > EXACT:
        differences["doubt"][seed] = doubt(plain, given, expected)
    if name == "float64" and is_true:
        differences["slope"][seed] = slope(plain, given, found[-3:])


def main():
    world = World()
    found = {"float32": {}, "float64": {}, "slope": {}, "doubt": {}, "wrong": {}}
    for name, seeds in zip(("float32", "float64"), sys.argv[1:], strict=True):
        with jax.enable_x64(name == "float64"):
            for seed in map(int, seeds.split(",")):
                try:
                    run(seed, world, name, found)
                except Exception as error:  # noqa: BLE001 - all seeds are to be tried
                    found["wrong"][seed] = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
