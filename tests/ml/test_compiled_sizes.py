"""Experts and padded computations are compiled for a handful of sizes, and say so."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ml.moe_cases import random_params, random_rows
from tests.ml.moe_flows import TIMEOUT_S, weighted
from timelyml import Cluster, Dataflow
from timelyml.ml import MoE, compute, rows, sharded, value_and_grad
from timelyml.ml.moe import Capacity, Dropping, Router, TokenChoice
from timelyml.operators import collect

TOKENS = np.random.default_rng(0).integers(40, 200, 50)
EXPERTS = 4
TOLERANCE = 2e-4  # float32, gradients of 200 rows in another order
PARAMS = random_params(0)
# As many tokens in each batch, but other ones: some experts have most, some have none.
LEANING = [
    random_rows(index, 160) + 0.2 * index * random_rows(100 + index, 1)
    for index in range(50)
]


def bucket_of(count, smallest):
    """The definition: up to an eighth of the next power of two."""
    power = 1
    while power < max(count, smallest):
        power *= 2
    step = max(1, power // 8)
    return next(n for n in range(step, power + 1, step) if n >= max(count, smallest))


@pytest.fixture(scope="module", params=[(1, "inline"), (2, "threads")], ids=["1", "2"])
def cluster(request):
    workers, mode = request.param
    with Cluster(workers=workers, mode=mode) as cluster:
        yield cluster


@contextlib.contextmanager
def compilations(found):
    """Count what XLA compiles in this process, by JAX's own account."""

    def heard(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            found.append(duration)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


def negative(x):
    return -x


def finished(cluster, flow):
    run = cluster.start(flow.build())
    run.result(timeout_s=TIMEOUT_S)
    return run.metrics()["operators"]


def source_of(flow, blocks):
    return flow.source(lambda shard, _: iter(blocks), num_shards=1, regular=True)


@pytest.mark.parametrize("keeps", [False, True])
def test_experts_are_compiled_for_a_handful_of_sizes(keeps, cluster):
    moe = MoE(num_experts=EXPERTS, num_shards=1, smallest=64, keeps=keeps)
    flow = Dataflow("layer")

    def loss(params, x):
        return sharded.call(weighted, moe(params, x)[0], x)

    value, _ = value_and_grad(loss)(PARAMS, rows(source_of(flow, LEANING), LEANING[0]))
    collect(value, name="loss")
    figures = finished(cluster, flow)["model experts"]

    counts = [
        np.asarray(moe.routes({"router": PARAMS["router"]}, block).sums.counts)
        for block in LEANING
    ]
    received = {int(count) for count in np.concatenate(counts) if count}
    buckets = {bucket_of(count, 64) for count in received}
    assert len(received) > 40
    assert figures["compiled_sizes_peak"] == len(buckets) <= 10


def summed(out, x):
    return jnp.sum(out * x)[None]


def test_layers_are_compiled_for_a_handful_of_numbers_of_tokens():
    router = Router(TokenChoice(2), Dropping(Capacity(1.0, "ceil")))
    moe = MoE(num_experts=EXPERTS, num_shards=1, smallest=64, router=router)
    counts = np.random.default_rng(1).permutation(np.arange(17, 33)).tolist()
    blocks = [random_rows(index, count) for index, count in enumerate(counts)]
    flow = Dataflow("layer")

    def loss(params, x):
        return sharded.call(summed, moe(params, x)[0], x, pad=True)

    value, (by_params, by_x) = value_and_grad(loss, argnums=(0, 1))(
        PARAMS, rows(source_of(flow, blocks), blocks[0])
    )
    collect(value, name="loss")
    collect(by_x, name="x")
    collect(by_params["router"], name="router")
    compiled = []
    with compilations(compiled), Cluster(workers=1, mode="inline") as cluster:
        run = cluster.start(flow.build())
        result = run.result(timeout_s=TIMEOUT_S)
    operators = run.metrics()["operators"]

    def dense(params, x):
        return jnp.sum(moe.dense(params, x)[0] * x)

    gradients = jax.jit(jax.grad(dense, argnums=(0, 1)))
    of_params, of_x = gradients(PARAMS, blocks[7])
    for name, expected in (("x", of_x), ("router", of_params["router"][None])):
        (got,) = [block for at, block in result.batches(name) if at == 7]
        np.testing.assert_allclose(got, expected, atol=TOLERANCE)

    buckets = {bucket_of(count, 16) for count in counts}
    assert len(counts) == 4 * len(buckets)
    for name in ("model route", "model combine"):
        assert operators[name]["compiled_sizes_peak"] == len(buckets)
    # Two ways of four computations, and what does not depend on the number of tokens.
    assert len(compiled) <= 8 * len(buckets) + 4


def test_padded_computations_are_compiled_for_a_handful_of_sizes(cluster):
    flow = Dataflow("padded")
    blocks = [random_rows(index, count) for index, count in enumerate(TOKENS)]
    negated = compute(source_of(flow, blocks).ref, negative, pad=True)
    collect(negated, name="out")

    figures = finished(cluster, flow)["compute"]

    buckets = {bucket_of(count, 16) for count in TOKENS.tolist()}
    assert figures["compiled_sizes_peak"] == len(buckets) <= 14
