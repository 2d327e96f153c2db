"""Golden layers agree when they run as dataflows, on any number of workers."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.ml.moe_cases import (
    GRADIENT_TOLERANCE,
    OUTPUT_TOLERANCE,
    WEIGHT_TOLERANCE,
    assert_trees_close,
    flat,
    gated_params,
    load,
    shared_params,
    switch_params,
)
from tests.ml.moe_flows import layer_pass, train
from timelyml import Cluster
from timelyml.ml import MoE, sharded
from timelyml.ml.client.islands import start_islands
from timelyml.ml.moe import (
    Capacity,
    Dropping,
    Groups,
    Router,
    TokenChoice,
    relu_expert_forward,
)

DEEPSEEK = TokenChoice(4, score="sigmoid", scale=2.5, groups=Groups(4, 2))
PLACES = {"1": (1, "inline"), "2": (2, "threads"), "4": (4, "threads")}


@pytest.fixture(scope="module", params=PLACES)
def cluster(request):
    workers, mode = PLACES[request.param]
    with Cluster(workers=workers, mode=mode) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def islands():
    """Two islands, each a process of its own."""
    with start_islands("test", {"islands": 2}) as cluster:
        yield cluster


def mixtral(name, **options):
    golden = load(name)
    router = Router(TokenChoice(golden["topk_idx"].shape[1]))
    return golden, router, gated_params, options


def qwen2(kind):
    golden = load(f"qwen2_moe_shared_{kind}")

    def params_of(golden, prefix="w_"):
        shared = shared_params(golden, "shared_expert", prefix)
        shared["gate"] = golden[f"{prefix}shared_expert_gate.weight"].T
        return {**gated_params(golden, prefix), "shared": shared}

    return golden, Router(TokenChoice(3, renormalise=kind == "norm")), params_of, {}


def deepseek(**options):
    golden = load("dsv3_group_limited")

    def params_of(golden, prefix="w_"):
        params = gated_params(golden, prefix)
        params["shared"] = shared_params(golden, "shared_experts", prefix)
        bias = golden["buf_gate.e_score_correction_bias"]
        return {**params, "bias": bias if prefix == "w_" else np.zeros_like(bias)}

    return golden, Router(DEEPSEEK), params_of, options


def switch(name):
    golden = load(name)
    dropping = Dropping(Capacity(int(golden["capacity"]), "fixed"))
    rule = TokenChoice(1, renormalise=False)
    # A sequence on each of two shards: a group by itself.
    options = {"expert_fn": relu_expert_forward}
    return golden, Router(rule, dropping), switch_params, options


CASES = {
    "mixtral_top2_E8": functools.partial(mixtral, "mixtral_top2_E8"),
    "mixtral_top2_E8_keeps": functools.partial(mixtral, "mixtral_top2_E8", keeps=True),
    "mixtral_top2_E8_replicas": functools.partial(
        mixtral, "mixtral_top2_E8", replicas={0: 2, 5: 2, 7: 2}
    ),
    "mixtral_top1_E4": functools.partial(mixtral, "mixtral_top1_E4"),
    "mixtral_topE_E4": functools.partial(mixtral, "mixtral_topE_E4"),
    "qwen2_norm": functools.partial(qwen2, "norm"),
    "qwen2_nonorm": functools.partial(qwen2, "nonorm"),
    "dsv3_group_limited": deepseek,
    "dsv3_replicas": functools.partial(deepseek, replicas={1: 2, 2: 2}),
    "switch_cap3": functools.partial(switch, "switch_cap3"),
    "switch_cap64_nodrop": functools.partial(switch, "switch_cap64_nodrop"),
}


def check_layer(name, cluster):
    golden, router, params_of, options = CASES[name]()
    params = params_of(golden)
    num_experts = params["router"].shape[1]
    moe = MoE(num_experts=num_experts, num_shards=2, router=router, **options)
    x, cot = (np.split(np.asarray(flat(golden[key])), 2) for key in ("x", "cot"))
    got = layer_pass(moe, params, x, cot, cluster)

    np.testing.assert_allclose(got.out, flat(golden["out"]), atol=OUTPUT_TOLERANCE)
    np.testing.assert_allclose(got.x, flat(golden["grad_x"]), atol=GRADIENT_TOLERANCE)
    assert_trees_close(got.params, params_of(golden, "grad_"), GRADIENT_TOLERANCE)
    if "topk_idx" in golden:
        by_expert = np.argsort(got.choice.chosen, axis=1)
        wanted = np.argsort(golden["topk_idx"], axis=1)
        for ours, theirs, atol in (
            (got.choice.chosen, golden["topk_idx"], 0),
            (got.weights, golden["topk_weight"], WEIGHT_TOLERANCE),
        ):
            np.testing.assert_allclose(
                np.take_along_axis(ours, by_expert, 1),
                np.take_along_axis(theirs, wanted, 1),
                atol=atol,
            )
        assert (got.sums.counts == golden["counts"]).all()
    else:
        assert (~got.choice.kept.reshape(2, 16) == golden["dropped"]).all()
        assert got.sums.dropped == golden["dropped"].sum()


@pytest.mark.parametrize("name", CASES)
def test_layers_agree_with_other_projects(name, cluster):
    check_layer(name, cluster)


def test_layers_agree_with_experts_on_two_islands(islands):
    check_layer("qwen2_nonorm", islands)


def mean_error(out, x, y):
    return (jnp.sum((x + out - y) ** 2) / (4 * 32 * 16))[None]  # of the whole batch


def mean_error_and_sums(moe, coefs, params, batch):
    out, routing = moe(params, batch["x"])
    error = sharded.call(mean_error, out, batch["x"], batch["y"])
    return (error, moe.losses(routing, **coefs)), routing.sums.counts


def check_training(shards, expert_shards, cluster, **options):
    init, reference = load("moe_layer_train_init"), load("moe_layer_train_ref")
    moe = MoE(num_experts=8, top_k=2, num_shards=expert_shards, **options)
    coefs = {"balance": float(init["aux_coef"]), "z": float(init["z_coef"])}
    x, y = (init[key].reshape(8, shards, -1, 16) for key in ("x", "y"))
    losses, counts, weights = train(
        functools.partial(mean_error_and_sums, moe, coefs),
        gated_params(init),
        optax.sgd(float(init["lr"])),
        [[{"x": x[t, s], "y": y[t, s]} for s in range(shards)] for t in range(8)],
        cluster,
    )
    np.testing.assert_allclose(losses, reference["total"], rtol=2.4e-6)
    sent = reference["counts_src_expert"].reshape(8, shards, -1, 8).sum(axis=2)
    assert (np.stack(counts) == sent).all()
    expected = gated_params(reference, "final_")
    assert_trees_close(weights, expected, GRADIENT_TOLERANCE)


@pytest.mark.parametrize(("shards", "expert_shards"), [(4, 8), (2, 2)])
def test_eight_steps_of_training_agree(shards, expert_shards, cluster):
    check_training(shards, expert_shards, cluster)


def test_eight_steps_of_training_agree_with_replicas(cluster):
    check_training(2, 4, cluster, replicas={0: 4, 3: 2, 7: 3})


def test_eight_steps_of_training_agree_with_experts_on_two_islands(islands):
    check_training(4, 8, islands, replicas={5: 2})
