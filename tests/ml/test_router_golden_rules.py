"""Choices, weights, drops, losses and permutations equal those of other projects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ml.moe_cases import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    MEGATRON_RULES,
    OUTPUT_TOLERANCE,
    WEIGHT_TOLERANCE,
    load,
)
from timelyml.ml.choice import balance_loss, count_choices
from timelyml.ml.moe import (
    Capacity,
    Dropping,
    Router,
    TokenChoice,
    add_sums,
    balance,
    combine,
    place_slots,
    places,
    plan_dispatch,
    router_sums,
    updated_bias,
    z_loss,
)


def spread(choice, values, num_experts):
    """Write `(tokens, top_k)` values into `(tokens, experts)`, zeros elsewhere."""
    table = np.zeros((choice.chosen.shape[0], num_experts), np.asarray(values).dtype)
    np.put_along_axis(table, np.asarray(choice.chosen), np.asarray(values), axis=1)
    return table


@pytest.mark.parametrize("name", MEGATRON_RULES)
def test_every_score_function_agrees_with_megatron(name):
    golden = load("mcore_score_functions")
    rule, has_bias = MEGATRON_RULES[name]
    logits = jnp.asarray(golden["logits"])
    choice = rule.decide(logits, bias=golden["expert_bias"] if has_bias else None)
    probabilities = spread(choice, rule.weights(logits, choice), 8)
    assert (spread(choice, choice.kept, 8) == golden[f"map_{name}"]).all()
    np.testing.assert_allclose(
        probabilities, golden[f"probs_{name}"], atol=WEIGHT_TOLERANCE
    )


def test_a_selection_bias_changes_who_is_chosen_but_not_their_weights():
    golden = load("mcore_score_functions")
    rule = TokenChoice(4, score="sigmoid", renormalise=False)
    logits = jnp.asarray(golden["logits"])
    choice = rule.decide(logits, bias=golden["expert_bias"])
    plain = rule.decide(logits)
    assert (np.asarray(choice.chosen) != np.asarray(plain.chosen)).any()
    scores = jnp.take_along_axis(jax.nn.sigmoid(logits), choice.chosen, axis=1)
    assert (np.asarray(rule.weights(logits, choice)) == np.asarray(scores)).all()


def deepspeed(golden, order, *, top_k=2, renormalise=True):
    rule = TokenChoice(top_k, renormalise=renormalise)
    limit = Capacity(float(golden.get("capacity_factor", 1.0)))
    return Router(rule, Dropping(limit, order, over_survivors=True))


def buffers(router, logits, choice, place_order, capacity):
    """Build DeepSpeed's `(tokens, experts, capacity)` from choice, places, weights."""
    weights = np.asarray(router.weights(logits, choice))
    # By token, DeepSpeed numbers those that are left; by choice, all that asked.
    asked = choice.kept if place_order == "token" else choice.asked
    place = np.asarray(places(choice.chosen, asked, place_order, weights))
    combined = np.zeros((*logits.shape, capacity), np.float32)
    dispatched = np.zeros(combined.shape, bool)
    for token, pick in np.argwhere(np.asarray(choice.kept)):
        where = token, int(choice.chosen[token, pick]), place[token, pick]
        combined[where], dispatched[where] = weights[token, pick], True
    return combined, dispatched


@pytest.mark.parametrize("factor", ["0.5", "1.0"])
@pytest.mark.parametrize(
    ("policy", "order", "numbered"),
    [
        ("position", "token", "token"),
        ("probs", "score", "token"),
        ("top2", "choice", "choice"),
    ],
)
def test_every_drop_order_agrees_with_deepspeed(factor, policy, order, numbered):
    golden = load(f"ds_topk_cf{factor}_min0")
    logits = jnp.asarray(golden["logits"])
    router = deepspeed(golden, order)
    capacity = int(golden["capacity"])
    assert router.dropping.capacity.of(12, num_experts=4, top_k=2) == capacity
    choice = router.decide(logits)
    combined, dispatched = buffers(router, logits, choice, numbered, capacity)
    assert (dispatched == golden[f"dispatch_{policy}"]).all()
    np.testing.assert_allclose(
        combined, golden[f"combine_{policy}"], atol=WEIGHT_TOLERANCE
    )
    sums = router_sums(logits, choice, router.rule)
    assert (np.asarray(sums.counts) == golden["exp_counts_before_drop"]).all()
    assert int(sums.dropped) == 24 - golden[f"dispatch_{policy}"].sum()


def test_nothing_is_dropped_below_capacity_as_in_deepspeed():
    golden = load("ds_topk_cf1.0_min0")
    logits = jnp.asarray(golden["logits"])
    router = Router(TokenChoice(2))
    choice = router.decide(logits)
    combined, dispatched = buffers(router, logits, choice, "token", 11)
    assert (dispatched == golden["dispatch_nodrop"]).all()
    expected = golden["combine_nodrop"]
    np.testing.assert_allclose(combined, expected, atol=WEIGHT_TOLERANCE)


