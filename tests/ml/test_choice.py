"""The choice of experts: its order on every corner, and golden routing."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timelyml.ml.choice import balance_loss, choose, count_choices, routing_weights

GOLDEN = Path(__file__).parents[1] / "golden"
MIXTRAL = ["mixtral_top2_E8", "mixtral_top1_E4", "mixtral_topE_E4"]
# The golden files' own error against float64 is at most 4e-6; ten times that.
GOLDEN_TOLERANCE = 4e-5


def chosen_by_definition(row, top_k):
    """Sort by (NaN last, value descending, index ascending), one token at a time."""

    def key(index):
        value = float(row[index])
        return (np.isnan(value), -value if not np.isnan(value) else 0.0, index)

    return sorted(range(len(row)), key=key)[:top_k]


corners = st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-42])
logit = st.one_of(corners, st.floats(width=32))


@settings(deadline=None)  # a new shape compiles
@given(
    st.lists(st.lists(logit, min_size=6, max_size=6), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_choice_equals_its_definition_on_ties_nan_and_signed_zero(rows, top_k):
    logits = np.array(rows, np.float32)
    # XLA flushes denormals to zero on some devices: they tie with zero there.
    logits[np.abs(logits) < np.finfo(np.float32).tiny] = 0.0
    got = np.asarray(choose(jnp.asarray(logits), top_k))
    assert got.tolist() == [chosen_by_definition(row, top_k) for row in logits]


def test_choice_is_the_same_inside_and_outside_of_jit():
    logits = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    logits[::3, 2] = logits[::3, 5]
    outside = choose(jnp.asarray(logits), 3)
    inside = jax.jit(choose, static_argnums=1)(logits, 3)
    assert (np.asarray(outside) == np.asarray(inside)).all()


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ValueError, match="top_k out of range"):
        choose(jnp.zeros((1, 4)), 5)


@pytest.mark.parametrize("name", MIXTRAL)
def test_routing_equals_mixtral(name):
    golden = np.load(GOLDEN / f"{name}.npz")
    logits = jnp.asarray(golden["logits"])
    top_k = golden["topk_idx"].shape[1]
    chosen = choose(logits, top_k)
    counts = count_choices(chosen, logits.shape[1])
    weights = routing_weights(logits, chosen)
    assert (np.asarray(chosen) == golden["topk_idx"]).all()
    assert (np.asarray(counts) == golden["counts"]).all()
    np.testing.assert_allclose(weights, golden["topk_weight"], atol=GOLDEN_TOLERANCE)


@pytest.mark.parametrize("name", MIXTRAL)
def test_balance_loss_and_its_gradient_equal_mixtral(name):
    golden = np.load(GOLDEN / f"{name}.npz")
    top_k = golden["topk_idx"].shape[1]

    def loss(logits):
        counts = count_choices(choose(logits, top_k), logits.shape[1])
        sums = jnp.sum(jax.nn.softmax(logits), axis=0)
        return balance_loss(counts, sums, logits.shape[0])

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(golden["logits"]))
    np.testing.assert_allclose(value, golden["aux_loss"], rtol=GOLDEN_TOLERANCE)
    np.testing.assert_allclose(
        gradient, golden["grad_logits_aux"], atol=GOLDEN_TOLERANCE
    )


def test_one_expert_per_token_learns_only_without_renormalising():
    logits = jnp.asarray([[0.3, -0.2, 0.9]])
    chosen = choose(logits, 1)

    def weight(logits, renormalise):
        return routing_weights(logits, chosen, renormalise=renormalise)[0, 0]

    frozen = jax.grad(weight)(logits, True)
    learning = jax.grad(weight)(logits, False)
    assert np.abs(frozen).max() < 1e-6
    assert np.abs(learning).max() > 1e-2
