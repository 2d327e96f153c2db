"""Parameters on shards train as in one program, whatever arrives first."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.ml.moe_cases import assert_trees_close, random_params, random_rows
from tests.ml.moe_flows import source_of, train
from timelyml import Cluster, Dataflow
from timelyml.errors import ConfigError
from timelyml.ml import MoE, rows, sharded, train_step, value_and_grad
from timelyml.ml.moe import Noise, Router, TokenChoice, balance, updated_bias
from timelyml.operators import collect
from timelyml.testing import FlowTester

STEPS, SHARDS = 3, 2
# Float32 sums in another order, over a few steps.
TOLERANCE = 2e-5


def error(out, x):
    return (jnp.sum((out - jnp.sin(x)) ** 2) / 12)[None]


def loss_of(moe, params, batch):
    out, routing = moe(params, batch["x"])
    router = moe.losses(routing, balance=0.1)
    return (sharded.call(error, out, batch["x"]), router), routing.sums.counts


def blocks_of(num_shards=SHARDS):
    x = [random_rows(step, 6 * num_shards) for step in range(STEPS)]
    return [[{"x": part} for part in np.split(each, num_shards)] for each in x]


def trained(moe, params, optimiser, run, **options):
    loss = functools.partial(loss_of, moe)
    losses, _, weights = train(loss, params, optimiser, blocks_of(), run, **options)
    return losses, weights


def dense(moe, params, optimiser):
    """The same in one program."""

    @jax.jit
    def step(params, state, x):
        def loss(params):
            out, routed = moe.dense(params, x)
            return error(out, x)[0] + 0.1 * balance(routed.sums), routed.sums.counts

        (value, counts), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimiser.update(gradients, state, params)
        return value, counts, optax.apply_updates(params, updates), state

    state, losses = optimiser.init(params), []
    for blocks in blocks_of():
        x = np.concatenate([block["x"] for block in blocks])
        bias = params.get("bias")
        value, counts, params, state = step(params, state, x)
        if moe.bias_rate is not None:
            params["bias"] = updated_bias(bias, counts, moe.bias_rate)
        losses.append(float(value))
    return losses, params


class InOrder:
    """Runs graphs in a seeded order of events."""

    def __init__(self, seed, num_workers=2):
        self.seed, self.num_workers = seed, num_workers

    def run(self, graph, timeout_s):
        with FlowTester(self.num_workers, seed=self.seed) as tester:
            return tester.run(graph)


def check(moe, params, optimiser, reference=None, **options):
    losses, weights = trained(moe, params, optimiser, InOrder(1), **options)
    expected, final = dense(moe, params, reference or optimiser)
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    assert_trees_close(weights, final, TOLERANCE)


def test_clipping_by_the_global_norm_is_that_of_one_program():
    clip = 0.05
    chained = optax.chain(optax.clip_by_global_norm(clip), optax.adam(1e-2))
    params = random_params(0)
    moe = MoE(num_experts=4, num_shards=2)
    check(moe, params, optax.adam(1e-2), chained, clip_norm=clip)
    _, unclipped = dense(moe, params, optax.adam(1e-2))
    _, clipped = dense(moe, params, chained)
    moved = np.abs(unclipped["router"] - clipped["router"]).max()
    assert moved > 10 * TOLERANCE  # so that the comparison means something


@pytest.mark.parametrize(
    "optimiser",
    [
        optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1)),
        optax.lamb(0.1),  # the norm of a whole array, of which a shard has a part
    ],
)
def test_optimisers_that_look_across_shards_are_refused(optimiser):
    batch = source_of(Dataflow("f"), blocks_of())
    step = train_step(
        functools.partial(loss_of, MoE(num_experts=4)), optimiser, has_aux=True
    )
    with pytest.raises(ConfigError, match="looks across parameters"):
        step(random_params(0), rows(batch, blocks_of()[0][0]))


def test_experts_without_tokens_have_zero_gradients_and_keep_up_with_adam():
    params = random_params(1)
    params["router_bias"] = np.array([0, 0, -1e9, -1e9], np.float32)
    moe = MoE(num_experts=4, num_shards=2)
    check(moe, params, optax.adam(1e-2))

    flow = Dataflow("f")
    batch = source_of(flow, blocks_of()[:1])
    build = value_and_grad(functools.partial(loss_of, moe), has_aux=True)
    _, gradients = build(params, rows(batch, blocks_of()[0][0]))
    collect(gradients["experts"]["down"], name="down")
    found = flow.run().batches("down")
    whole = np.concatenate([rows for _, rows in found])
    assert whole.shape == params["experts"]["down"].shape
    assert (whole[2:] == 0.0).all()
    assert (whole[:2] != 0.0).any()


def test_a_bias_is_moved_by_counts_of_all_shards():
    moe = MoE(num_experts=4, num_shards=4, bias_rate=0.05)
    params = {**random_params(2), "bias": np.zeros(4, np.float32)}
    decaying = optax.adamw(1e-2, weight_decay=0.5)  # would move a trained bias
    losses, weights = trained(moe, params, decaying, InOrder(2))
    expected, final = dense(moe, params, decaying)
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    assert_trees_close(weights["bias"], final["bias"], 1e-7)
    assert np.abs(weights["bias"]).max() > 0.04


def test_weights_may_scale_what_experts_read():
    router = Router(TokenChoice(2, "sigmoid", renormalise=False, weighs_input=True))
    moe = MoE(num_experts=4, num_shards=2, router=router)
    check(moe, random_params(3), optax.adam(1e-3))


def test_bits_depend_neither_on_order_nor_on_workers():
    moe, params = MoE(num_experts=4, num_shards=2), random_params(4)
    places = [InOrder(seed, 1 + seed % 4) for seed in range(5)]
    runs = [trained(moe, params, optax.adam(1e-2), place) for place in places]
    with Cluster(workers=2, mode="threads") as cluster:
        runs.append(trained(moe, params, optax.adam(1e-2), cluster))
    for losses, weights in runs[1:]:
        assert losses == runs[0][0]
        assert_trees_close(weights, runs[0][1], atol=0)


def test_sources_that_are_not_regular_give_the_same_bits():
    moe, params = MoE(num_experts=4, num_shards=2), random_params(5)
    blocks = blocks_of()
    _, expected = trained(moe, params, optax.sgd(0.1), InOrder(0))
    flow = Dataflow("f")

    def read(shard, num_shards):
        return ((time, parts[shard]) for time, parts in enumerate(blocks))

    batch = flow.source(read, num_shards=SHARDS, name="x")
    step = train_step(functools.partial(loss_of, moe), optax.sgd(0.1), has_aux=True)
    collect(step(params, rows(batch, blocks[0][0])).weights, name="weights")
    result = flow.run()
    weights = sharded.assemble(params, result["weights"])
    assert_trees_close(weights, expected, atol=0)


def cubes(weight, x):
    return jnp.sum((x @ weight) ** 3)[None]


def test_gradients_agree_with_finite_differences():
    x = random_rows(6, 8)
    weight = np.random.default_rng(6).standard_normal((6, 2)).astype(np.float32)

    def loss(weight, batch):
        every = sharded.broadcast(batch["x"])
        return sharded.call(cubes, weight, every)

    flow = Dataflow("f")
    batch = source_of(flow, [[{"x": x[:5]}, {"x": x[5:]}]])
    _, gradient = value_and_grad(loss)(weight, rows(batch, {"x": x[:5]}))
    collect(gradient, name="gradient")
    ((_, (got,)),) = flow.run().batches("gradient")
    along = np.random.default_rng(7).standard_normal(weight.shape)
    at = [
        2 * np.sum((x.astype(float) @ (weight + e * along)) ** 3) for e in (1e-4, -1e-4)
    ]
    slope = (at[0] - at[1]) / 2e-4
    np.testing.assert_allclose(np.sum(got * along), slope, rtol=1e-4)


def whole_sum(x):
    return jnp.sum(x)[None]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda params, batch: sharded.call(whole_sum, batch["x"]), "never uses"),
        (lambda params, batch: params["router"], "expected columns of floats"),
        (lambda params, batch: (), "a loss is missing"),
        (lambda params, batch: sharded.call(cubes, 1.0, batch["x"]), "neither column"),
        (lambda params, batch: sharded.split(batch["x"]), "split needs parameters"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_built(loss, message):
    batch = source_of(Dataflow("f"), blocks_of())
    step = train_step(loss, optax.sgd(0.1))
    with pytest.raises(ConfigError, match=message):
        step(random_params(0), rows(batch, blocks_of()[0][0]))


def test_a_dataflow_function_needs_a_stream():
    with pytest.raises(ConfigError, match="no stream to work on"):
        value_and_grad(lambda params: params)({"a": np.ones(2)})


def test_noise_needs_to_know_which_token_is_which():
    def loss(params, batch):
        return MoE(num_experts=4)(params, batch["x"], step=batch["x"])[0]

    batch = source_of(Dataflow("f"), blocks_of())
    with pytest.raises(ConfigError, match="got a step and no positions"):
        value_and_grad(loss)(random_params(0), rows(batch, blocks_of()[0][0]))


def squares(out):
    return jnp.sum(out**2)[None]


@pytest.mark.slow
def test_noise_is_that_of_each_token_on_any_number_of_shards():
    moe, params = MoE(num_experts=4, jitter=0.3, gaussian=2.0), random_params(8)
    x, places, step = random_rows(8, 8), np.arange(8, dtype=np.int32), np.array([5])
    halves = zip(np.split(x, 2), np.split(places, 2), strict=True)
    blocks = [[{"x": a, "positions": b} for a, b in halves]]

    def loss(params, block, step):
        out, _ = moe(params, block["x"], step=step, positions=block["positions"])
        return sharded.call(squares, out)

    flow = Dataflow("f")
    batch, steps = source_of(flow, blocks), source_of(flow, [[step] * 2], "step")
    value, _ = value_and_grad(loss)(
        params, rows(batch, blocks[0][0]), rows(steps, step)
    )
    collect(value, name="value")
    ((_, (got,)),) = flow.run().batches("value")
    key = jax.random.fold_in(jax.random.key(moe.seed), 5)
    noise = Noise(key, places, moe.jitter, moe.gaussian)
    expected = np.sum(np.square(moe.dense(params, x, noise=noise)[0]))
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE)
    calm = np.sum(np.square(moe.dense(params, x)[0]))
    assert abs(calm - expected) > 100 * TOLERANCE * expected
