"""Losses of the router: one definition, whatever the shards, microbatches and masks."""

from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from timelyml.ml.moe import (
    RouterSums,
    TokenChoice,
    add_sums,
    balance,
    grouped_sums,
    router_sums,
    share_of,
    updated_bias,
    z_loss,
)

RULE = TokenChoice(2)


@partial(jax.jit, static_argnames="rule")
def sums_of(logits, valid=None, rule=RULE):
    return router_sums(logits, rule.decide(logits, valid=valid), rule, valid=valid)


def logits_of(seed, tokens=12, experts=5):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((tokens, experts)).astype(np.float32))


def by_definition(logits, valid):
    """Balance over all choices, over first ones, and z, in float64."""
    wide = np.asarray(logits, np.float64)[valid]
    tokens, experts = wide.shape
    shares = np.exp(wide) / np.exp(wide).sum(axis=1, keepdims=True)
    best = np.argsort(-wide, axis=1, kind="stable")
    found = []
    for top_k in (2, 1):
        counts = np.bincount(best[:, :top_k].ravel(), minlength=experts)
        found.append(experts * np.sum(counts / tokens * shares.mean(axis=0)))
    z = np.mean(np.log(np.exp(wide).sum(axis=1)) ** 2)
    return [*found, z]


# Few cuts, for each is other shapes, which XLA compiles anew.
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 5, 11]))
def test_losses_equal_their_definition_over_masked_and_cut_batches(seed, cut):
    logits = logits_of(seed)
    valid = np.random.default_rng(seed).random(12) < 0.7
    valid[0] = True
    parts = [
        sums_of(logits[where], jnp.asarray(valid[where]))
        for where in (slice(0, cut), slice(cut, None))
    ]
    whole = add_sums(*parts)
    got = [balance(whole), balance(whole, counted="first"), z_loss(whole)]
    np.testing.assert_allclose(got, by_definition(logits, valid), rtol=1e-5)
    shares = [balance(share_of(part, whole)) for part in parts]
    np.testing.assert_allclose(sum(shares), balance(whole), rtol=1e-5)


def test_gradients_of_shares_are_those_of_the_loss_of_the_whole():
    logits = logits_of(0)

    def loss(sums):
        return balance(sums, divided_by=2) + 0.1 * z_loss(sums)

    exact = jax.jit(jax.grad(lambda logits: loss(sums_of(logits))))(logits)
    whole = sums_of(logits)
    shares = [
        jax.jit(jax.grad(lambda part: loss(share_of(sums_of(part), whole))))(part)
        for part in (logits[:5], logits[5:])
    ]
    np.testing.assert_allclose(np.concatenate(shares), exact, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_balanced_layer_costs_one_for_each_choice(top_k):
    logits = jnp.asarray(5.0 * np.eye(4) + 4.0 * np.roll(np.eye(4), 1, axis=1))
    sums = sums_of(logits, rule=TokenChoice(top_k))
    np.testing.assert_allclose(balance(sums), top_k, rtol=1e-6)
    np.testing.assert_allclose(balance(sums, divided_by=top_k), 1.0, rtol=1e-6)


def test_sigmoid_scores_are_shared_out_before_they_are_balanced():
    logits = logits_of(1)
    sums = sums_of(logits, rule=TokenChoice(2, score="sigmoid"))
    scores = np.asarray(jax.nn.sigmoid(logits))
    expected = (scores / scores.sum(axis=1, keepdims=True)).sum(axis=0)
    np.testing.assert_allclose(sums.probabilities, expected, rtol=1e-5)


def test_sums_of_groups_add_up_to_those_of_the_batch():
    logits = logits_of(2)
    valid = jnp.arange(12) % 4 != 3

    @jax.jit
    def grouped(logits):
        choice = RULE.decide(logits, valid=valid)
        return grouped_sums(logits, choice, RULE, num_groups=3, valid=valid)

    groups, whole = grouped(logits), sums_of(logits, valid)
    assert np.asarray(groups.tokens).tolist() == [3, 3, 3]
    total = RouterSums(*(leaf.sum(axis=0) for leaf in groups))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), total, whole)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3) | st.integers(0, 2**27), min_size=4, max_size=4))
@example([3, 3, 3, 2])
@example([2**27, 2**27, 2**27, 2**27 - 1])
def test_the_bias_follows_the_exact_sign(counts):
    moved = updated_bias(jnp.zeros(4), jnp.asarray(counts, jnp.int32), 0.5)
    mean = Fraction(sum(counts), 4)
    signs = [(mean > count) - (mean < count) for count in counts]
    assert np.asarray(moved).tolist() == [0.5 * sign for sign in signs]


def test_the_bias_evens_out_a_lopsided_router():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((512, 4)) + np.array([3, 0, 0, -3]))
    rule = TokenChoice(1, score="sigmoid")
    bias = jnp.zeros(4)

    @jax.jit
    def load(bias):
        sums = router_sums(logits, rule.decide(logits, bias=bias), rule)
        return sums.counts

    before = np.asarray(load(bias))
    for _ in range(200):
        bias = updated_bias(bias, load(bias), 0.01)
    after = np.asarray(load(bias))
    assert before.max() > 450
    assert after.max() < 180
