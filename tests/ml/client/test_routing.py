"""Rows that go where their values say: against numpy, and whatever goes wrong."""

from __future__ import annotations

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.ml.client.test_local import awaited
from timelyml import ml
from timelyml.errors import ComputationError, HandleError
from timelyml.ml.controller import CallProgram, Put, Release
from timelyml.testing.leftovers import eventually

NUM_ROWS = 13
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def client():
    with ml.local(islands=2, devices_per_island=4, hosts_per_island=2) as client:
        yield client


@pytest.fixture(scope="module")
def slices(client):
    """One on two processes, one on one of them, one on another island's two."""
    return (
        client.slice({"x": 4}, island="island-0"),
        client.slice({"x": 2}, island="island-0"),
        client.slice({"y": 2, "z": 2}, island="island-1"),
    )


@pytest.fixture(scope="module")
def rounds(slices):
    """Programs that send rows from slice to slice and back, by both ends."""

    def make(source, target):
        names = tuple(target.mesh.axis_names)
        scale = ml.jit(
            lambda rows, number, by: (rows["x"] * by + 1, number * 2),
            slice=target,
            in_shardings=(None, None, P(names)),
        )
        same = ml.jit(lambda x, to: (x, to), slice=source)

        @ml.program
        def there_and_back(x, number, to, by):
            x, to = same(x, to)
            rows, numbers = ml.route(({"x": x}, number), to, target)
            scaled = scale(rows, numbers, by)
            return rows["x"], scaled, ml.unroute(scaled)

        return there_and_back

    pairs = [(0, 0), (0, 2), (2, 1)]
    return {pair: make(*(slices[each] for each in pair)) for pair in pairs}


def shards_of(to, num_sources, num_shards):
    """Which rows each shard gets, in order: they lie in that of their shards already."""
    return [np.flatnonzero(to == shard) for shard in range(num_shards)]


@pytest.mark.parametrize("pair", [(0, 0), (0, 2), (2, 1)])
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_rows_go_where_they_say_and_come_back(slices, rounds, pair, data):
    num_shards = slices[pair[1]].mesh.size
    numbers = st.integers(-1, num_shards - 1)
    to = np.array(
        data.draw(st.lists(numbers, min_size=NUM_ROWS, max_size=NUM_ROWS)), np.int32
    )
    x = np.arange(NUM_ROWS * 2, dtype=np.float32).reshape(NUM_ROWS, 2)
    number = np.arange(NUM_ROWS, dtype=np.int32)
    by = np.arange(1.0, num_shards + 1, dtype=np.float32)

    rows, (scaled, doubled), (back, twice) = rounds[pair](x, number, to, by)

    expected = shards_of(to, slices[pair[0]].mesh.size, num_shards)
    order = np.concatenate(expected)
    np.testing.assert_array_equal(rows, x[order])
    assert rows.row_counts == tuple(map(len, expected))
    assert rows.shape == scaled.shape == (len(order), 2)
    each = np.where(to[:, None] >= 0, x * by[to][:, None] + 1, 0)
    np.testing.assert_array_equal(scaled, each[order])
    np.testing.assert_array_equal(doubled, number[order] * 2)
    np.testing.assert_array_equal(back, each)
    np.testing.assert_array_equal(twice, np.where(to >= 0, number * 2, 0))


def test_shards_compute_on_buckets_of_their_rows_and_without_rows_nothing(
    client, slices, tmp_path
):
    log = tmp_path / "shards"

    def note(shard):
        with log.open("a", encoding="ascii") as file:
            file.write(f"{shard}\n")
        return np.float32(0)

    def sized(x):
        shard = jax.lax.axis_index(("y", "z"))
        zero = jax.pure_callback(note, jax.ShapeDtypeStruct((), jnp.float32), shard)
        return jnp.full(x.shape, x.shape[0], jnp.float32) + zero

    sized = ml.jit(sized, slice=slices[2])
    before = used_by(client)
    to = np.repeat(np.array([0, 2, 3, -1], np.int32), [5, 20, 40, 5])

    rows = ml.route(np.zeros(70, np.float32), to, slices[2])
    sizes = sized(rows)

    assert sizes.result(TIMEOUT_S).tolist() == [16.0] * 5 + [32.0] * 20 + [64.0] * 40
    assert sizes.row_counts == (5, 0, 20, 40)
    assert set(log.read_text(encoding="ascii").split()) == {"0", "2", "3"}
    after = used_by(client)
    assert after.num_rows - before.num_rows == 65
    assert after.num_idle_shards - before.num_idle_shards == 1


