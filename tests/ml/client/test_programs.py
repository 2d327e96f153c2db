"""`@ml.program` on a cluster: the paper's Figure 2, and what else a block may do."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

from timelyml import ml
from timelyml.errors import ComputationError, ConfigError, HandleError
from timelyml.ml.controller import CallProgram, RegisterProgram, Release


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


@pytest.mark.parametrize("dispatch", ["parallel", "sequential"])
def test_the_papers_figure_2(pair, dispatch):
    cut = P("x")
    a = ml.jit(lambda v: v * 2, slice=pair(), in_shardings=cut, out_shardings=cut)
    b = ml.jit(lambda v: v + 1, slice=pair(), in_shardings=cut, out_shardings=cut)
    c = ml.jit(lambda v: v / 2, slice=pair(), in_shardings=cut, out_shardings=cut)

    @ml.program(dispatch=dispatch)
    def f(v):
        x = a(v)
        y = b(x)
        z = a(c(x))
        return y, z

    y, z = f(np.array([1, 2], np.float32))

    np.testing.assert_array_equal(y, [3, 5])
    np.testing.assert_array_equal(z, [2, 4])


def test_what_follows_a_sequential_program_on_its_slice_waits_for_all_of_it(pair):
    s = pair()
    multiply = ml.jit(lambda x, y: x * y, slice=s)
    add = ml.jit(lambda x: x + 1, slice=s)
    take = ml.jit(lambda x: x - 1, slice=s, donate_argnums=0)
    cube = ml.program(lambda x: multiply(x, multiply(x, x)), dispatch="sequential")
    x = s.client.put(np.float32(2), s.sharding())
    for each in (cube(x), add(x), take(s.client.put(np.float32(2), s.sharding()))):
        each.block_until_ready()  # from here on, calls are made at once

    found = [add(cube(x)), cube(cube(x)), cube(x), take(x)]

    assert [float(each) for each in found] == [9, 512, 8, 1]


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


def test_a_value_that_is_sent_elsewhere_before_it_is_donated_arrives_whole(
    client, pair
):
    here, there = pair(island="island-0"), pair(island="island-1")
    step = ml.jit(lambda w: w + 1, slice=here, donate_argnums=0)
    look = ml.jit(lambda w: w * 10, slice=there)

    @ml.program
    def f(w):
        seen = [look(w)]
        for _ in range(3):
            w = step(w)
            seen.append(look(w))
        return w, seen

    w = client.put(np.zeros(2, np.float32), here.sharding(P("x")))
    for call in range(10):
        w, seen = f(w)
        for number, each in enumerate(seen):
            np.testing.assert_array_equal(each, np.full(2, 10.0 * (3 * call + number)))


def test_a_dispatch_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="expected 'parallel' or 'sequential'"):
        ml.program(lambda x: x, dispatch="quick")


def test_a_donated_constant_is_there_again_at_the_next_call(pair):
    slice_ = pair()
    add = ml.jit(lambda w, x: w + x, slice=slice_, donate_argnums=0)
    start = np.full(2, 5.0, np.float32)

    @ml.program
    def f(x):
        return add(start, x), add(np.ones(2, np.float32), x)

    for number in range(4):
        first, second = f(np.full(2, number, np.float32))
        np.testing.assert_array_equal(first, np.full(2, 5.0 + number))
        np.testing.assert_array_equal(second, np.full(2, 1.0 + number))


def test_a_failed_check_reaches_what_was_computed_from_it_on_another_island(pair):
    here, there = pair(island="island-0"), pair(island="island-1")

    def positive(x):
        checkify.check(jnp.all(x > 0), "the least is {least}", least=x.min())
        return x * 2

    check = ml.jit(positive, slice=here)
    double, add = (ml.jit(f, slice=there) for f in (lambda x: x * 2, lambda x: x + 1))

    @ml.program
    def f(x, y):
        moved = double(check(x))
        return moved, add(moved), add(y), check(y)

    x, y = np.array([1.0, -3.0], np.float32), np.ones(2, np.float32)
    *bad, alone, good = f(x, y)
    for each in bad:
        with pytest.raises(ComputationError, match=r"the least is -3\.0"):
            np.asarray(each)
    np.testing.assert_array_equal(alone, [2.0, 2.0])
    np.testing.assert_array_equal(good, [2.0, 2.0])
    again = f(y, y)
    np.testing.assert_array_equal(again[1], [5.0, 5.0])


def test_a_fused_program_launches_less_and_gives_the_same(client, pair):
    slice_ = pair()
    step = ml.jit(lambda x: x * 3 - x.sum(), slice=slice_, out_shardings=P("x"))

    def steps(x):
        for _ in range(6):
            x = step(x)
        return x

    spied = []
    send = client._link.send
    client._link.send = lambda message: (spied.append(message), send(message))
    x = np.array([1.0, 2.0], np.float32)
    single = ml.program(steps)(x)
    fused = ml.program(steps, fuse=True)(x)
    client._link.send = send

    np.testing.assert_allclose(fused, single, rtol=1e-6)
    programs = [
        pickle.loads(message.pickled)
        for message in spied
        if isinstance(message, RegisterProgram)
    ]
    assert [len(list(each.calls())) for each in programs] == [6, 1]


def test_a_call_of_a_program_is_one_message_of_the_client(client, pair):
    slice_ = pair()
    step = ml.jit(lambda x: x + 1, slice=slice_)

    @ml.program
    def f(x):
        for _ in range(40):
            x = step(x)
        return x

    x = f(client.put(np.zeros(2, np.float32), slice_.sharding(P("x"))))
    spied = []
    send = client._link.send
    client._link.send = lambda message: (spied.append(message), send(message))
    x = f(x)
    client._link.send = send
    kinds = [type(each) for each in spied]
    assert kinds.count(CallProgram) == 1
    assert set(kinds) <= {CallProgram, Release}
    np.testing.assert_array_equal(x, [80.0, 80.0])


def test_typed_keys_and_bfloat16_cross_islands_within_a_program(pair):
    here, there = pair(island="island-0"), pair(island="island-1")
    split = ml.jit(lambda key: jax.random.split(key, 2), slice=here)
    draw = ml.jit(jax.vmap(lambda k: jax.random.normal(k, (3,))), slice=there)
    half = ml.jit(lambda x: x.astype(jnp.bfloat16), slice=there)
    back = ml.jit(lambda x: x.astype(jnp.float32), slice=here)

    @ml.program
    def f(key):
        return back(half(draw(split(key))))

    key = jax.random.key(3)
    normal = jax.vmap(lambda k: jax.random.normal(k, (3,)))(jax.random.split(key, 2))
    expected = normal.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(f(key), expected)


def test_what_a_call_takes_may_be_what_another_program_is_still_computing(pair):
    here, there = pair(island="island-0"), pair(island="island-1")
    up = ml.jit(lambda x: x + 1, slice=here)
    turn = ml.jit(lambda x: -x, slice=there)
    round_trip = ml.program(lambda x: up(turn(up(x))))
    lone = ml.jit(lambda x: x * 2, slice=here)

    x = expected = np.ones(2, np.float32)
    for _ in range(30):
        x = lone(round_trip(x))
        expected = 2 * (1 - (expected + 1))
        expected = np.clip(expected, -1e6, 1e6)
        x = ml.jit(lambda x: jnp.clip(x, -1e6, 1e6), slice=here)(x)
    np.testing.assert_array_equal(x, expected)
