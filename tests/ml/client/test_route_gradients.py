"""Gradients through rows that go their own way, on a cluster of two islands."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.ml.client.test_loop_gradients import FLOAT32, FLOAT64, difference
from timelyml import ml

NUM_ROWS, WIDTH, NUM_EXPERTS = 7, 3, 2
DTYPES = {"float32": FLOAT32, "float64": FLOAT64}


@pytest.fixture(scope="module")
def slices(client):
    return (
        client.slice({"x": 2}, island="island-0"),
        client.slice({"e": NUM_EXPERTS}, island="island-1"),
    )


def expert(rows, w, b):
    return jnp.tanh(rows @ w[0] + b)


def loss(y, x):
    return (y * jnp.cos(x)).sum()


def drawn(dtype, num_rows=NUM_ROWS):
    """Weights of the experts, what they share, and rows."""
    normal = np.random.default_rng(5).normal
    shapes = (NUM_EXPERTS, WIDTH, WIDTH), (WIDTH,), (num_rows, WIDTH)
    return tuple(normal(size=shape).astype(dtype) for shape in shapes)


@pytest.fixture(scope="module")
def routed(slices):
    """What experts make of the rows that are sent to them, as one number."""
    here, there = slices
    on_rows = ml.jit(expert, slice=there, in_shardings=(None, P("e"), P()))
    total = ml.jit(loss, slice=here)

    @ml.program
    def model(w, b, x, to):
        return total(ml.unroute(on_rows(ml.route(x, to, there), w, b)), x)

    return model


def dense(w, b, x, to):
    """The same: each row multiplied by the weights of its own."""
    y = jnp.tanh(jnp.einsum("rd,rdf->rf", x, w[jnp.maximum(to, 0)]) + b)
    return loss(jnp.where(to[:, None] >= 0, y, 0), x)


dense_gradients = jax.jit(jax.value_and_grad(dense, (0, 1, 2)))


@pytest.fixture(scope="module")
def gradients(routed):
    """By `keeps`, so that examples of one test are traced once."""
    return functools.cache(
        lambda keeps: ml.value_and_grad(routed, (0, 1, 2), keeps=keeps)
    )


@pytest.mark.parametrize(("dtype", "keeps"), [("float32", False), ("float64", True)])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.lists(st.integers(-1, NUM_EXPERTS - 1), min_size=NUM_ROWS, max_size=NUM_ROWS))
@example([0] * NUM_ROWS)
@example([-1] * NUM_ROWS)
def test_gradients_of_routed_rows_are_the_dense_ones(gradients, dtype, keeps, to):
    with jax.enable_x64(dtype == "float64"):
        args = (*drawn(dtype), np.array(to, np.int32))

        found = gradients(keeps)(*args)

        expected = dense_gradients(*args)
        assert difference(found, expected) <= DTYPES[dtype]
        idle = sorted({0, 1} - set(to))
        assert not np.asarray(found[1][0])[idle].any()  # exactly zero


def test_neither_way_is_launched_where_there_are_no_rows(client, slices):
    here, there = slices
    on_rows = ml.jit(
        lambda rows, w: jnp.tanh(rows @ w[0]), slice=there, in_shardings=(None, P("e"))
    )
    total = ml.jit(loss, slice=here)

    @ml.program
    def model(w, x, to):
        return total(ml.unroute(on_rows(ml.route(x, to, there), w)), x)

    w, _, x = drawn("float32")
    back = ml.grad(model, (0, 1))
    for to, num_left_out in (([0] * 7, 2), ([1, 0] * 3 + [0], 0), ([-1] * 7, 4)):
        before = client.usage()[0].num_left_out
        found = back(w, x, np.array(to, np.int32))
        jax.block_until_ready(found)
        _, expected = dense_gradients(w, jnp.zeros(WIDTH), x, np.array(to, np.int32))
        assert difference(found, (expected[0], expected[2])) <= FLOAT32
        assert client.usage()[0].num_left_out - before == num_left_out


def test_no_rows_at_all_have_gradients_of_zeros(routed):
    w, b, x = drawn("float32", num_rows=0)
    found = ml.grad(routed, (0, 1, 2))(w, b, x, np.zeros(0, np.int32))
    for gradient, argument in zip(found, (w, b, x), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros_like(argument))


def test_a_gradient_through_rows_can_be_differentiated_again(slices, routed):
    square = ml.jit(lambda g: (g * g).sum(), slice=slices[0])
    steep = ml.program(lambda *args: square(ml.grad(routed)(*args)))
    args = (*drawn("float32"), np.array([0, 1, 1, -1, 1, 0, 1], np.int32))

    found = ml.grad(steep, (0, 1, 2))(*args)

    expected = jax.grad(lambda *args: (jax.grad(dense)(*args) ** 2).sum(), (0, 1, 2))
    assert difference(found, jax.jit(expected)(*args)) <= FLOAT32


@pytest.mark.parametrize("checkpoint", [False, True])
def test_rows_that_choose_anew_in_each_run_of_a_loop(slices, checkpoint):
    here, there = slices
    choose = ml.jit(lambda x: (x.sum(-1) > 0).astype(jnp.int32), slice=here)
    less = ml.jit(lambda i: i < 3, slice=here)
    add = ml.jit(lambda i, y, x: (i + 1, x + y), slice=here)
    on_rows = ml.jit(expert, slice=there, in_shardings=(None, P("e"), P()))
    total = ml.jit(loss, slice=here)

    @ml.program
    def model(w, b, x):
        def body(carried):
            i, y = carried
            rows = ml.route(y, choose(y), there)
            return add(i, ml.unroute(on_rows(rows, w, b)), y)

        options = {"max_steps": np.int64(5), "checkpoint": checkpoint}
        _, y = ml.while_loop(lambda carried: less(carried[0]), body, (0, x), **options)
        return total(y, x)

    def plain(w, b, x):
        y = x
        for _ in range(3):
            to = (y.sum(-1) > 0).astype(jnp.int32)
            y = y + jnp.tanh(jnp.einsum("rd,rdf->rf", y, w[to]) + b)
        return loss(y, x)

    args = drawn("float32")
    back = ml.grad(model, (0, 1, 2))
    text = back.ir(*args)
    assert text.count(" = call choose") <= 1 + checkpoint
    kept = next(node for node in back.program(*args).nodes if hasattr(node, "body"))
    types = [kept.body.nodes[x.node].outputs[x.output].type for x in kept.body.results]
    # Of each run: what is carried, and then of a routing only who goes where.
    assert not checkpoint or list(map(str, types[2:])) == ["float32[7,3]", "int32[5]"]

    found = back(*args)

    assert difference(found, jax.jit(jax.grad(plain, (0, 1, 2)))(*args)) <= FLOAT32


@pytest.fixture(scope="module")
def branched(slices):
    """Rows of which each takes one of two functions, one on another island."""
    here, there = slices
    functions = [lambda w, x: jnp.sin(w * x), lambda w, x: w * x * x]
    on_slices = [
        ml.jit(f, slice=each) for f, each in zip(functions, (here, there), strict=True)
    ]
    total = ml.jit(loss, slice=here)

    def away(rows):
        return ml.route(rows, spread(rows), there)

    spread = ml.jit(lambda x: jnp.arange(len(x), dtype=jnp.int32) % 2, slice=here)
    return functions, on_slices, total, away


def by_row(functions):
    """The gradients of what the functions make of rows, each by its own one."""

    def value(w, x, i):
        y = jax.vmap(lambda i, r: jax.lax.switch(i, functions, w, r), (0, 0))(i, x)
        return loss(y, x)

    return jax.jit(jax.grad(value, (0, 1)))


def test_gradients_of_rows_that_take_branches_are_those_of_vmap(
    client, slices, branched
):
    functions, (first, second), total, away = branched

    @ml.program
    def chosen(w, x, pred):
        y = ml.cond(
            pred,
            lambda x: ml.unroute(second(w, away(x))),
            lambda x: first(w, x),
            x,
            per_example=True,
        )
        return total(y, x)

    x = drawn("float32")[2]
    w = np.float32(1.5)
    placed = client.put(x, slices[0].sharding())
    back, expected = ml.grad(chosen, (0, 1)), by_row(functions)
    for pred in ([True, False, True, True, False, False, True], [False] * 7):
        found = back(w, placed, np.array(pred))
        assert difference(found, expected(w, x, np.array(pred, np.int32))) <= FLOAT32


def test_gradients_of_rows_that_switch_are_those_of_vmap(client, slices, branched):
    functions, (first, second), total, away = branched
    third = ml.jit(lambda w, x: x / w, slice=slices[0])

    @ml.program
    def chosen(w, x, index):
        branches = [
            lambda x: first(w, x),
            lambda x: ml.unroute(second(w, away(x))),
            lambda x: third(w, x),
        ]
        return total(ml.switch(index, branches, x, per_example=True), x)

    x, w = drawn("float32")[2], np.float32(1.5)
    index = np.array([2, 0, 1, 5, -1, 1, 2], np.int32)  # clamped, as those of JAX

    found = ml.grad(chosen, (0, 1))(w, client.put(x, slices[0].sharding()), index)

    every = [*functions, lambda w, x: x / w]
    assert difference(found, by_row(every)(w, x, index)) <= FLOAT32


def test_gradients_of_rows_that_leave_a_loop_are_those_of_each_row(client, slices):
    here = slices[0]
    short = ml.jit(lambda x: (x * x).sum(-1) < 50, slice=here)
    step = ml.jit(lambda w, x: w * x + 0.1 * jnp.sin(x), slice=here)
    total = ml.jit(loss, slice=here)

    @ml.program
    def model(w, x):
        options = {"max_steps": 30, "checkpoint": True, "per_example": True}
        y = ml.while_loop(short, lambda y: step(w, y), x, **options)
        return total(y, x)

    def plain(w, x):
        rows = []
        for row in x:
            y = row
            while (y * y).sum() < 50:
                y = w * y + 0.1 * jnp.sin(y)
            rows.append(y)
        return loss(jnp.stack(rows), x)

    w, x = np.float32(1.5), drawn("float32")[2]

    found = ml.grad(model, (0, 1))(w, client.put(x, here.sharding()))

    assert difference(found, jax.grad(plain, (0, 1))(w, x)) <= FLOAT32


def test_a_mixture_of_experts_that_routes_trains_as_the_dense_one_does(slices):
    here, there = slices
    adam, top_k = optax.adam(0.05), 1

    def choose(x, router):
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), top_k)
        return weights, chosen.ravel(), jnp.repeat(x, top_k, 0)

    def error(rows, weights, y):
        rows = rows.reshape(-1, top_k, WIDTH)
        return jnp.mean((jnp.einsum("tkd,tk->td", rows, weights) - y) ** 2)

    def update(params, state, gradient):
        change, state = adam.update(gradient, state, params)
        return optax.apply_updates(params, change), state

    on_rows = lambda rows, w: jnp.tanh(rows @ w[0])  # noqa: E731 - of one shard
    experts = ml.jit(on_rows, slice=there, in_shardings=(None, P("e")))
    chosen, missed = ml.jit(choose, slice=here), ml.jit(error, slice=here)
    updates = {
        "router": ml.jit(update, slice=here),
        "experts": ml.jit(update, slice=there),
    }

    @ml.program
    def model(params, x, y):
        weights, to, rows = chosen(x, params["router"])
        rows = ml.route(rows, to, there)
        return missed(ml.unroute(experts(rows, params["experts"])), weights, y)

    @ml.program
    def train(params, states, x, y):
        value, gradients = ml.value_and_grad(model)(params, x, y)
        new = {k: updates[k](params[k], states[k], gradients[k]) for k in params}
        params, states = ({k: pair[i] for k, pair in new.items()} for i in (0, 1))
        return value, params, states

    def plain(params, x, y):
        weights, to, _ = choose(x, params["router"])
        every = jnp.tanh(jnp.einsum("td,edf->tef", x, params["experts"]))
        picked = jnp.take_along_axis(every, to.reshape(-1, top_k, 1), 1)
        return error(picked, weights, y)

    @jax.jit
    def plain_train(params, states, x, y):
        value, gradients = jax.value_and_grad(plain)(params, x, y)
        new = {k: update(params[k], states[k], gradients[k]) for k in params}
        params, states = ({k: pair[i] for k, pair in new.items()} for i in (0, 1))
        return value, params, states

    with jax.enable_x64(True):
        w, _, x = drawn("float64", num_rows=12)
        router = np.random.default_rng(1).normal(size=(WIDTH, NUM_EXPERTS))
        params = mine = {"router": router, "experts": w}
        states = {key: adam.init(params[key]) for key in params}
        my_states, y = states, np.sin(x)
        first = float(plain(params, x, y))
        for _ in range(5):
            value, mine, my_states = train(mine, my_states, x, y)
            expected, params, states = plain_train(params, states, x, y)
            # The slope is exact to 1e-15; Adam divides by what it is near zero.
            assert abs(float(value) - expected) <= 1e-8 * expected
        assert difference(mine, params) <= 1e-8
        assert float(value) < 0.9 * first