@pytest.mark.parametrize(
    ("to", "num_idle"),
    [([2, 2, 0, 2, 2, 0], 2), ([3] * 6, 3), ([-1] * 6, 4), ([0, 1, 2, 3, 3, 3], 0)],
)
def test_nothing_is_launched_on_devices_whose_shards_have_no_rows(
    client, slices, alone, to, num_idle
):
    values = np.arange(6, dtype=np.float32)
    rows = ml.route(values, np.array(to, np.int32), slices[2])
    rows.block_until_ready()
    before = used_by(client).num_left_out

    found = [alone[name](rows).block_until_ready() for name in alone]

    expected = np.asarray(rows)
    np.testing.assert_array_equal(found[0], expected * 2 + 1)
    np.testing.assert_array_equal(found[1], expected * 2 + expected.sum())
    # One function needs nothing of other shards; the whole gang runs the other.
    assert used_by(client).num_left_out - before == num_idle


@pytest.fixture(scope="module")
def alone(slices):
    """A function that shards compute by themselves, and one with a collective."""

    def total(rows):
        return jax.lax.psum(rows.sum(), ("y", "z"))

    functions = {"alone": lambda x: x * 2 + 1, "together": lambda x: x * 2 + total(x)}
    return {name: ml.jit(f, slice=slices[2]) for name, f in functions.items()}


def used_by(client):
    return next(each for each in client.usage() if each.client == client._number)


def test_a_layer_of_experts_by_hand_is_the_dense_one(client, slices):
    tokens, experts, width, top_k = 24, 4, 8, 2
    here, _, there = slices
    draw = np.random.default_rng(3).standard_normal
    x, router = draw((tokens, width)), draw((width, experts))
    up, down = draw((experts, width, 16)), draw((experts, 16, width))
    x, router, up, down = (each.astype(np.float32) for each in (x, router, up, down))

    def choose(x, router):
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), top_k)
        return weights, chosen.ravel(), jnp.repeat(x, top_k, 0)

    def expert(rows, up, down):  # of one shard: (rows, width), (1, width, 16), ...
        return jax.nn.relu(rows @ up[0]) @ down[0]

    choose = ml.jit(choose, slice=here)
    of_experts = P(("y", "z"))
    expert = ml.jit(expert, slice=there, in_shardings=(None, of_experts, of_experts))
    merge = ml.jit(
        lambda rows, weights: ml.combine(rows.reshape(tokens, top_k, width), weights),
        slice=here,
    )

    @ml.program
    def layer(x, router, up, down):
        weights, chosen, rows = choose(x, router)
        routed = ml.route(rows, chosen, there)
        return merge(ml.unroute(expert(routed, up, down)), weights), routed

    found, routed = layer(x, router, up, down)

    scores = np.exp(x @ router)
    scores /= scores.sum(1, keepdims=True)
    chosen = np.argsort(-scores, 1)[:, :top_k]
    every = np.maximum(np.einsum("tw,ewf->tef", x, up), 0)
    every = np.einsum("tef,efw->tew", every, down)
    picked = np.take_along_axis(every, chosen[..., None], 1)
    weights = np.take_along_axis(scores, chosen, 1)
    expected = (picked * weights[..., None]).sum(1)
    # Sums of 8 and 16 products in another order: a few units in the last place.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    counts = np.bincount(chosen.ravel(), minlength=experts)
    assert routed.block_until_ready().row_counts == tuple(counts)


def test_a_program_that_routes_asks_nothing_of_the_client(client, slices, rounds):
    x = client.put(np.ones((NUM_ROWS, 2), np.float32), slices[0].sharding())
    args = x, np.zeros(NUM_ROWS, np.int32), np.zeros(NUM_ROWS, np.int32), np.ones(4)
    args = (*args[:3], args[3].astype(np.float32))
    jax.block_until_ready(rounds[0, 2](*args)[2])
    spied = []
    send = client._link.send
    client._link.send = lambda message: (spied.append(message), send(message))
    back, _ = rounds[0, 2](*args)[2]
    back.block_until_ready()
    client._link.send = send
    np.testing.assert_array_equal(back, np.full((NUM_ROWS, 2), 2.0))
    kinds = [type(each) for each in spied]
    assert kinds.count(CallProgram) == 1
    assert set(kinds) <= {CallProgram, Put, Release}


