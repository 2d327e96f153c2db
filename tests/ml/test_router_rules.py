"""Router rules: their order on every corner, their weights, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timelyml.errors import ConfigError
from timelyml.ml.choice import among_best, choose, ranked
from timelyml.ml.moe import Choice, ExpertChoice, Groups, Router, TokenChoice

corners = st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan])
values = st.one_of(corners, st.floats(width=32, allow_subnormal=False))
row_of_six = st.lists(values, min_size=6, max_size=6)


def ranked_by_definition(row, allowed):
    """Descending by value, ascending by index; then NaN, then what is barred."""

    def key(index):
        if not allowed[index]:
            return (2, 0.0, index)
        value = row[index]
        return (1, 0.0, index) if np.isnan(value) else (0, -value, index)

    return sorted(range(len(row)), key=key)


@settings(deadline=None)
@given(
    st.lists(row_of_six, min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_ranks_equal_their_definition_and_choices_are_the_first_of_them(rows, allowed):
    logits, mask = np.array(rows, np.float32), np.array(allowed)
    got = np.asarray(ranked(jnp.asarray(logits), allowed=jnp.asarray(mask)))
    assert got.tolist() == [ranked_by_definition(row, allowed) for row in logits]
    # Beyond what is allowed a choice means nothing.
    count = max(int(mask.sum()), 1)
    chosen = np.asarray(choose(jnp.asarray(logits), 6, allowed=jnp.asarray(mask)))
    assert (chosen[:, :count] == got[:, :count]).all()


def test_many_choices_are_sorted_by_the_same_rule_as_few():
    logits = np.random.default_rng(0).integers(0, 4, (32, 40)).astype(np.float32)
    logits[::3, 5] = np.nan
    many = np.asarray(choose(jnp.asarray(logits), 33))
    few = np.asarray(choose(jnp.asarray(logits), 8))
    assert (many[:, :8] == few).all()


jitted_best = jax.jit(among_best)


@settings(deadline=None)
@given(
    row_of_six,
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.integers(0, 8),
)
def test_the_best_are_the_first_of_the_ranks(row, allowed, count):
    scores = np.array([row], np.float32)
    got = np.asarray(jitted_best(scores, count, allowed=np.array([allowed])))[0]
    order = ranked_by_definition(scores[0], allowed)
    expected = [index for index in order[:count] if allowed[index]]
    assert np.flatnonzero(got).tolist() == sorted(expected)


def test_choices_are_made_on_logits_where_probabilities_tie():
    logits = jnp.array([[-200.0, 0.0, -150.0, -300.0], [30.0, 40.0, 50.0, 60.0]])
    soft = TokenChoice(3).decide(logits)
    assert np.asarray(soft.chosen).tolist() == [[1, 2, 0], [3, 2, 1]]
    sigmoid = TokenChoice(3, score="sigmoid").decide(logits)
    assert np.asarray(sigmoid.chosen).tolist() == [[1, 2, 0], [3, 2, 1]]


def test_the_router_works_in_float32_on_rows_of_less():
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.standard_normal((512, 64)), jnp.bfloat16)
    kernel = jnp.asarray(rng.standard_normal((64, 16)), jnp.bfloat16)
    router = Router(TokenChoice(2))
    routed = router({"router": kernel}, rows)
    assert routed.weights.dtype == jnp.float32
    exact = np.asarray(rows, np.float64) @ np.asarray(kernel, np.float64)
    expected = np.argsort(-exact, axis=1, kind="stable")[:, :2]
    assert (np.asarray(routed.choice.chosen) == expected).all()
    rounded = choose(rows @ kernel, 2)
    assert (np.asarray(rounded) != expected).any()


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.floats(-20, 20, width=32), min_size=5, max_size=5),
        min_size=2,
        max_size=2,
    ),
    st.integers(1, 5),
)
def test_renormalised_softmax_is_softmax_over_the_chosen(rows, top_k):
    logits = jnp.asarray(np.array(rows, np.float32))
    rule = TokenChoice(top_k)
    choice = rule.decide(logits)
    weights = np.asarray(rule.weights(logits, choice))
    wide = np.exp(np.array(rows, np.float64))
    picked = np.take_along_axis(wide, np.asarray(choice.chosen), axis=1)
    expected = picked / picked.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, expected, atol=1e-6)


def test_weights_over_survivors_outlive_the_underflow_of_their_probabilities():
    logits = jnp.array([[0.0, -200.0, -210.0]], jnp.float32)
    rule = TokenChoice(2)
    choice = rule.decide(logits)
    choice = choice._replace(kept=jnp.array([[False, True]]))

    def total(logits, over_survivors):
        return jnp.sum(rule.weights(logits, choice, over_survivors=over_survivors))

    assert float(total(logits, True)) == 1.0
    assert float(total(logits, False)) == 0.0
    nobody = choice._replace(kept=jnp.zeros((1, 2), bool))
    weights = rule.weights(logits, nobody, over_survivors=True)
    assert np.asarray(weights).tolist() == [[0.0, 0.0]]

    def of_nobody(logits):
        return jnp.sum(rule.weights(logits, nobody, over_survivors=True))

    assert np.asarray(jax.grad(of_nobody)(logits)).tolist() == [[0.0, 0.0, 0.0]]


RULES = [
    TokenChoice(2),
    TokenChoice(2, renormalise=False),
    TokenChoice(2, score="sigmoid", scale=2.5),
    TokenChoice(2, score="sigmoid", renormalise=False),
    TokenChoice(3, score="sigmoid", groups=Groups(2, 1)),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("over_survivors", [False, True])
def test_gradients_of_weights_are_finite_differences(rule, over_survivors):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((4, 6)).astype(np.float32))
    choice = rule.decide(logits)
    kept = jnp.asarray(rng.random(choice.kept.shape) < 0.7)
    choice = choice._replace(kept=kept)
    cotangent = rng.standard_normal(kept.shape).astype(np.float32)

    @jax.jit
    def loss(logits):
        weights = rule.weights(logits, choice, over_survivors=over_survivors)
        return jnp.sum(weights * cotangent)

    gradient = np.asarray(jax.grad(loss)(logits))
    step = 1e-2  # float32 leaves about 1e-5 of the quotient
    for index in np.ndindex(4, 6):
        nudge = jnp.zeros_like(logits).at[index].set(step)
        quotient = (loss(logits + nudge) - loss(logits - nudge)) / (2 * step)
        np.testing.assert_allclose(gradient[index], quotient, atol=2e-4)


def test_neither_choice_nor_bias_carries_a_gradient():
    rule = TokenChoice(2, score="sigmoid")
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)))

    def loss(bias):
        return jnp.sum(rule.weights(logits, rule.decide(logits, bias=bias)) ** 2)

    assert (np.asarray(jax.grad(loss)(jnp.zeros(4))) == 0).all()


@settings(deadline=None)
@given(
    st.lists(
        # XLA flushes subnormals to zero, where they tie.
        st.lists(
            st.floats(-9, 9, width=32, allow_subnormal=False), min_size=8, max_size=8
        ),
        min_size=2,
        max_size=2,
    ),
    st.sampled_from([(2, 1), (4, 2), (4, 3), (8, 4)]),
    st.integers(1, 2),
)
def test_limited_groups_equal_their_definition(rows, groups, num_summed):
    scores = np.array(rows, np.float32)
    num_groups, num_kept = groups
    allowed = Groups(num_groups, num_kept, num_summed).allowed(jnp.asarray(scores))
    for row, got in zip(scores, np.asarray(allowed), strict=True):
        parts = row.reshape(num_groups, -1)
        sums = np.sort(parts, axis=1)[:, ::-1][:, :num_summed].sum(axis=1)
        best = sorted(range(num_groups), key=lambda g: (-sums[g], g))[:num_kept]
        size = parts.shape[1]
        assert np.flatnonzero(got).tolist() == sorted(
            g * size + i for g in best for i in range(size)
        )


def test_padding_asks_for_nothing():
    logits = jnp.zeros((3, 4))
    valid = jnp.array([True, False, True])
    choice = TokenChoice(2).decide(logits, valid=valid)
    assert np.asarray(choice.asked)[:, 0].tolist() == [True, False, True]
    assert (np.asarray(TokenChoice(2).weights(logits, choice))[1] == 0).all()


def expert_choice_by_definition(logits, capacity, valid):
    wide = logits.astype(np.float64)
    scores = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    taken = np.zeros(logits.shape, bool)
    for expert in range(logits.shape[1]):
        tokens = [t for t in range(len(logits)) if valid[t]]
        tokens.sort(key=lambda t: (-scores[t, expert], t))
        taken[tokens[:capacity], expert] = True
    return taken


@pytest.mark.parametrize("capacity", [1, 3, 10])
def test_every_expert_chooses_its_best_tokens(capacity):
    rng = np.random.default_rng(capacity)
    logits = rng.standard_normal((7, 4)).astype(np.float32)
    valid = np.array([True] * 6 + [False])
    rule = ExpertChoice()
    choice = rule.decide(
        jnp.asarray(logits), valid=jnp.asarray(valid), capacity=capacity
    )
    expected = expert_choice_by_definition(logits, capacity, valid)
    assert (np.asarray(choice.kept) == expected).all()
    weights = np.asarray(rule.weights(jnp.asarray(logits), choice))
    probabilities = np.asarray(jax.nn.softmax(logits, axis=1))
    np.testing.assert_allclose(weights, probabilities * expected, atol=1e-6)


def test_input_scaling_weighs_what_the_expert_reads():
    rule = TokenChoice(1, score="sigmoid", renormalise=False, weighs_input=True)
    logits = jnp.array([[0.0, 2.0]])
    choice = rule.decide(logits)
    assert np.asarray(choice.chosen).tolist() == [[1]]
    expected = 1 / (1 + np.exp(-2.0))
    np.testing.assert_allclose(rule.weights(logits, choice), [[expected]], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TokenChoice(0), "router rule cannot work"),
        (lambda: TokenChoice(1, score="tanh"), "router rule cannot work"),
        (lambda: Groups(4, 5), "groups of experts cannot be kept"),
        (lambda: Groups(4, 2, 0), "groups of experts cannot be kept"),
        (lambda: Router(ExpertChoice()), "router cannot work"),
        (lambda: Router(TokenChoice(1), num_groups=0), "router cannot work"),
    ],
)
def test_rules_that_cannot_work_are_refused_when_made(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


@pytest.mark.parametrize(
    "rule",
    [
        TokenChoice(5),
        TokenChoice(2, groups=Groups(3, 1)),
        TokenChoice(3, groups=Groups(4, 2)),
    ],
)
def test_a_rule_that_does_not_fit_the_experts_is_refused(rule):
    with pytest.raises(ConfigError, match="does not fit 4 experts"):
        rule.decide(jnp.zeros((2, 4)))


def test_expert_choice_without_capacity_is_refused():
    with pytest.raises(ConfigError, match="fills experts to a capacity"):
        ExpertChoice().decide(jnp.zeros((2, 4)))


def test_a_choice_is_a_payload_of_rows():
    choice = TokenChoice(2).decide(jnp.zeros((3, 4)))
    assert isinstance(choice, Choice)
    assert {leaf.shape for leaf in choice} == {(3, 2)}
