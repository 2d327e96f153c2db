"""Loops and branches by values on slices: as in `jax.lax`, and whatever goes wrong."""

from __future__ import annotations

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.ml.client.nests import InJax, OnSlices, drawn, run
from tests.ml.client.test_failures import TIMEOUT_S, process_of
from timelyml import ml
from timelyml.errors import (
    BufferLostError,
    ComputationError,
    RunStoppedError,
    SliceError,
)
from timelyml.ml.controller import CallProgram, Release
from timelyml.testing.leftovers import eventually


@pytest.fixture(scope="module")
def client():
    with ml.local(islands=2, devices_per_island=4, hosts_per_island=2) as client:
        yield client


@pytest.fixture(scope="module")
def slices(client):
    """One on two processes, and one on another island."""
    return client.slice({"x": 4}, island="island-0"), client.slice({"x": 1})


@pytest.fixture(scope="module")
def nest(slices):
    return OnSlices(slices)


@pytest.mark.parametrize("seed", range(10))
def test_random_nests_give_what_jax_lax_does(client, slices, nest, seed):
    rows = drawn(seed)
    state = jnp.int32(seed), jnp.arange(8.0) % 7
    bias = client.put(jnp.float32(4), slices[1].sharding())

    found = ml.program(lambda state: run(nest, rows, state, bias))(state)

    expected = jax.jit(lambda state: run(InJax(), rows, state, jnp.float32(4)))(state)
    for one, other in zip(found, expected, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_a_loop_asks_nothing_of_the_client(client, slices):
    here, there = slices
    less = ml.jit(lambda i, n: i < n, slice=there)
    step = ml.jit(lambda i, x: (i + 1, x + i), slice=here, in_shardings=(P(), P("x")))

    @ml.program
    def total(n, x):
        _, x = ml.while_loop(lambda c: less(c[0], n), lambda c: step(*c), (0, x))
        return x

    n = client.put(np.int32(40), there.sharding())
    x = client.put(np.zeros(4, np.float32), here.sharding(P("x")))
    total(n, x).block_until_ready()
    spied = []
    send = client._link.send
    client._link.send = lambda message: (spied.append(message), send(message))
    y = total(n, x).block_until_ready()
    client._link.send = send
    np.testing.assert_array_equal(y, np.full(4, 780.0))
    kinds = [type(each) for each in spied]
    assert kinds.count(CallProgram) == 1
    assert set(kinds) <= {CallProgram, Release}


def test_loops_and_branches_stand_alone_and_what_follows_does_not_wait(client, slices):
    here, there = slices
    less = ml.jit(lambda c: c < 10, slice=there)
    add = ml.jit(lambda c: c + 3, slice=there)
    double = ml.jit(lambda c: c * 2, slice=here)
    big = ml.jit(lambda c: c > 20, slice=here)

    found = ml.while_loop(less, add, 1)
    doubled = double(found)
    chosen = ml.cond(big(doubled), double, add, doubled)
    switched = ml.switch(7, [add, double], chosen)

    assert [int(each) for each in (found, doubled, chosen, switched)] == [
        10,
        20,
        23,
        46,
    ]
    assert (
        int(ml.while_loop(less, add, client.put(np.int32(50), there.sharding()))) == 50
    )


def test_sequential_loops_and_branches_have_what_they_own_until_they_used_it(
    client, slices
):
    here, there = slices
    near = ml.jit(lambda w: w < 3, slice=there)
    multiply = ml.jit(lambda x, y: x * y, slice=there)
    total = ml.jit(lambda x: x.sum(), slice=here)

    def cube(x):
        return multiply(x, multiply(x, x))

    def f(w):
        chosen = ml.cond(near(w), cube, lambda x: x, w)
        return total(ml.while_loop(near, cube, chosen, max_steps=4))

    for dispatch in ("sequential", "parallel"):  # the second is called without a wait
        g = ml.value_and_grad(ml.program(f, dispatch=dispatch))
        for _ in range(2):
            found = [g(np.float32(w)) for w in (2, 1.25, 3)]
            values = [tuple(map(float, each)) for each in found]
            assert values == [
                (8, 12),
                (1.25**9, 9 * 1.25**8),
                (3, 1),
            ]


def test_what_a_loop_carries_is_taken_in_place_and_what_it_was_given_stays(
    client, slices
):
    here, _ = slices
    less = ml.jit(lambda i: i < 5, slice=here)
    step = ml.jit(lambda i, x: (i + 1, x * 2), slice=here, donate_argnums=(1,))
    x = client.put(np.ones(8, np.float32), here.sharding(P("x")))

    @ml.program
    def f(x):
        found = ml.while_loop(lambda c: less(c[0]), lambda c: step(*c), (0, x))
        return found, x

    (_, found), same = f(x)

    np.testing.assert_array_equal(found, np.full(8, 32.0))
    np.testing.assert_array_equal(x, np.ones(8))
    np.testing.assert_array_equal(same, np.ones(8))


def test_nothing_is_left_of_a_loop(client, slices):
    here, there = slices
    less = ml.jit(lambda i: i < 30, slice=there)
    step = ml.jit(lambda i, x: (i + 1, x * 2), slice=here)

    @ml.program
    def f(x):
        return ml.while_loop(lambda c: less(c[0]), lambda c: step(*c), (0, x))[0]

    kept = client.put(np.ones(8, np.float32), here.sharding())
    before = {each.name for each in client.objects()}
    results = [f(kept), f(kept)]
    assert [int(each) for each in results] == [30, 30]

    def new():
        found = [each for each in client.objects() if each.name not in before]
        return sorted(each.label.split(" ")[0] for each in found)

    # The constant that the loop begins with stays with the program.
    assert eventually(lambda: new() == ["output", "output", "put"], 10.0), new()


def test_an_error_in_a_body_names_the_loop_its_run_and_the_line(client, slices):
    here, there = slices

    def raising(i):
        if int(i) == 3:
            raise ValueError("no threes")
        return np.asarray(i)

    def called(i):
        return jax.pure_callback(raising, jax.ShapeDtypeStruct((), "int32"), i) + 1

    step = ml.jit(called, slice=there)
    less = ml.jit(lambda i: i < 9, slice=there)
    same = ml.jit(lambda x: x + 1, slice=here)

    @ml.program
    def f(x):
        return ml.while_loop(less, step, 0), same(x)

    bad, good = f(np.float32(1))
    expected = r"no threes.*run 3 of the while_loop at .*test_control_flow.*return ml\."
    with pytest.raises(ComputationError, match=expected):
        bad.result(TIMEOUT_S)
    assert float(good) == 2.0
    with pytest.raises(
        ComputationError, match=r"does not|did not end; .* after 4 runs"
    ):
        ml.while_loop(less, same.on(there), 0, max_steps=4).result(TIMEOUT_S)
    assert int(ml.while_loop(less, same.on(there), 0, max_steps=9)) == 9


def endless(slice_):
    goes_on = ml.jit(lambda i: i >= 0, slice=slice_)
    step = ml.jit(lambda i: (i + 1) % 1000, slice=slice_)
    return ml.program(lambda i: ml.while_loop(goes_on, step, i))


def test_an_endless_loop_lets_others_run_and_can_be_cancelled(client, slices):
    here, _ = slices
    other = client.another()
    own = other.slice({"x": 4}, island="island-0")
    add = ml.jit(lambda x: x + 1, slice=own)

    stuck = endless(here)(np.int32(0))
    after = ml.jit(lambda i: i * 2, slice=here)(stuck)
    x = np.float32(0)
    for _ in range(20):
        x = add(x)
    assert float(x) == 20.0
    assert not stuck.is_ready()
    client.cancel(stuck)
    for each in (stuck, after):
        with pytest.raises(RunStoppedError, match="cancelled"):
            each.result(TIMEOUT_S)

    endless(own)(np.int32(0))
    other.close()
    assert eventually(
        lambda: {each.client for each in client.usage()} <= {None, client._number},
        TIMEOUT_S,
    )
    assert float(ml.jit(lambda x: x + 1, slice=here)(np.float32(1))) == 2.0


def test_a_loop_ends_with_the_host_that_has_its_values():
    with ml.local(islands=2, devices_per_island=1) as client:
        here = client.slice({"x": 1}, island="island-0")
        there = client.slice({"x": 1}, island="island-1")
        goes_on = ml.jit(lambda i: i >= 0, slice=there)
        step = ml.jit(lambda i: (i + 1) % 1000, slice=here)
        stuck = ml.while_loop(goes_on, step, np.int32(0))
        add = ml.jit(lambda x: x + 1, slice=there)
        assert float(add(np.float32(0))) == 1.0

        os.kill(process_of(client, 0), signal.SIGKILL)
        with pytest.raises((BufferLostError, SliceError), match="island-0"):
            stuck.result(TIMEOUT_S / 4)
        assert float(add(np.float32(1))) == 2.0
