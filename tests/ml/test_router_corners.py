"""Layers on odd batches: permuted, tied, poisoned, empty, single, all to one expert."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ml.moe_cases import (
    assert_trees_close,
    compiled_expert,
    dense_pass,
    random_params,
    random_rows,
    sharded_step,
)
from timelyml.ml.buckets import bucket_size
from timelyml.ml.moe import (
    Capacity,
    Choice,
    Dropping,
    Router,
    TokenChoice,
    balance,
    combine,
    expert_forward,
    moe_dense,
    plan_dispatch,
    router_sums,
    run_experts,
    run_experts_backward,
    z_loss,
)

TOP_2 = Router(TokenChoice(2))
# Bits of a matmul depend on the number of rows; float32 leaves about 1e-6 of each.
CLOSE = 1e-4


def assert_same_pass(got, expected):
    np.testing.assert_allclose(got.loss, expected[0][0], rtol=1e-5)
    np.testing.assert_allclose(got.outputs[0], expected[0][1][0], atol=CLOSE)
    gradients, _ = expected[1]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, atol=1e-5 * max(1.0, np.abs(b).max())
        ),
        got.gradients,
        gradients,
    )


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_a_dropless_layer_is_equivariant_under_permutation(seed):
    params, rows = random_params(seed), random_rows(seed, 12)
    order = np.random.default_rng(seed).permutation(12)
    (_, (out, routed)), (gradients, row_gradient) = dense_pass(TOP_2, params, rows)
    (_, (mixed, other)), (same, mixed_gradient) = dense_pass(TOP_2, params, rows[order])
    np.testing.assert_allclose(mixed, np.asarray(out)[order], atol=CLOSE)
    back = np.asarray(row_gradient)[order]
    scale = max(1.0, np.abs(back).max())
    np.testing.assert_allclose(mixed_gradient, back, atol=CLOSE * scale)
    chosen = np.asarray(routed.choice.chosen)
    assert (np.asarray(other.choice.chosen) == chosen[order]).all()
    assert (np.asarray(other.sums.counts) == np.asarray(routed.sums.counts)).all()
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients))
    assert_trees_close(same, gradients, atol=1e-5 * scale)


def test_a_dispatched_layer_is_equivariant_under_permutation():
    params, rows = random_params(7), random_rows(7, 12)
    order = np.random.default_rng(7).permutation(12)
    straight = sharded_step(params, [rows], TOP_2).outputs[0]
    mixed = sharded_step(params, [rows[order]], TOP_2).outputs[0]
    np.testing.assert_allclose(mixed, straight[order], atol=CLOSE)


@pytest.mark.parametrize("tokens", [0, 1, 2])
@pytest.mark.parametrize("top_k", [1, 3])
def test_batches_of_hardly_any_token_work(tokens, top_k):
    params, rows = random_params(0), random_rows(0, tokens)
    router = Router(TokenChoice(top_k, renormalise=False))
    got = sharded_step(params, [rows], router, expert_shards=2, aux=1.0, z=1.0)
    expected = dense_pass(router, params, rows)
    assert got.outputs[0].shape == (tokens, 6)
    np.testing.assert_allclose(got.outputs[0], expected[0][1][0], atol=CLOSE)
    assert np.isfinite(got.loss)
    for leaf in jax.tree.leaves(got.gradients):
        assert np.isfinite(leaf).all()


def test_no_tokens_at_all_cost_nothing():
    params, rows = random_params(0), random_rows(0, 0)
    router = Router(TokenChoice(2), Dropping(Capacity(1.0), "batch_priority"))
    got = sharded_step(params, [rows, rows], router, aux=1.0, z=1.0)
    assert got.loss == 0.0
    assert float(balance(got.sums)) == float(z_loss(got.sums)) == 0.0
    for leaf in jax.tree.leaves(got.gradients):
        assert (leaf == 0.0).all()


def test_all_tokens_may_go_to_one_expert():
    params, rows = random_params(1), random_rows(1, 20)
    params["router_bias"] = np.array([0, 99, 0, 0], np.float32)
    router = Router(TokenChoice(1, renormalise=False))
    got = sharded_step(params, [rows], router, expert_shards=4)
    assert np.asarray(got.sums.counts).tolist() == [0, 20, 0, 0]
    assert_same_pass(got, dense_pass(router, params, rows))
    for leaf in jax.tree.leaves(got.gradients["experts"]):
        assert (leaf[[0, 2, 3]] == 0.0).all()
        assert (leaf[1] != 0.0).any()


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_experts_without_tokens_have_exactly_zero_gradients_of_full_shape(seed):
    rng = np.random.default_rng(seed)
    params, rows = random_params(seed), random_rows(seed, 3)
    empty = rng.permutation(4)[:2]
    params["router_bias"] = np.zeros(4, np.float32)
    params["router_bias"][empty] = -1e9
    for leaf in jax.tree.leaves(params["experts"]):
        leaf[empty] = np.nan  # whatever an empty expert holds, nobody reads it
    _, (gradients, row_gradient) = dense_pass(TOP_2, params, rows)
    got = sharded_step(params, [rows], TOP_2)
    assert np.isfinite(row_gradient).all()
    for both in (gradients, got.gradients):
        for key, leaf in both["experts"].items():
            assert leaf.shape == params["experts"][key].shape
            assert (np.asarray(leaf)[empty] == 0.0).all()
            assert np.isfinite(leaf).all()


def test_ties_nan_and_signed_zero_are_routed_the_same_on_both_sides():
    params = random_params(2)
    params["router"] = np.eye(6, 4, dtype=np.float32)
    rows = np.zeros((4, 6), np.float32)
    rows[0, :4] = [0.0, -0.0, 0.0, -0.0]
    rows[1, :4] = [-0.0, 0.0, -0.0, 0.0]
    rows[2, :4] = [1.0, 2.0, 2.0, 1.0]
    rows[3, :4] = [-1.0, -2.0, -1.0, -2.0]
    got = sharded_step(params, [rows], TOP_2, expert_shards=2)
    _, (_, routed) = dense_pass(TOP_2, params, rows)[0]
    expected = [[0, 1], [0, 1], [1, 2], [0, 2]]
    assert np.asarray(routed.choice.chosen).tolist() == expected
    assert_same_pass(got, dense_pass(TOP_2, params, rows))


def test_a_token_of_nan_stays_alone_with_its_nan():
    params, rows = random_params(3), random_rows(3, 6)
    (_, (clean, _)), _ = dense_pass(TOP_2, params, rows)
    rows[2] = np.nan
    (_, (out, routed)), (gradients, row_gradient) = dense_pass(TOP_2, params, rows)
    assert np.asarray(routed.choice.chosen)[2].tolist() == [0, 1]
    others = [0, 1, 3, 4, 5]
    np.testing.assert_allclose(
        np.asarray(out)[others], np.asarray(clean)[others], atol=CLOSE
    )
    assert np.isnan(np.asarray(out)[2]).all()
    # Backward too: neither other tokens nor experts that it does not visit.
    assert np.isfinite(np.asarray(row_gradient)[others]).all()
    for leaf in jax.tree.leaves(gradients["experts"]):
        assert np.isfinite(leaf[2:]).all()
        assert (np.asarray(leaf)[2:] != 0.0).any()


def test_padding_changes_nothing_whatever_it_holds():
    params, rows = random_params(4), random_rows(4, 5)
    padded = np.concatenate([rows, np.zeros((3, 6), np.float32)])
    valid = np.arange(8) < 5

    @jax.jit
    def loss(params, rows, valid):
        out, routed = moe_dense(params, rows, TOP_2, valid=valid)
        extra = balance(routed.sums) + z_loss(routed.sums)
        return jnp.sum(out**2) + extra, (out, routed)

    gradient = jax.value_and_grad(loss, has_aux=True)
    (value, (out, routed)), gradients = gradient(params, padded, valid)
    (exact, (wanted, alone)), expected = gradient(params, rows, valid[:5])
    np.testing.assert_allclose(value, exact, rtol=1e-6)
    assert (np.asarray(out)[5:] == 0.0).all()
    np.testing.assert_allclose(out[:5], wanted, atol=CLOSE)
    assert (np.asarray(routed.sums.counts) == np.asarray(alone.sums.counts)).all()
    assert int(routed.sums.tokens) == 5
    assert_trees_close(gradients, expected, atol=1e-3)


def test_losses_ignore_nan_in_padding_forward_and_backward():
    logits = jnp.asarray(random_rows(0, 4)).at[3].set(jnp.nan)
    valid = jnp.array([True, True, True, False])
    rule = TokenChoice(2)

    def loss(logits):
        sums = router_sums(logits, rule.decide(logits, valid=valid), rule, valid=valid)
        return balance(sums) + z_loss(sums)

    value, gradient = jax.value_and_grad(loss)(logits)
    assert np.isfinite(value)
    assert (np.asarray(gradient)[3] == 0.0).all()
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("weighs_input", [False, True])
def test_weights_scale_outputs_or_inputs(weighs_input):
    params, rows = random_params(5), random_rows(5, 4)
    rule = TokenChoice(1, score="sigmoid", renormalise=False, weighs_input=weighs_input)
    out, routed = moe_dense(params, rows, Router(rule))
    for token in range(4):
        expert = int(routed.choice.chosen[token, 0])
        weight = np.asarray(routed.weights)[token]
        one = jax.tree.map(lambda leaf, e=expert: leaf[e], params["experts"])
        row = rows[token : token + 1]
        expected = (
            expert_forward(one, row * weight)
            if weighs_input
            else weight * expert_forward(one, row)
        )
        np.testing.assert_allclose(out[token : token + 1], expected, rtol=1e-5)


def test_output_has_the_dtype_of_the_rows():
    params, rows = random_params(6), random_rows(6, 4)
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    out, routed = moe_dense(half, jnp.asarray(rows, jnp.bfloat16), TOP_2)
    assert out.dtype == jnp.bfloat16
    assert routed.weights.dtype == jnp.float32


def experts_of(seed, count):
    stacked = random_params(seed, experts=count)["experts"]
    return [jax.tree.map(lambda leaf, e=e: leaf[e], stacked) for e in range(count)]


edges = [bucket_size(size) for size in (1, 17, 21, 33)]


@pytest.mark.parametrize(
    "counts",
    [
        [2, 0, 3, 0],
        [0, 0, 0, 0],
        [0, 1, 16, 17],
        *([0, 1, edge - 1, edge, edge + 1] for edge in edges[:2]),
    ],
    ids=str,
)
def test_runs_of_any_size_equal_each_expert_by_itself(counts):
    forward, pull = compiled_expert()
    experts = experts_of(0, len(counts))
    rows, cotangents = (random_rows(seed, sum(counts)) for seed in (1, 2))
    got = run_experts(forward, experts, rows, np.array(counts))
    gradients, back = run_experts_backward(
        pull, experts, rows, cotangents, np.array(counts)
    )
    assert got.shape == back.shape == rows.shape
    cuts = np.cumsum(counts)[:-1]
    parts = [np.split(array, cuts) for array in (rows, cotangents, got, back)]
    for expert, (own, sent, output, returned) in enumerate(zip(*parts, strict=True)):
        value, exact = jax.vjp(expert_forward, experts[expert], own)
        wanted, wanted_rows = exact(jnp.asarray(sent))
        np.testing.assert_allclose(output, value, atol=CLOSE)
        np.testing.assert_allclose(returned, wanted_rows, atol=CLOSE)
        assert_trees_close(gradients[expert], wanted, atol=CLOSE)
        if not len(own):
            for key, leaf in gradients[expert].items():
                assert leaf.shape == experts[expert][key].shape
                assert (leaf == 0.0).all()


def test_empty_experts_are_never_called():
    called = []

    def spy(params, rows):
        called.append(params)
        return rows

    rows = random_rows(0, 5)
    run_experts(spy, ["a", "b", "c"], rows, np.array([2, 0, 3]))
    assert called == ["a", "c"]


def test_counts_that_do_not_cover_the_rows_are_refused():
    with pytest.raises(ValueError, match="counts do not cover the rows"):
        run_experts(
            expert_forward, experts_of(0, 2), random_rows(0, 3), np.array([1, 1])
        )


def test_a_handful_of_shapes_serves_all_counts():
    shapes = set()

    def spy(params, rows):
        shapes.add(rows.shape)
        return rows

    for count in range(1, 257):
        run_experts(spy, [None], np.zeros((count, 2), np.float32), np.array([count]))
    assert len(shapes) <= 21


@functools.partial(jax.jit, static_argnames="num_experts")
def one_hot_combine(chosen, outputs, weights, num_experts):
    hot = jax.nn.one_hot(chosen, num_experts)  # (tokens, top_k, experts)
    return jnp.einsum("tke,etd,tk->td", hot, outputs, weights)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_combine_of_a_plan_equals_the_one_hot_einsum(seed):
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((7, 4)), axis=1)[:, :3].astype(np.int32)
    kept = rng.random((7, 3)) < 0.7
    outputs = rng.standard_normal((4, 7, 2)).astype(np.float32)
    weights = np.where(kept, rng.random((7, 3)), 0).astype(np.float32)
    plan = plan_dispatch(chosen, 4, kept=kept)
    picked = np.zeros((21, 2), np.float32)
    picked[plan.slots] = outputs[plan.experts, plan.tokens]
    got = combine(picked.reshape(7, 3, 2), weights)
    expected = one_hot_combine(chosen, outputs, weights, 4)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_replaying_a_choice_of_another_batch_takes_it_as_it_is():
    params, rows = random_params(8), random_rows(8, 3)
    forced = np.array([[3], [3], [0]], np.int32)
    everywhere = np.ones((3, 1), bool)
    router = Router(TokenChoice(1, renormalise=False))
    routed = router(params, rows, replay=Choice(forced, everywhere, everywhere))
    assert np.asarray(routed.sums.counts).tolist() == [1, 0, 0, 2]
