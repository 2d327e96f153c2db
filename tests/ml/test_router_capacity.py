"""Capacity formulas by hand, and drop orders by brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ml.moe_cases import dense_pass, random_params, random_rows
from timelyml.errors import ConfigError
from timelyml.ml.moe import (
    Capacity,
    Choice,
    Dropping,
    ExpertChoice,
    Router,
    TokenChoice,
    balance,
    drop_beyond,
    router_sums,
)

BY_HAND = [
    (Capacity(1.0), (12, 4, 2), 6),
    (Capacity(1.25), (10, 4, 2), 7),  # 6.25
    (Capacity(1.0, minimum=4), (4, 4, 1), 4),
    (Capacity(3, "fixed"), (16, 4, 1), 3),
    (Capacity(1.25, "megablocks"), (10, 4, 2), 6),
    (Capacity(0, "megablocks"), (10, 4, 2), None),
    (Capacity(1.0, "flaxformer"), (10, 4, 2), 2),  # round(2.5) is 2
    (Capacity(1.0, "flaxformer"), (14, 4, 2), 4),  # round(3.5) is 4
    (Capacity(1.0, "flaxformer", minimum=4), (4, 4, 2), 4),
    (Capacity(1.25, "mesh"), (10, 4, 2), 3),
    (Capacity(8.0, "mesh"), (10, 4, 2), 10),
    (Capacity(1.5, "maxtext"), (10, 4, 2), 7),  # ceil(5) * 1.5
    (Capacity(3.0, "maxtext"), (1, 4, 1), 3),
    (Capacity(1.5, "tutel"), (10, 4, 2), 8),  # 2 * int(1.5 * 3)
    (Capacity(1.5, "tutel", alignment=8), (10, 4, 2), 8),
    (Capacity(1.5, "tutel", alignment=5), (10, 4, 2), 10),
]


@pytest.mark.parametrize(("capacity", "sizes", "expected"), BY_HAND)
def test_formulas_give_what_a_hand_computes(capacity, sizes, expected):
    tokens, experts, top_k = sizes
    assert capacity.of(tokens, num_experts=experts, top_k=top_k) == expected


def test_tutel_follows_the_counts_below_a_factor_of_one():
    sizes = {"num_experts": 4, "top_k": 2}
    assert Capacity(0, "tutel").of(10, **sizes, largest_count=9) == 9
    assert Capacity(-1.5, "tutel").of(10, **sizes, largest_count=9) == 8
    assert Capacity(-1.5, "tutel").of(10, **sizes, largest_count=5) == 5
    with pytest.raises(ConfigError, match="pass largest_count"):
        Capacity(0, "tutel").of(10, **sizes)


@pytest.mark.parametrize(
    "formula", ["ceil", "flaxformer", "maxtext", "megablocks", "mesh", "tutel"]
)
def test_capacity_never_rounds_to_nothing(formula):
    assert Capacity(0.5, formula).of(2, num_experts=8, top_k=1) >= 1


@pytest.mark.parametrize(
    "options",
    [
        {"factor": 0},
        {"factor": -1, "formula": "megablocks"},
        {"factor": float("nan")},
        {"factor": 1, "minimum": 0},
        {"factor": 1, "alignment": 0},
        {"factor": 1.5, "formula": "fixed"},
        {"factor": 1, "formula": "unheard of"},
    ],
)
def test_capacities_that_cannot_work_are_refused_when_made(options):
    with pytest.raises(ConfigError, match="capacity cannot work"):
        Capacity(**options)


def test_an_unknown_drop_order_is_refused():
    with pytest.raises(ConfigError, match="drop order is unknown"):
        Dropping(Capacity(1.0), "alphabetical")


def kept_by_definition(chosen, wanted, capacity, order, scores):
    """Serve pairs one after the other while there is room."""
    tokens, top_k = chosen.shape
    pairs = [(t, j) for t in range(tokens) for j in range(top_k)]
    best = scores.max(axis=1)
    keys = {
        "token": lambda p: p,
        "choice": lambda p: (p[1], p[0]),
        "score": lambda p: (-scores[p], p),
        "batch_priority": lambda p: (p[1], -best[p[0]], p[0]),
    }
    used, kept = {}, np.zeros(chosen.shape, bool)
    for pair in sorted(pairs, key=keys[order]):
        expert = int(chosen[pair])
        if wanted[pair] and used.get(expert, 0) < capacity:
            used[expert] = used.get(expert, 0) + 1
            kept[pair] = True
    return kept


jitted_drop = jax.jit(drop_beyond, static_argnames="order")


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 5, 9]),
    st.integers(0, 6),
    st.sampled_from(["token", "choice", "score", "batch_priority"]),
)
def test_who_is_kept_equals_serving_pairs_one_by_one(seed, tokens, capacity, order):
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((tokens, 4)), axis=1)[:, :2].astype(np.int32)
    wanted = rng.random((tokens, 2)) < 0.8
    scores = rng.integers(0, 4, (tokens, 2)).astype(np.float32)  # many ties
    choice = Choice(jnp.asarray(chosen), jnp.asarray(wanted), jnp.asarray(wanted))
    got = jitted_drop(choice, capacity, order=order, scores=jnp.asarray(scores))
    expected = kept_by_definition(chosen, wanted, capacity, order, scores)
    assert (np.asarray(got.kept) == expected).all()
    assert (np.asarray(got.asked) == wanted).all()


def test_capacity_holds_by_position_without_random_selection():
    logits = jnp.tile(jnp.array([1.0, 0.0, 0.0, 0.0]), (5, 1))
    rule = TokenChoice(1, renormalise=False)
    router = Router(rule, Dropping(Capacity(4, "fixed")))
    choice = router.decide(logits)
    sums = router_sums(logits, choice, rule)
    assert np.asarray(choice.kept)[:, 0].tolist() == [True] * 4 + [False]
    assert np.asarray(sums.counts).tolist() == [5, 0, 0, 0]
    assert int(sums.dropped) == int(sums.emptied) == 1
    np.testing.assert_allclose(balance(sums), 1.90147, atol=1e-5)


def test_capacity_above_the_number_of_tokens_drops_nothing():
    for order in ("token", "choice", "score", "batch_priority"):
        router = Router(TokenChoice(2), Dropping(Capacity(4.0), order))
        choice = router.decide(jnp.asarray([[1.0, 0.0], [0.0, 1.0]]))
        assert np.asarray(choice.kept).all()


def test_a_token_dropped_everywhere_comes_out_as_zero():
    params, rows = random_params(0), random_rows(0, 9)
    params["router"] = np.zeros_like(params["router"])  # all choose experts 0 and 1
    router = Router(TokenChoice(2), Dropping(Capacity(2, "fixed")))
    (_, (out, routed)), (gradients, row_gradient) = dense_pass(router, params, rows)
    assert int(routed.sums.emptied) == 7
    assert (np.asarray(out)[2:] == 0.0).all()
    assert (np.asarray(row_gradient)[2:] == 0.0).all()
    assert np.isfinite(gradients["router"]).all()


def test_a_gate_that_underflows_to_zero_is_still_dispatched():
    logits = jnp.array([[0.0, -200.0, -300.0]], jnp.float32)
    rule = TokenChoice(2)
    choice = rule.decide(logits)
    assert float(rule.weights(logits, choice)[0, 1]) == 0.0
    assert np.asarray(choice.kept).all()
    assert np.asarray(router_sums(logits, choice, rule).counts).tolist() == [1, 1, 0]


def test_groups_are_served_by_themselves():
    logits = jnp.tile(jnp.array([1.0, 0.0]), (8, 1))
    router = Router(TokenChoice(1), Dropping(Capacity(1, "fixed")), num_groups=4)
    kept = np.asarray(router.decide(logits).kept)[:, 0]
    assert kept.tolist() == [True, False] * 4
    limits = router.decide(logits, capacity=jnp.array([0, 1, 2, 3]))
    assert np.asarray(limits.kept).reshape(4, 2).sum(axis=1).tolist() == [0, 1, 2, 2]


def test_padding_takes_no_place():
    logits = jnp.tile(jnp.array([1.0, 0.0]), (4, 1))
    router = Router(TokenChoice(1), Dropping(Capacity(1.0)))
    valid = jnp.array([False, True, False, True])
    choice = router.decide(logits, valid=valid, capacity=1)
    assert np.asarray(choice.kept)[:, 0].tolist() == [False, True, False, False]
    sums = router_sums(logits, choice, router.rule, valid=valid)
    assert (int(sums.dropped), int(sums.tokens)) == (1, 2)
    with pytest.raises(ConfigError, match="how many tokens are real"):
        router.decide(logits, valid=valid)


def test_tokens_that_do_not_fill_groups_are_refused():
    router = Router(TokenChoice(1), num_groups=3)
    with pytest.raises(ConfigError, match="cannot split tokens into groups"):
        router.decide(jnp.zeros((4, 2)))


def test_a_capacity_without_a_drop_order_is_refused():
    with pytest.raises(ConfigError, match="router drops nothing"):
        Router(TokenChoice(1)).decide(jnp.zeros((4, 2)), capacity=1)


def test_expert_choice_fills_every_expert_in_every_group():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((12, 4)))
    router = Router(ExpertChoice(), Dropping(Capacity(2.0)), num_groups=2)
    kept = np.asarray(router.decide(logits).kept).reshape(2, 6, 4)
    assert (kept.sum(axis=1) == 3).all()  # ceil(6 / 4 * 2)
