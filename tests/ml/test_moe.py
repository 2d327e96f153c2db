"""Experts, dispatch and combine against golden layers and their definitions."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.ml.buckets import bucket_size, pad_rows
from timelyml.ml.choice import balance_loss, choose, count_choices, routing_weights
from timelyml.ml.moe import (
    combine,
    expert_backward,
    expert_forward,
    place_slots,
    plan_dispatch,
)

GOLDEN = Path(__file__).parents[1] / "golden"
# The golden files' own error is at most 2.2e-6 on outputs, 7.4e-6 on gradients.
OUTPUT_TOLERANCE = 2.2e-5
GRADIENT_TOLERANCE = 7.4e-5


def expert_params(golden, expert, prefix="w_"):
    return {
        "gate_up": golden[f"{prefix}experts.gate_up_proj"][expert].T,
        "down": golden[f"{prefix}experts.down_proj"][expert].T,
    }


def routed_pass(rows, router, experts, top_k, cotangent_of):
    """Run one layer the way the dataflow does: dispatch, experts, combine, back."""
    count, width = rows.shape
    logits = rows @ router.T
    chosen = np.asarray(choose(jnp.asarray(logits), top_k))
    plan = plan_dispatch(chosen, len(experts))
    cuts = np.cumsum(plan.counts)[:-1]
    inputs = [
        pad_rows(part, bucket_size(len(part)))
        for part in np.split(rows[plan.tokens], cuts)
    ]
    outputs = [
        np.asarray(expert_forward(params, part))[:size]
        for params, part, size in zip(experts, inputs, plan.counts, strict=True)
    ]
    placed = place_slots(plan.slots, np.concatenate(outputs), count * top_k)
    placed = placed.reshape(count, top_k, width)

    def tail(router, rows, placed):
        weights = routing_weights(rows @ router.T, chosen)
        return combine(placed, weights)

    out, pull = jax.vjp(tail, router, rows, placed)
    router_gradient, row_gradient, placed_gradient = pull(cotangent_of(out))
    sent = np.asarray(placed_gradient).reshape(count * top_k, width)[plan.slots]
    backs, gradients = [], []
    for params, part, got in zip(experts, inputs, np.split(sent, cuts), strict=True):
        gradient, back = expert_backward(params, part, pad_rows(got, len(part)))
        gradients.append(gradient)
        backs.append(np.asarray(back)[: len(got)])
    through = place_slots(plan.slots, np.concatenate(backs), count * top_k)
    row_gradient = row_gradient + through.reshape(count, top_k, width).sum(axis=1)
    return out, router_gradient, row_gradient, gradients, plan


@pytest.mark.parametrize(
    "name", ["mixtral_top2_E8", "mixtral_top1_E4", "mixtral_topE_E4"]
)
def test_a_dispatched_layer_equals_mixtral_forward_and_backward(name):
    golden = np.load(GOLDEN / f"{name}.npz")
    width = golden["x"].shape[-1]
    rows, cotangent = (golden[key].reshape(-1, width) for key in ("x", "cot"))
    experts = [expert_params(golden, e) for e in range(len(golden["counts"]))]
    top_k = golden["topk_idx"].shape[1]

    out, router_gradient, row_gradient, gradients, _ = routed_pass(
        rows, golden["w_gate.weight"], experts, top_k, lambda _: cotangent
    )

    expected = golden["out"].reshape(-1, width)
    np.testing.assert_allclose(out, expected, atol=OUTPUT_TOLERANCE)
    close = {"atol": GRADIENT_TOLERANCE}
    np.testing.assert_allclose(
        row_gradient, golden["grad_x"].reshape(-1, width), **close
    )
    np.testing.assert_allclose(router_gradient, golden["grad_gate.weight"], **close)
    for index, gradient in enumerate(gradients):
        wanted = expert_params(golden, index, prefix="grad_")
        for key, value in wanted.items():
            np.testing.assert_allclose(gradient[key], value, **close)


def test_eight_training_steps_end_at_the_golden_weights():
    init = np.load(GOLDEN / "moe_layer_train_init.npz")
    reference = np.load(GOLDEN / "moe_layer_train_ref.npz")
    router = init["w_gate.weight"]
    num_experts = router.shape[0]
    experts = [expert_params(init, e) for e in range(num_experts)]
    rate = float(init["lr"])
    width = router.shape[1]

    for step in range(8):
        rows = init["x"][step].reshape(-1, width)
        wanted = init["y"][step].reshape(-1, width)

        def penalty(router, rows=rows):
            logits = rows @ router.T
            counts = count_choices(choose(logits, 2), num_experts)
            sums = jnp.sum(jax.nn.softmax(logits), axis=0)
            z_loss = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
            balance = balance_loss(counts, sums, len(rows))
            return init["aux_coef"] * balance + init["z_coef"] * z_loss

        def cotangent_of(out, rows=rows, wanted=wanted):
            return 2 * (rows + out - wanted) / out.size

        out, gradient, _, gradients, plan = routed_pass(
            rows, router, experts, 2, cotangent_of
        )
        counts = reference["counts_src_expert"][step].sum(axis=0)
        assert (plan.counts == counts).all()
        mse = np.mean((rows + np.asarray(out) - wanted) ** 2)
        np.testing.assert_allclose(mse, reference["mse"][step], rtol=1e-5)
        gradient = np.asarray(gradient + jax.grad(penalty)(router))
        router = (router - rate * gradient).astype(np.float32)
        experts = [
            {key: params[key] - rate * np.asarray(got[key]) for key in params}
            for params, got in zip(experts, gradients, strict=True)
        ]

    close = {"atol": GRADIENT_TOLERANCE}
    np.testing.assert_allclose(router, reference["final_gate.weight"], **close)
    for index, params in enumerate(experts):
        wanted = expert_params(reference, index, prefix="final_")
        for key, value in wanted.items():
            np.testing.assert_allclose(params[key], value, **close)


@given(st.integers(0, 20), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_placing_undoes_dispatch_whatever_the_order_of_return(tokens, top_k, seed):
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((tokens, 5)), axis=1)[:, :top_k]
    plan = plan_dispatch(chosen, 5)
    rows = rng.standard_normal((tokens * top_k, 3))
    arrival = rng.permutation(tokens * top_k)
    sent = rows[plan.slots]
    placed = place_slots(plan.slots[arrival], sent[arrival], tokens * top_k)
    assert (placed == rows).all()
    assert (chosen.ravel()[plan.slots] == plan.experts).all()


@pytest.mark.parametrize("slots", [[0, 1, 1], [0, 2], [0, 1, 3]])
def test_a_missing_or_doubled_row_is_refused(slots):
    rows = np.zeros((len(slots), 2))
    with pytest.raises(ValueError, match="each slot exactly once"):
        place_slots(np.array(slots, np.int32), rows, 3)


def test_an_expert_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="expert out of range"):
        plan_dispatch(np.array([[3]]), 3)


def test_rows_of_padding_have_no_part_in_the_gradient():
    rng = np.random.default_rng(0)
    params = {
        "gate_up": rng.standard_normal((4, 12)).astype(np.float32),
        "down": rng.standard_normal((6, 4)).astype(np.float32),
    }
    rows = rng.standard_normal((5, 4)).astype(np.float32)
    cotangents = rng.standard_normal((5, 4)).astype(np.float32)
    exact, _ = expert_backward(params, rows, cotangents)
    padded, back = expert_backward(params, pad_rows(rows, 8), pad_rows(cotangents, 8))
    for key in exact:
        np.testing.assert_allclose(padded[key], exact[key], atol=1e-5)
    assert not np.asarray(back)[5:].any()
