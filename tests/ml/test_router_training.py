"""Sharding, order of arrival, recomputation and resumption change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ml.moe_cases import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    OUTPUT_TOLERANCE,
    assert_trees_close,
    dense_pass,
    flat,
    gated_params,
    load,
    random_params,
    random_rows,
    route,
    sharded_step,
    shared_params,
)
from timelyml.ml.moe import (
    Capacity,
    Dropping,
    Router,
    TokenChoice,
    add_sums,
    balance,
    place_slots,
    plan_dispatch,
    share_of,
    shared_forward,
    z_loss,
)

TOP_2 = Router(TokenChoice(2))


def mean_error(out, block, wanted):
    return jnp.sum((block + out - wanted) ** 2) / (4 * 32 * 16)  # of the whole batch


def cotangent_sum(out, block, wanted):
    return jnp.sum(out * wanted)


def train_step(params, step, shards, **options):
    """One step of the golden training run, its tokens over `shards` shards."""
    init = load("moe_layer_train_init")
    blocks, wanted = (list(init[k][step].reshape(shards, -1, 16)) for k in ("x", "y"))
    coefs = {"aux": float(init["aux_coef"]), "z": float(init["z_coef"])}
    return sharded_step(
        params, blocks, TOP_2, mean_error, wanted=wanted, **coefs, **options
    )


def updated(params, gradients):
    rate = float(load("moe_layer_train_init")["lr"])
    return jax.tree.map(
        lambda a, b: np.asarray(a - rate * b, np.float32), params, gradients
    )


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_eight_steps_agree_on_any_number_of_shards(shards):
    reference = load("moe_layer_train_ref")
    params = gated_params(load("moe_layer_train_init"))
    for step in range(8):
        got = train_step(params, step, shards, expert_shards=shards)
        counts = reference["counts_src_expert"][step]
        assert (got.sent == counts.reshape(shards, -1, 8).sum(axis=1)).all()
        assert (np.asarray(got.sums.counts) == counts.sum(axis=0)).all()
        expected = [reference[key][step] for key in ("total", "aux", "z")]
        values = [got.loss, balance(got.sums), z_loss(got.sums)]
        np.testing.assert_allclose(values, expected, rtol=2.4e-6)
        if step == 0:
            rows = load("moe_layer_train_init")["x"][0].reshape(-1, 16)
            out = rows + np.concatenate(got.outputs)
            expected = flat(reference["out0"])
            np.testing.assert_allclose(out, expected, atol=OUTPUT_TOLERANCE)
            expected = gated_params(reference, "grad0_")
            assert_trees_close(got.gradients, expected, GRADIENT_TOLERANCE)
        params = updated(params, got.gradients)
    assert_trees_close(params, gated_params(reference, "final_"), GRADIENT_TOLERANCE)


def test_the_mean_of_losses_of_shards_is_another_loss():
    init, reference = load("moe_layer_train_init"), load("moe_layer_train_ref")
    params = gated_params(init)
    local = [route(TOP_2, params, block).sums for block in init["x"][0]]
    mean = np.mean([balance(sums) for sums in local])
    np.testing.assert_allclose(mean, reference["aux_local_mean"][0], rtol=1e-6)
    whole = add_sums(*local)
    np.testing.assert_allclose(balance(whole), reference["aux"][0], rtol=LOSS_TOLERANCE)
    shares = [balance(share_of(sums, whole)) for sums in local]
    np.testing.assert_allclose(np.sum(shares), balance(whole), rtol=1e-6)


def test_training_resumes_on_another_number_of_shards():
    reference = load("moe_layer_train_ref")
    params = gated_params(load("moe_layer_train_init"))
    for step in range(3):
        params = updated(params, train_step(params, step, 4, expert_shards=4).gradients)
    saved = jax.tree.map(np.asarray, params)
    for step in range(3, 8):
        got = train_step(saved, step, 2, expert_shards=2)
        np.testing.assert_allclose(got.loss, reference["total"][step], rtol=2.4e-6)
        saved = updated(saved, got.gradients)


def test_every_row_of_the_exchange_lands_once():
    init, reference = load("moe_layer_train_init"), load("moe_layer_train_ref")
    params = gated_params(init)
    landed = []
    for source, block in enumerate(init["x"][0]):
        choice = route(TOP_2, params, block).choice
        plan = plan_dispatch(np.asarray(choice.chosen), 8)
        assert (plan.counts == reference["counts_src_expert"][0, source]).all()
        landed += [(source, int(slot)) for slot in plan.slots]
    assert len(landed) == len(set(landed)) == 256


def test_ten_orders_of_arrival_give_the_same_bits():
    params = gated_params(load("moe_layer_train_init"))
    runs = [
        train_step(params, 0, 4, expert_shards=2, rng=np.random.default_rng(seed))
        for seed in range(10)
    ]
    for run in runs[1:]:
        assert run.loss == runs[0].loss
        assert_trees_close(run.gradients, runs[0].gradients, atol=0)


def test_router_gradient_with_sharded_experts_is_that_of_qwen2():
    golden = load("qwen2_moe_shared_nonorm")
    params, shared = gated_params(golden), shared_params(golden, "shared_expert")
    shared["gate"] = golden["w_shared_expert_gate.weight"].T
    blocks, cotangents = list(golden["x"]), list(golden["cot"])
    router = Router(TokenChoice(3, renormalise=False))
    got = sharded_step(
        params,
        blocks,
        router,
        cotangent_sum,
        wanted=cotangents,
        expert_shards=2,
    )
    expected = gated_params(golden, "grad_")
    assert_trees_close(got.gradients, expected, GRADIENT_TOLERANCE)
    out = np.concatenate(got.outputs) + shared_forward(shared, flat(golden["x"]))
    np.testing.assert_allclose(out, flat(golden["out"]), atol=OUTPUT_TOLERANCE)


def test_a_shard_without_tokens_changes_nothing():
    params, rows = random_params(0), random_rows(0, 12)
    with_empty = [rows[:5], rows[:0], rows[5:]]
    got = sharded_step(params, with_empty, TOP_2, aux=0.1, z=0.1)
    expected = sharded_step(params, [rows[:5], rows[5:]], TOP_2, aux=0.1, z=0.1)
    assert got.loss == expected.loss
    assert got.outputs[1].shape == (0, 6)
    assert_trees_close(got.gradients, expected.gradients, atol=0)


def test_experts_of_a_shard_that_get_no_token_have_zero_gradients_of_full_shape():
    params = random_params(1)
    params["router_bias"] = np.array([0, 0, -1e9, -1e9], np.float32)
    blocks = [random_rows(1, 8)]
    got = sharded_step(params, blocks, TOP_2, expert_shards=2, aux=1.0)
    assert got.sent[0, 2:].sum() == 0
    for key, gradient in got.gradients["experts"].items():
        assert gradient.shape == params["experts"][key].shape
        assert (gradient[2:] == 0.0).all()
        assert (gradient[:2] != 0.0).any()


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_microbatches_add_up_to_the_batch(microbatches):
    params, rows = random_params(2), random_rows(2, 16)
    whole = route(TOP_2, params, rows).sums
    parts = np.split(rows, microbatches)
    total = add_sums(*(route(TOP_2, params, part).sums for part in parts))
    assert (np.asarray(total.counts) == np.asarray(whole.counts)).all()
    np.testing.assert_allclose(balance(total), balance(whole), rtol=1e-6)
    np.testing.assert_allclose(z_loss(total), z_loss(whole), rtol=1e-6)


def test_recomputation_replays_the_stored_choice_of_a_tie():
    params = random_params(3)
    params["router"][:, 1] = params["router"][:, 0]  # two experts with equal logits
    rows = random_rows(3, 10)
    first = route(TOP_2, params, rows)
    # What a recomputation in other bits would do to ties.
    nudged = {**params, "router": params["router"] * (1 + 1e-6 * np.arange(4))}
    anew = route(TOP_2, nudged, rows)
    assert (np.asarray(anew.choice.chosen) != np.asarray(first.choice.chosen)).any()
    again = TOP_2(nudged, rows, replay=first.choice)
    assert (np.asarray(again.choice.chosen) == np.asarray(first.choice.chosen)).all()
    assert (np.asarray(again.sums.counts) == np.asarray(first.sums.counts)).all()
    np.testing.assert_allclose(again.weights, first.weights, atol=1e-4)


def test_a_replayed_pass_has_the_gradients_of_the_first():
    params, rows = random_params(4), random_rows(4, 10)
    router = Router(TokenChoice(2), Dropping(Capacity(1.0), over_survivors=True))

    (_, (_, routed)), first = dense_pass(router, params, rows)
    (_, (_, replayed)), again = dense_pass(router, params, rows, routed.choice)
    assert_trees_close(again, first, atol=0)
    assert_trees_close(replayed.sums, routed.sums, atol=0)


@pytest.mark.parametrize(
    ("order", "over_survivors"),
    [("token", False), ("choice", True), ("score", True), ("batch_priority", False)],
)
def test_a_dispatched_layer_with_drops_equals_the_dense_one(order, over_survivors):
    params, rows = random_params(5), random_rows(5, 16)
    limit = Capacity(0.75)
    router = Router(
        TokenChoice(2), Dropping(limit, order, over_survivors), num_groups=2
    )
    got = sharded_step(params, [rows], router, expert_shards=2)

    (value, (out, routed)), (gradients, _) = dense_pass(router, params, rows)
    assert int(routed.sums.dropped) == int(got.sums.dropped) > 0
    np.testing.assert_allclose(got.loss, value, rtol=1e-5)
    np.testing.assert_allclose(got.outputs[0], out, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()),
        got.gradients,
        gradients,
    )


def test_a_dropped_row_must_not_come_back():
    kept = np.array([[True, False], [True, True]])
    plan = plan_dispatch(np.array([[0, 1], [1, 0]]), 2, kept=kept)
    assert plan.slots.tolist() == [0, 3, 2]
    assert plan.counts.tolist() == [2, 1]
    rows = np.ones((3, 2), np.float32)
    placed = place_slots(plan.slots, rows, 4, kept=kept)
    assert placed[:, 0].tolist() == [1, 0, 1, 1]
    with pytest.raises(ValueError, match="each slot exactly once"):
        place_slots(np.arange(4, dtype=np.int32), np.ones((4, 2)), 4, kept=kept)
