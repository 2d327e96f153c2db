"""Runs random programs, and the paper's, on eight devices; a script.

Programs are traced and lowered as a client and a controller do it, and run by the
interpreter. What they should give is computed by their functions alone, without
slices. All values are small whole numbers, so sums are exact in any order. Prints what
went wrong, as JSON.
"""

from __future__ import annotations

import json
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from tests.ml.functions.fakes import Client, Slice, Value
from tests.ml.programs.interpreter import Interpreter
from timelyml.ml.functions import ArrayType, jit
from timelyml.ml.programs import Lowerings, Place, program

SHAPE = (8, 4)
TYPE = ArrayType(SHAPE, "float32", 4)
MESHES = {
    "pair": (AbstractMesh((2,), ("data",)), "left", [0, 2]),
    "four": (AbstractMesh((4,), ("data",)), "right", [4, 5, 6, 7]),
    "grid": (AbstractMesh((2, 2), ("data", "model")), "left", [0, 1, 2, 3]),
    "lone": (AbstractMesh((1,), ("data",)), "right", [5]),
}
HOSTS = ["h0", "h0", "h1", "h1", "h2", "h2", "h2", "h3"]
SPECS = {
    "pair": [P("data"), P()],
    "four": [P(None, "data"), P("data")],
    "grid": [P("data", "model"), P("model"), P(("model", "data"))],
    "lone": [P()],
}


def places():
    return {
        name: Place(
            island,
            tuple(f"d{i}" for i in devices),
            tuple(HOSTS[i] for i in devices),
        )
        for name, (_, island, devices) in MESHES.items()
    }


def small(x):
    return jnp.mod(x, 97)


def add(x, y):
    return small(x + y)


def scale(x):
    return small(3 * x - 1)


def shift(x):
    return jnp.roll(x, 1, 0)


def total(x):
    return small(x + x.sum(0, keepdims=True))


def both(x):
    return small(x + x.sum()), small(2 * x)


def consume(x, y):
    return small(5 * x + y)


FUNCTIONS = {
    add: (2, {}),
    scale: (1, {}),
    shift: (1, {}),
    total: (1, {}),
    both: (1, {}),
    consume: (2, {"donate_argnums": (0,)}),
}


class World:
    """The functions, compiled for every slice, with and without slices."""

    def __init__(self):
        client = Client()
        self.slices = {
            name: Slice(client, name, mesh) for name, (mesh, _, _) in MESHES.items()
        }
        chance = random.Random(7)
        self.functions = []
        for fun, (num_args, options) in FUNCTIONS.items():
            for name, slice_ in self.slices.items():
                specs = SPECS[name]
                compiled = jit(
                    fun,
                    slice=slice_,
                    in_shardings=tuple(chance.choice(specs) for _ in range(num_args)),
                    out_shardings=chance.choice(specs),
                    **options,
                )
                self.functions.append((compiled, jax.jit(fun), num_args, options))
        self.lowerings = Lowerings()
        devices = {f"d{i}": device for i, device in enumerate(jax.devices())}
        self.interpreter = Interpreter(devices)


def random_block(seed, world):
    """A block of calls, as one that records them and as one that computes them."""
    chance = random.Random(seed)
    steps = []
    live = [0, 1, 2]
    count = len(live)
    for _ in range(chance.randint(2, 9)):
        choice = chance.choice(world.functions)
        operands = [chance.choice(live) for _ in range(choice[2])]
        if choice[3]:
            if operands.count(operands[0]) > 1 or len(live) == 1:
                continue
            live.remove(operands[0])
        num_results = 2 if choice[0].function is both else 1
        steps.append((choice, operands, num_results))
        live += range(count, count + num_results)
        count += num_results
    if not steps:
        steps.append((world.functions[0], [0, 1], 1))
        live.append(3)
    results = [each for each in live if chance.random() < 0.6] or live[-1:]

    def block(which):
        def run(x, y, z):
            values = [x, y, z]
            for choice, operands, num_results in steps:
                found = choice[which](*(values[each] for each in operands))
                values += found if num_results == 2 else [found]
            return [values[each] for each in results]

        return run

    return block(0), block(1)


def check(seed, world, fuse):
    recorded, plain = random_block(seed, world)
    rng = np.random.default_rng(seed)
    whole = [rng.integers(0, 9, SHAPE).astype(np.float32) for _ in range(3)]
    on_slice = Value(world.slices["grid"], TYPE, ("model", "data"))
    call = program(recorded, fuse=fuse).trace_call(
        whole[0], on_slice, Value(world.slices["four"], TYPE, ())
    )
    lowered = world.lowerings.lower(call.program, places())
    found = world.interpreter.run(lowered, whole, seed)
    for mine, theirs in zip(found, plain(*whole), strict=True):
        np.testing.assert_array_equal(mine, np.asarray(theirs))


def figure_2(world):
    a, b, c = (
        Slice(world.slices["pair"].client, name, AbstractMesh((2,), ("data",)))
        for name in "abc"
    )
    double = jit(lambda x: x * 2, slice=a, in_shardings=P("data"))
    increment = jit(lambda x: x + 1, slice=b, in_shardings=P("data"))
    halve = jit(lambda x: x / 2, slice=c, in_shardings=P("data"))

    @program
    def f(v):
        x = double(v)
        y = increment(x)
        z = double(halve(x))
        return y, z

    where = {
        "a": Place("left", ("d0", "d1"), ("h0", "h0")),
        "b": Place("left", ("d2", "d3"), ("h1", "h1")),
        "c": Place("right", ("d4", "d5"), ("h2", "h2")),
    }
    v = np.array([1, 2], np.float32)
    lowered = world.lowerings.lower(f.program(v), where)
    return [each.tolist() for each in world.interpreter.run(lowered, [v])]


def keys(world):
    """Whether keys that cross islands draw the numbers of plain JAX."""

    def split(key):
        return jax.random.split(key, 4)

    def draw(keys, scale):
        return jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys) * scale

    pair, four = world.slices["pair"], world.slices["four"]
    split_on_pair = jit(split, slice=pair, out_shardings=P("data"))
    draw_on_four = jit(draw, slice=four, in_shardings=(P("data"), P()))
    key = jax.random.key(11)

    @program
    def f(scale):
        return draw_on_four(split_on_pair(key), scale)

    scale = np.float32(2)
    lowered = world.lowerings.lower(f.program(scale), places())
    (found,) = world.interpreter.run(lowered, [scale])
    expected = jax.jit(draw)(jax.jit(split)(key), scale)
    return np.array_equal(found, np.asarray(expected))


def main():
    first, last = map(int, sys.argv[1:])
    world = World()
    wrong = {}
    for seed in range(first, last):
        try:
            check(seed, world, fuse=seed % 8 == 0)
        except Exception as error:  # noqa: BLE001 - all seeds are to be tried
            wrong[seed] = f"{type(error).__name__}: {error}"[:500]
    found = {"wrong": wrong, "figure 2": figure_2(world), "keys": keys(world)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