def test_rows_that_have_no_place_fail_what_depends_on_them_and_nothing_else(
    client, slices
):
    here, _, there = slices
    double = ml.jit(lambda x: x * 2, slice=there)
    triple = ml.jit(lambda x: x * 3, slice=here)

    @ml.program
    def routed(x, to):
        rows = ml.route(x, to, there, max_rows=3)
        return double(rows), ml.unroute(rows), triple(x)

    x = np.arange(6, dtype=np.float32)
    doubled, back, tripled = routed(x, np.array([0, 1, 4, 3, 0, 0], np.int32))
    for each in (doubled, back):
        with pytest.raises(
            ComputationError, match=r"destination 4; .*below 4"
        ) as failed:
            each.result()
        assert "test_routing.py" in str(failed.value)
    np.testing.assert_array_equal(tripled, x * 3)

    doubled, back, tripled = routed(x, np.array([0, 1, 0, 0, 0, -9], np.int32))
    for each in (doubled, back):
        with pytest.raises(ComputationError, match=r"got 4 for shard 0 .*at most 3"):
            each.result()
    np.testing.assert_array_equal(tripled, x * 3)

    doubled, back, _ = routed(x, np.array([0, 1, 0, 0, -2, -9], np.int32))
    np.testing.assert_array_equal(back, [0, 1, 2, 3, 0, 0])


def test_an_error_of_a_function_on_rows_is_that_of_what_depends_on_it(client, slices):
    _, source, there = slices
    check = ml.jit(
        lambda x: jax.experimental.checkify.check(x[0] < 3, "large") or x, slice=source
    )
    rows = ml.route(check(np.full(4, 5.0, np.float32)), np.zeros(4, np.int32), there)
    for each in (rows, ml.unroute(rows)):
        with pytest.raises(ComputationError, match="large"):
            each.result()


def test_ragged_handles_are_donated_published_suspended_and_let_go(client, slices):
    _, source, there = slices
    taking = ml.jit(lambda x: x + 1, slice=there, donate_argnums=0)
    x = client.put(np.arange(8, dtype=np.float32), source.sharding())
    to = np.array([3, 1, 1, 0, 3, -1, 1, 0], np.int32)
    rows = ml.route(x, to, there)
    client.publish("rows", rows)
    rows.block_until_ready()
    there.suspend(timeout_s=TIMEOUT_S)
    suspended = np.asarray(rows)
    there.resume(timeout_s=TIMEOUT_S)

    added = taking(rows)
    opened = client.open("rows")

    np.testing.assert_array_equal(suspended, [3, 7, 1, 2, 6, 0, 4])
    np.testing.assert_array_equal(added, suspended + 1)
    with pytest.raises(HandleError, match="donated"):
        rows.result()
    np.testing.assert_array_equal(opened, suspended)
    np.testing.assert_array_equal(asyncio.run(awaited(opened)), suspended)
    np.testing.assert_array_equal(ml.unroute(added), [1, 2, 3, 4, 5, 0, 7, 8])
    client.unpublish("rows")
    before = len(client.objects())
    buffers = {each.buffer for each in jax.tree.leaves((opened, rows, added))}
    assert buffers
    del opened, rows, added
    eventually(lambda: len(client.objects()) < before, TIMEOUT_S)


@pytest.fixture(scope="module")
def switched(slices):
    """Each row takes one of three functions, one of which is on another island."""
    here, _, there = slices
    functions = [lambda x: x * 2, lambda x: x - 1, lambda x: x + 100]
    branches = [
        ml.jit(f, slice=each)
        for f, each in zip(functions, (here, there, here), strict=True)
    ]
    return ml.program(
        lambda i, x: ml.switch(i, branches, x, per_example=True)
    ), functions


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=NUM_ROWS, max_size=NUM_ROWS))
def test_each_row_takes_its_branch(client, slices, switched, indices):
    program, functions = switched
    index = np.array(indices, np.int32)
    x = np.arange(NUM_ROWS, dtype=np.float32)

    found = program(index, client.put(x, slices[0].sharding()))

    expected = jax.vmap(lambda i, row: jax.lax.switch(i, functions, row))(index, x)
    np.testing.assert_array_equal(found, expected)


