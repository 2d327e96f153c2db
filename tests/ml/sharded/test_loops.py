"""Loops in which each row goes on as long as it has to, and back through what it took."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from timelyml import Dataflow
from timelyml.errors import ConfigError, TimelyError
from timelyml.ml import sharded
from timelyml.operators import collect
from timelyml.testing import FlowTester

WIDTH, NUM_EXPERTS, MAX_STEPS = 3, 2, 6
FLOAT32, FLOAT64 = 1e-5, 1e-10
"""Relative to the largest absolute value of each leaf."""


def going(tree):
    return (tree["x"] ** 2).sum(-1) < tree["limit"]


def expert(weight, rows):
    return jnp.tanh(rows @ weight)


def grown(weight, given, x):
    return 2 * x + given * weight


def one_column(placed):
    return placed[:, 0]


def loss_of(x):
    return jnp.sum(x**2 * jnp.arange(1, WIDTH + 1))[None]


def flow_model(params, tree):
    """Rows visit the expert that they name until they are long enough."""

    def body(tree):
        sent = sharded.exchange(tree["x"], tree["kind"], num_shards=NUM_EXPERTS)
        given = sharded.by_group(expert, sharded.split(params["experts"]), sent.rows)
        back = sharded.give_back(given, sent)
        x = sharded.call(grown, params["scale"], back, tree["x"])
        return tree | {"x": x}

    looped = sharded.repeat_while(going, body, tree, max_steps=MAX_STEPS)
    return sharded.call(loss_of, looped.rows["x"]), looped.steps


def plain_model(params, tree):
    """The same by its definition: all rows take all steps, and keep what counts."""
    x, steps = tree["x"], jnp.zeros(len(tree["x"]), jnp.int32)
    for _ in range(MAX_STEPS):
        more = going(tree | {"x": x})
        given = jax.vmap(lambda k, row: expert(params["experts"][k], row))(
            tree["kind"], x
        )
        x = jnp.where(more[:, None], grown(params["scale"], given, x), x)
        steps += more
    return loss_of(x).sum(), steps


def inputs(seed, dtype):
    rng = np.random.default_rng(seed)
    num_shards = 1 + seed % 3
    params = {
        "experts": rng.random((NUM_EXPERTS, WIDTH, WIDTH)).astype(dtype),
        "scale": np.asarray(0.3 + 0.1 * seed, dtype),
    }
    blocks = []
    for shard in range(num_shards):
        count = 0 if shard == 1 else 5
        blocks.append(
            {
                "x": rng.uniform(0.2, 1, (count, WIDTH)).astype(dtype),
                "kind": rng.integers(0, NUM_EXPERTS, count).astype(np.int32),
                "limit": rng.choice([0.1, 4, 30], count).astype(dtype),
            }
        )
    return params, blocks


def run(seed, dtype, model=flow_model):
    """The batches of value, steps and gradients."""
    params, blocks = inputs(seed, dtype)
    flow = Dataflow("loop")
    source = flow.source(
        lambda shard, _: iter([blocks[shard]]),
        num_shards=len(blocks),
        regular=True,
        name="rows",
    )
    build = sharded.value_and_grad(model, argnums=(0, 1), has_aux=True)
    (value, steps), (by_params, by_rows) = build(
        params, sharded.rows(source, blocks[0])
    )
    streams = {"value": value, "steps": steps, "x": by_rows["x"], **by_params}
    streams = {name: each for name, each in streams.items() if each is not None}
    for name, stream in streams.items():
        collect(stream, name=name)
    with FlowTester(2, seed=seed) as tester:
        result = tester.run(flow.build())
    return {name: [rows for _, rows in result.batches(name)] for name in streams}


def check(seed, dtype, tolerance):
    params, blocks = inputs(seed, dtype)
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *blocks)

    def loss(params, x):
        return plain_model(params, whole | {"x": x})

    (value, steps), (by_params, by_x) = jax.value_and_grad(
        loss, argnums=(0, 1), has_aux=True
    )(params, whole["x"])
    assert len(set(np.asarray(steps).tolist())) > 1  # or it is no loop of data
    expected = {"value": value, "steps": steps, "x": by_x, **by_params}
    found = run(seed, dtype)
    for name, leaf in expected.items():
        got = np.concatenate(found[name])
        wanted = np.asarray(leaf)
        if name in ("steps", "x"):  # as the shards come
            got, wanted = np.sort(got, axis=None), np.sort(wanted, axis=None)
        difference = np.abs(got.reshape(wanted.shape) - wanted).max()
        assert difference <= tolerance * np.abs(wanted).max(), name


def test_rows_take_as_many_steps_as_they_need_and_back():
    check(1, np.float32, FLOAT32)


def test_they_do_so_in_double_precision():
    with jax.enable_x64(True):
        check(5, np.float64, FLOAT64)


def test_a_row_that_never_leaves_fails_the_run_and_names_the_loop():
    def endless(params, tree):
        looped = sharded.repeat_while(
            lambda tree: tree["kind"] >= 0,
            lambda tree: tree,
            tree,
            max_steps=2,
            name="on",
        )
        return sharded.call(loss_of, looped.rows["x"]), looped.steps

    with pytest.raises(TimelyError, match="loop 'on' does not end; got 5 rows that go"):
        run(0, np.float32, endless)


def test_a_loop_that_cannot_run_is_refused():
    def none(params, tree):
        return sharded.repeat_while(going, lambda tree: tree, tree, max_steps=0)

    def another(params, tree):
        return sharded.repeat_while(going, lambda tree: tree["x"], tree, max_steps=1)

    with pytest.raises(ConfigError, match="got max_steps=0; expected 1 or more"):
        run(0, np.float32, none)
    with pytest.raises(ConfigError, match="does not give what it takes"):
        run(0, np.float32, another)


def built(model):
    flow = Dataflow("loop")
    source = flow.source(
        lambda *_: iter([np.ones((2, 3))]), num_shards=1, regular=True, name="rows"
    )
    rows = sharded.rows(source, np.ones((2, 3), np.float32))
    return sharded.value_and_grad(functools.partial(model, source))(
        {"w": np.ones(3, np.float32)}, rows
    )


def test_loops_of_streams_have_no_gradient_and_say_what_has():
    with pytest.raises(
        AttributeError, match=r"no 'iterate'.*repeat` and `repeat_while"
    ):
        built(lambda source, params, x: x.iterate(lambda again: again))

    def captured(source, params, x):
        looped = source.iterate(lambda again: again, max_iterations=2)
        return sharded.call(loss_of, looped)

    with pytest.raises(ConfigError, match=r"given a stream.*`iterate`.*no gradients"):
        built(captured)
