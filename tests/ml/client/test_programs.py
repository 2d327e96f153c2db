"""`@ml.program` on a cluster: the paper's Figure 2, and what else a block may do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from timelyml import ml
from timelyml.errors import ComputationError, HandleError


@pytest.fixture(scope="module")
def client():
    with ml.local(islands=2, devices_per_island=4) as client:
        yield client


@pytest.fixture
def pair(client):
    slices = []

    def make(**options):
        slices.append(client.slice({"x": 2}, **options))
        return slices[-1]

    yield make
    for each in slices:
        each.close()


def test_the_papers_figure_2(pair):
    cut = P("x")
    a = ml.jit(lambda v: v * 2, slice=pair(), in_shardings=cut, out_shardings=cut)
    b = ml.jit(lambda v: v + 1, slice=pair(), in_shardings=cut, out_shardings=cut)
    c = ml.jit(lambda v: v / 2, slice=pair(), in_shardings=cut, out_shardings=cut)

    @ml.program
    def f(v):
        x = a(v)
        y = b(x)
        z = a(c(x))
        return y, z

    y, z = f(np.array([1, 2], np.float32))

    np.testing.assert_array_equal(y, [3, 5])
    np.testing.assert_array_equal(z, [2, 4])


def test_a_program_across_islands_with_trees_constants_and_what_is_dead(pair):
    here, there = pair(island="island-0"), pair(island="island-1")
    step = ml.jit(lambda w, x: {"w": w - x, "norm": (w * w).sum()}, slice=here)
    scale = ml.jit(lambda x, by: (x * by, x.sum()), slice=there)
    bias = np.array([10.0, 20.0], np.float32)

    @ml.program
    def f(params, x):
        scaled, _ = scale(x, 3.0)
        moved = step(params["w"], scaled)
        again = step(moved["w"], bias)
        return [again["w"], {"norms": (moved["norm"], again["norm"])}, again["w"]]

    w, x = np.array([1.0, 2.0], np.float32), np.array([0.5, 0.25], np.float32)
    first, norms, same = f({"w": w}, x)

    moved = w - x * 3
    np.testing.assert_array_equal(first, moved - bias)
    np.testing.assert_array_equal(same, moved - bias)
    assert float(norms["norms"][0]) == pytest.approx(float((w * w).sum()))
    assert float(norms["norms"][1]) == pytest.approx(float((moved * moved).sum()))


def test_a_program_within_a_program_and_a_captured_handle(client, pair):
    slice_ = pair()
    kept = client.put(np.full(2, 100.0, np.float32), slice_.sharding(P("x")))
    add = ml.jit(lambda x, y: x + y, slice=slice_)

    @ml.program
    def inner(x):
        return add(x, kept)

    @ml.program
    def outer(x, times):
        for _ in range(times):
            x = inner(x)
        return x

    outer = ml.program(outer.function, static_argnums=1)
    np.testing.assert_array_equal(outer(np.ones(2, np.float32), 3), [301.0, 301.0])
    np.testing.assert_array_equal(kept, [100.0, 100.0])


def test_what_a_program_donates_is_dead_after_its_call(client, pair):
    slice_ = pair()
    step = ml.jit(lambda w: w + 1, slice=slice_, donate_argnums=0)

    @ml.program
    def twice(w):
        return step(step(w))

    w = first = client.put(np.zeros(2, np.float32), slice_.sharding(P("x")))
    for _ in range(10):
        w = twice(w)
    np.testing.assert_array_equal(w, [20.0, 20.0])
    with pytest.raises(HandleError, match="donated"):
        np.asarray(first)


def test_an_error_in_a_program_reaches_the_results_that_depend_on_it(client):
    slice_ = client.slice({"x": 1})

    def raising(x):
        def callback(x):
            raise ValueError("no such luck")

        return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    fail, double = ml.jit(raising, slice=slice_), ml.jit(lambda x: x * 2, slice=slice_)

    @ml.program
    def f(x):
        return double(fail(x)), double(x)

    bad, good = f(np.ones(2, np.float32))
    with pytest.raises(ComputationError, match="no such luck"):
        np.asarray(bad)
    np.testing.assert_array_equal(good, jnp.full(2, 2.0))