def test_a_branch_that_no_row_takes_does_not_run(client, slices, switched):
    program, _ = switched
    x = client.put(np.zeros(NUM_ROWS, np.float32), slices[0].sharding())
    before = used_by(client)
    program(np.zeros(NUM_ROWS, np.int32), x).block_until_ready()
    assert used_by(client).num_rows == before.num_rows  # none were sent elsewhere
    program(np.ones(NUM_ROWS, np.int32), x).block_until_ready()
    assert used_by(client).num_rows == before.num_rows + NUM_ROWS


@pytest.fixture(scope="module")
def looped(slices):
    """Rows that are halved or tripled until they are 1, as many times as each takes."""
    here = slices[0]

    def step(state):
        n, steps = state
        return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), steps + 1

    def goes_on(state):
        return state[0] > 1

    on_slice = [ml.jit(each, slice=here) for each in (goes_on, step)]
    program = ml.program(
        lambda n: ml.while_loop(
            *on_slice, (n, np.zeros(NUM_ROWS, np.int32)), per_example=True, max_steps=60
        )
    )
    return program, goes_on, step


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(-2, 26), min_size=NUM_ROWS, max_size=NUM_ROWS))
def test_each_row_leaves_a_loop_when_it_is_done(client, slices, looped, numbers):
    program, goes_on, step = looped
    n = np.array(numbers, np.int32)

    found = program(client.put(n, slices[0].sharding()))

    steps = np.zeros(NUM_ROWS, np.int32)
    expected = jax.vmap(lambda *row: jax.lax.while_loop(goes_on, step, row))(n, steps)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_loop_of_rows_that_does_not_end_fails_with_its_line(client, slices, looped):
    program, *_ = looped
    n = np.ones(NUM_ROWS, np.int32)
    n[4] = 27  # takes 111
    found, _ = program(client.put(n, slices[0].sharding()))
    with pytest.raises(ComputationError, match="true after 60 runs") as failed:
        found.result()
    assert "test_routing.py" in str(failed.value)


def test_loops_switches_and_routings_nest(client, slices):
    """Rows that a loop has left choose functions, one of which is on another island."""
    here, _, there = slices
    less = ml.jit(lambda x: x < 40, slice=here)
    parity = ml.jit(lambda x: x.astype(jnp.int32) % 2, slice=here)
    add = ml.jit(lambda x: x + 7, slice=here)
    double = ml.jit(lambda x: x * 2, slice=there)

    @ml.program
    def grow(x, to):
        rows = ml.route(x, to, here)
        grown = ml.while_loop(
            less,
            lambda x: ml.switch(parity(x), [double, add], x, per_example=True),
            rows,
            per_example=True,
        )
        return ml.unroute(grown)

    x = np.arange(1, NUM_ROWS + 1, dtype=np.float32)
    to = (np.arange(NUM_ROWS) * 7 % 4).astype(np.int32)
    expected = x.copy()
    for row in range(NUM_ROWS):
        while expected[row] < 40:
            is_odd = expected[row] % 2
            expected[row] = expected[row] + 7 if is_odd else expected[row] * 2
    np.testing.assert_array_equal(grow(x, to), expected)


def test_rows_of_two_calls_do_not_mix(client, slices):
    there = slices[2]
    add = ml.jit(lambda x, y: x + y, slice=there)
    send = ml.program(lambda x, to: ml.route(x, to, there))
    x = np.arange(4, dtype=np.float32)
    ones = [send(x, np.array([0, 1, 1, last], np.int32)) for last in (2, 2, 3)]

    np.testing.assert_array_equal(add(*ones[:2]), x * 2)
    with pytest.raises(ComputationError, match="rows of several calls"):
        add(*ones[1:]).result()


@pytest.mark.parametrize("shape", [(0, 3), (6, 0)])
def test_rows_without_elements_come_and_go_as_all_others(client, slices, shape):
    to = np.arange(shape[0], dtype=np.uint8) % 4
    none = ml.route(np.zeros(shape, np.float32), to, slices[2])
    assert np.asarray(none).shape == np.asarray(ml.unroute(none)).shape == shape
    assert none.row_counts == tuple(np.bincount(to, minlength=4))
