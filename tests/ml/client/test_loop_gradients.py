"""Gradients through loops and branches by values, on a cluster of two islands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.ml.client.loops import sine_loop
from tests.ml.client.test_failures import TIMEOUT_S
from tests.ml.gradients.nests import InJax, OnSlices, drawn, inputs, model
from timelyml import ml
from timelyml.errors import ComputationError
from timelyml.ml.controller import flow_runs
from timelyml.ml.controller.flow_runs import FlowRun
from timelyml.ml.controller.messages import CallProgram, Put, Release
from timelyml.testing.leftovers import eventually

FLOAT32, FLOAT64 = 1e-5, 1e-10
SLOPE = 1e-6  # of a central difference with steps of 1e-6
QUICK = 42, 87  # small, with loops in loops, and branches in these
SLOW = [pytest.param(i, marks=pytest.mark.slow) for i in range(120) if i not in QUICK]


@pytest.fixture(scope="module")
def slices(client):
    return (
        client.slice({"x": 2}, island="island-0"),
        client.slice({"x": 1}, island="island-1"),
    )


@pytest.fixture(scope="module")
def nest(slices):
    return OnSlices(slices)


def difference(mine, theirs):
    """How far leaves are apart, relative to the largest absolute value of each."""

    def of_leaf(mine, theirs):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        return float(np.abs(mine - theirs).max() / (np.abs(theirs).max() or 1))

    return max(jax.tree.leaves(jax.tree.map(of_leaf, mine, theirs)))


def slope(plain, given, gradients, step=1e-6):
    """How far gradients are off the slope of the loss in a random direction."""
    *moved, i = given
    rng = np.random.default_rng(1)
    along = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), moved)

    def value_at(distance):
        there = jax.tree.map(lambda a, b: a + distance * b, moved, along)
        return float(plain(*there, i)[0])

    measured = (value_at(step) - value_at(-step)) / (2 * step)
    products = jax.tree.map(lambda a, g: float((a * g).sum()), along, list(gradients))
    expected = sum(jax.tree.leaves(products))
    return abs(measured - expected) / max(1.0, abs(expected))


@pytest.mark.parametrize("seed", [*QUICK, *SLOW])
def test_gradients_of_random_nests_are_those_of_one_program(client, slices, nest, seed):
    dtype = "float64" if seed % 2 else "float32"
    with jax.enable_x64(dtype == "float64"):
        rows, given = drawn(seed), inputs(seed, dtype)
        plain = model(InJax(), rows)
        nest.checkpoint = seed % 7 in (0, 3, 5)
        options = {"argnums": (0, 1, 2), "has_aux": True}
        expected = jax.value_and_grad(plain, **options)(*given)
        mine = ml.value_and_grad(
            ml.program(model(nest, rows)), keeps=seed % 4 < 2, **options
        )
        weights, x, y, i = given
        if seed % 3:
            x = client.put(x, slices[0].sharding(P("x")))
            weights["a"] = client.put(weights["a"], slices[1].sharding())

        found = mine(weights, x, y, i)

        bound = FLOAT64 if dtype == "float64" else FLOAT32
        assert difference(found, expected) <= bound
        if dtype == "float64":
            assert slope(plain, given, found[1]) <= SLOPE


def growing(slices, *, max_steps=30):
    """A loop whose number of steps is an argument, on slices and in Python."""

    def plain(w, x, n):
        for _ in range(n):
            x = jnp.sin(w * x)
        return x.sum()

    return sine_loop(*slices, max_steps=max_steps), plain


def test_the_way_back_asks_nothing_of_the_client_and_leaves_nothing(client, slices):
    f, plain = growing(slices)
    gradient = ml.grad(f, (0, 1))
    w = client.put(np.float32(0.9), slices[0].sharding())
    x = client.put(np.linspace(0, 1, 6, dtype=np.float32), slices[0].sharding(P("x")))
    jax.block_until_ready([each.result() for each in gradient(w, x, 25)])
    before = {each.name for each in client.objects()}
    spied = []
    send = client._link.send
    client._link.send = lambda message: (spied.append(message), send(message))

    found = gradient(w, x, 25)
    found = [each.block_until_ready() for each in found]

    client._link.send = send
    kinds = [type(each) for each in spied]
    assert kinds.count(CallProgram) == 1
    assert set(kinds) <= {CallProgram, Put, Release}  # the count is put
    expected = jax.grad(plain, (0, 1))(jnp.float32(0.9), np.asarray(x), 25)
    assert difference(tuple(map(np.asarray, found)), expected) <= FLOAT32

    def new():
        rest = [each for each in client.objects() if each.name not in before]
        return sorted(each.label.split(" ")[0] for each in rest)

    assert eventually(lambda: new().count("output") == 2 and len(new()) <= 3, 10.0), (
        new()
    )


def test_a_gradient_of_more_runs_than_allowed_fails_where_it_is_read(slices):
    f, plain = growing(slices, max_steps=4)
    value_and_grad = ml.value_and_grad(f, 1)
    x = np.linspace(0, 1, 4, dtype=np.float32)
    for each in value_and_grad(np.float32(1), x, 5):
        with pytest.raises(ComputationError, match=r"did not end; .* after 4 runs"):
            each.result(TIMEOUT_S)
    _, gradient = value_and_grad(np.float32(1), x, 4)
    assert difference(np.asarray(gradient), jax.grad(plain, 1)(1.0, x, 4)) <= FLOAT32


def check_long(slices, n):
    f, _ = growing(slices, max_steps=2000)
    found = ml.grad(f)(np.float32(1), np.zeros(4, np.float32), np.int32(n))
    assert float(found) == 0.0


def test_a_way_back_begins_no_more_than_may_be_under_way(slices, monkeypatch):
    monkeypatch.setattr(flow_runs, "MAX_PARTS_AHEAD", 1)
    under_way = []
    taken = FlowRun.may_go_on

    def may_go_on(run, waiter):
        under_way.append(run._num_parts)
        return taken(run, waiter)

    monkeypatch.setattr(FlowRun, "may_go_on", may_go_on)
    check_long(slices, 5)
    assert len(under_way) > 5  # some had to wait
    assert max(under_way) <= 2  # the loss on the way there may be one more


@pytest.mark.slow
def test_a_way_back_over_more_runs_than_a_client_may_have_programs(slices):
    check_long(slices, 1500)
