"""How layers score, what they drop, and what experts choose, as dataflows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ml.moe_cases import (
    GRADIENT_TOLERANCE,
    MEGATRON_RULES,
    OUTPUT_TOLERANCE,
    WEIGHT_TOLERANCE,
    assert_trees_close,
    load,
    random_params,
    random_rows,
)
from tests.ml.moe_flows import TIMEOUT_S, collected, joined, layer_pass, source_of
from timelyml import Cluster, Dataflow
from timelyml.ml import MoE, rows, sharded
from timelyml.ml.moe import (
    Capacity,
    Dropping,
    ExpertChoice,
    Router,
    TokenChoice,
)

PLACES = {"1": (1, "inline"), "2": (2, "threads"), "4": (4, "threads")}
LIMIT = Capacity(1.0)
SCALED_TOLERANCE = 10 * OUTPUT_TOLERANCE  # weights add up to 2.5, outputs to some tens

# By name: the file, its map of what is sent, its weights, and the router.
DROPS = {
    f"deepspeed {policy} {factor}": (
        f"ds_topk_cf{factor}_min0",
        f"dispatch_{policy}",
        f"combine_{policy}",
        Router(TokenChoice(2), Dropping(Capacity(float(factor)), order, True)),
    )
    for factor in ("0.5", "1.0")
    for policy, order in (("position", "token"), ("probs", "score"), ("top2", "choice"))
} | {
    "megatron": (
        "mcore_drop_probs_cf1.0",
        "final_map",
        "final_probs",
        Router(TokenChoice(2, renormalise=False), Dropping(LIMIT, "score")),
    ),
}


@pytest.fixture(scope="module", params=PLACES)
def cluster(request):
    workers, mode = PLACES[request.param]
    with Cluster(workers=workers, mode=mode) as cluster:
        yield cluster


def by_expert(table):
    """Drop the axis of places, if there is one: `(tokens, experts)`."""
    return table.sum(axis=2) if table.ndim == 3 else table


def spread(chosen, values, num_experts=4):
    table = np.zeros((len(chosen), num_experts), values.dtype)
    np.put_along_axis(table, chosen, values, axis=1)
    return table


def test_layers_drop_what_other_projects_drop(cluster):
    params = random_params(0, d_model=4)
    params["router"] = np.eye(4, dtype=np.float32)  # so that rows are the logits
    flow = Dataflow("drops")
    batch = {name: load(case[0])["logits"] for name, case in DROPS.items()}
    tokens = source_of(flow, [[batch]])

    def layers(params, batch):
        return {
            name: MoE(num_experts=4, num_shards=2, router=router)(params, batch[name])
            for name, (*_, router) in DROPS.items()
        }

    read = collected(sharded.flow(layers)(params, rows(tokens, batch)))
    found = read(cluster.run(flow.build(), timeout_s=TIMEOUT_S))

    for name, (file, sent, weighed, _) in DROPS.items():
        golden = load(file)
        out, routing = jax.tree.map(joined, found[name])
        weights = by_expert(golden[weighed])
        kept = spread(routing.choice.chosen, routing.choice.kept)
        assert (kept == by_expert(golden[sent]).astype(bool)).all(), name
        assert routing.sums.dropped.sum() == 24 - golden[sent].sum(), name
        np.testing.assert_allclose(
            spread(routing.choice.chosen, routing.weights),
            weights,
            atol=WEIGHT_TOLERANCE,
        )
        expected = np.einsum(  # (tokens, experts), (experts, tokens, d_model)
            "te,etd->td", weights, gated(params["experts"], golden["logits"])
        )
        np.testing.assert_allclose(out, expected, atol=OUTPUT_TOLERANCE)


def test_layers_score_as_megatron_does(cluster):
    golden = load("mcore_score_functions")
    params = random_params(0, d_model=8, experts=8)
    params["router"] = np.eye(8, dtype=np.float32)  # so that rows are the logits
    biased = {**params, "bias": golden["expert_bias"]}
    flow = Dataflow("scores")
    batch = {"x": golden["logits"]}
    tokens = source_of(flow, [[batch]])

    def layers(biased, batch):
        found = {}
        for name, (rule, has_bias) in MEGATRON_RULES.items():
            moe = MoE(num_experts=8, num_shards=4, router=Router(rule))
            held = biased if has_bias else {each: biased[each] for each in params}
            found[name] = moe(held, batch["x"])
        return found

    read = collected(sharded.flow(layers)(biased, rows(tokens, batch)))
    found = read(cluster.run(flow.build(), timeout_s=TIMEOUT_S))

    for name in MEGATRON_RULES:
        out, routing = jax.tree.map(joined, found[name])
        chosen, weights = routing.choice.chosen, golden[f"probs_{name}"]
        sent = spread(chosen, routing.choice.kept, 8)
        assert (sent == golden[f"map_{name}"]).all(), name
        np.testing.assert_allclose(
            spread(chosen, routing.weights, 8), weights, atol=WEIGHT_TOLERANCE
        )
        expected = np.einsum(  # (tokens, experts), (experts, tokens, d_model)
            "te,etd->td", weights, gated(params["experts"], golden["logits"])
        )
        np.testing.assert_allclose(out, expected, atol=SCALED_TOLERANCE)


def gated(experts, x):
    """Every expert on every row, by its definition."""
    gate, up = np.split(np.einsum("td,edf->etf", x, experts["gate_up"]), 2, axis=2)
    return np.einsum("etf,efd->etd", gate / (1 + np.exp(-gate)) * up, experts["down"])


@pytest.mark.parametrize("weighs_input", [False, True])
def test_experts_choose_their_tokens_on_each_shard(weighs_input, cluster):
    params, x, cot = random_params(1), random_rows(1, 24), random_rows(2, 24)
    rule, dropping = ExpertChoice(weighs_input=weighs_input), Dropping(Capacity(0.5))
    moe = MoE(num_experts=4, num_shards=2, router=Router(rule, dropping))
    whole = MoE(num_experts=4, router=Router(rule, dropping, num_groups=2))

    got = layer_pass(moe, params, np.split(x, 2), np.split(cot, 2), cluster)

    def loss(params, x):
        out, routed = whole.dense(params, x)
        return jnp.sum(out * cot), (out, routed)

    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (out, routed)), (by_params, by_x) = both(params, x)
    capacity = 2  # of 12 tokens on a shard, 3 for each expert, halved and rounded up
    assert (got.choice.kept.reshape(2, 12, 4).sum(axis=1) == capacity).all()
    assert (got.choice.kept == np.asarray(routed.choice.kept)).all()
    visits = got.choice.kept.sum(axis=1)
    assert visits.min() == 0
    assert visits.max() > 1
    np.testing.assert_allclose(got.out, out, atol=OUTPUT_TOLERANCE)
    np.testing.assert_allclose(got.x, by_x, atol=GRADIENT_TOLERANCE)
    assert_trees_close(got.params, by_params, GRADIENT_TOLERANCE)