def test_deepspeed_losses_agree_over_all_choices_and_over_first_ones():
    golden = load("ds_topk_cf1.0_min0")
    logits = jnp.asarray(golden["logits"])
    rule = TokenChoice(2)
    sums = router_sums(logits, rule.decide(logits), rule)
    close = {"rtol": LOSS_TOLERANCE}
    np.testing.assert_allclose(balance(sums, divided_by=2), golden["l_aux"], **close)
    first = balance(sums, counted="first")
    np.testing.assert_allclose(first, golden["l_aux_top2"], **close)


def test_top_1_keeps_the_raw_gate_of_any_stored_choice_as_in_deepspeed():
    golden = load("ds_top1_cf1.0")
    logits = jnp.asarray(golden["logits"])
    router = deepspeed(golden, "token", top_k=1, renormalise=False)
    choice = router.decide(logits)
    sums = router_sums(logits, choice, router.rule)
    assert (np.asarray(sums.counts) == golden["exp_counts_before_drop"]).all()
    np.testing.assert_allclose(balance(sums), golden["l_aux"], rtol=LOSS_TOLERANCE)
    kept = spread(choice, choice.kept, 4)
    file_kept = golden["dispatch"].any(axis=-1)
    assert (kept.sum(axis=0) == file_kept.sum(axis=0)).all()
    # Who is kept in the file is how torch.topk breaks ties, which it leaves open.
    replayed = choice._replace(kept=jnp.asarray(file_kept.any(axis=1)[:, None]))
    combined, dispatched = buffers(router, logits, replayed, "token", 3)
    assert (dispatched == golden["dispatch"]).all()
    np.testing.assert_allclose(combined, golden["combine"], atol=WEIGHT_TOLERANCE)


def test_megatron_drops_by_probability_and_leaves_weights_as_they_were():
    golden = load("mcore_drop_probs_cf1.0")
    logits = jnp.asarray(golden["logits"])
    limit = Capacity(1.0)
    assert limit.of(12, num_experts=4, top_k=2) == golden["capacity"]
    router = Router(TokenChoice(2, renormalise=False), Dropping(limit, "score"))
    choice = router.decide(logits)
    assert (spread(choice, choice.asked, 4) == golden["map"]).all()
    assert (spread(choice, choice.kept, 4) == golden["final_map"]).all()
    weights = spread(choice, router.weights(logits, choice), 4)
    np.testing.assert_allclose(weights, golden["final_probs"], atol=WEIGHT_TOLERANCE)


def test_megatron_losses_and_gradient_agree():
    golden = load("mcore_aux_permute")
    rule = TokenChoice(2)
    logits = jnp.asarray(golden["logits"])
    choice = rule.decide(logits)
    sums = router_sums(logits, choice, rule)
    close = {"rtol": LOSS_TOLERANCE}
    np.testing.assert_allclose(balance(sums, divided_by=2), golden["aux_loss"], **close)
    np.testing.assert_allclose(z_loss(sums), golden["z_loss"], **close)

    def loss(probabilities):
        counts = count_choices(choice.chosen, 8)
        return balance_loss(counts, jnp.sum(probabilities, axis=0), 16) / 2

    gradient = jax.grad(loss)(jnp.asarray(golden["softmax"]))
    np.testing.assert_allclose(
        gradient, golden["grad_softmax"], atol=GRADIENT_TOLERANCE
    )


def test_rows_are_permuted_and_come_back_as_in_megatron():
    golden = load("mcore_aux_permute")
    chosen = np.stack([np.flatnonzero(row) for row in golden["map"]])
    plan = plan_dispatch(chosen, 8)
    assert (plan.tokens == golden["sorted_indices"]).all()
    assert (plan.counts == golden["tokens_per_expert"]).all()
    permuted = golden["tokens"][plan.tokens]
    assert (permuted == golden["permuted"]).all()
    weights = np.take_along_axis(golden["probs"], chosen, axis=1)
    assert (weights.ravel()[plan.slots] == golden["permuted_probs"]).all()
    placed = place_slots(plan.slots, permuted, 32).reshape(16, 2, 6)
    np.testing.assert_allclose(
        combine(placed, weights), golden["unpermuted_weighted"], atol=OUTPUT_TOLERANCE
    )


def test_pooling_layers_is_another_loss_than_their_mean():
    golden = load("aux_two_layers")
    rule = TokenChoice(2)
    layers = [
        router_sums(logits, rule.decide(logits), rule)
        for logits in (jnp.asarray(golden["logits0"]), jnp.asarray(golden["logits1"]))
    ]
    close = {"rtol": LOSS_TOLERANCE}
    each = [balance(sums) for sums in layers]
    np.testing.assert_allclose(each, golden["aux_per_layer"], **close)
    pooled = balance(add_sums(*layers))
    np.testing.assert_allclose(pooled, golden["aux_hf_pooled"], **close)
    assert abs(np.mean(each) - float(pooled)) > 0.05


def test_the_bias_moves_towards_balance_and_stays_for_a_balanced_expert():
    golden = load("bias_update")
    counts = golden["counts"].astype(np.int32)
    moved = updated_bias(
        jnp.asarray(golden["bias"]), jnp.asarray(counts), float(golden["rate"])
    )
    np.testing.assert_allclose(moved, golden["new_bias"], atol=1e-7)
    balanced = counts == counts.mean()
    assert balanced.any()
    assert (np.asarray(moved)[balanced] == golden["bias"][balanced]).all()
