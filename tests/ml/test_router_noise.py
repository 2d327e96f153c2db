"""Noise is replayable, the same in any shard, and seen by the router only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ml.moe_cases import random_params, random_rows
from timelyml.ml.moe import (
    Noise,
    Router,
    TokenChoice,
    jittered,
    moe_dense,
    thinned,
    with_gaussian,
)

TOP_2 = Router(TokenChoice(2))


def noise_of(positions, seed=0, **amounts):
    return Noise(jax.random.key(seed), jnp.asarray(positions, jnp.int32), **amounts)


def test_jitter_stays_within_its_bounds_and_uses_them():
    rows = jnp.ones((64, 32))
    factors = np.asarray(jittered(rows, noise_of(range(64), jitter=0.01)))
    assert factors.min() >= 0.99
    assert factors.max() <= 1.01
    assert factors.max() - factors.min() > 0.019
    assert np.unique(factors, axis=0).shape[0] == 64


def test_experts_see_rows_without_jitter():
    params, rows = random_params(0), random_rows(0, 16)
    noise = noise_of(range(16), jitter=0.5)
    noisy, routed = moe_dense(params, rows, TOP_2, noise=noise)
    plain = TOP_2(params, rows)
    assert (np.asarray(routed.weights) != np.asarray(plain.weights)).any()
    # The same choice and weights without noise in the layer: the same output.
    picked = np.zeros((16, 6), np.float32)
    for token in range(16):
        for pick in range(2):
            expert = int(routed.choice.chosen[token, pick])
            one = jax.tree.map(lambda leaf, e=expert: leaf[e], params["experts"])
            hidden = rows[token] @ one["gate_up"]
            gate, up = np.split(hidden, 2)
            value = (gate / (1 + np.exp(-gate)) * up) @ one["down"]
            picked[token] += np.asarray(routed.weights)[token, pick] * value
    np.testing.assert_allclose(noisy, picked, rtol=1e-4, atol=1e-5)


def test_a_token_gets_the_same_noise_in_any_shard_and_microbatch():
    params, rows = random_params(1), random_rows(1, 12)
    amounts = {"jitter": 0.3, "gaussian": 2.0}
    whole = TOP_2(params, rows, noise=noise_of(range(12), **amounts))
    for start, stop in [(0, 5), (5, 12)]:
        part = TOP_2(
            params, rows[start:stop], noise=noise_of(range(start, stop), **amounts)
        )
        expected = np.asarray(whole.weights)[start:stop]
        np.testing.assert_allclose(part.weights, expected, atol=1e-6)
        chosen = np.asarray(whole.choice.chosen)[start:stop]
        assert (np.asarray(part.choice.chosen) == chosen).all()


def test_the_same_key_replays_and_another_does_not():
    rows = random_rows(2, 8)
    draws = [
        np.asarray(jittered(jnp.asarray(rows), noise_of(range(8), seed, jitter=0.1)))
        for seed in (3, 3, 4)
    ]
    assert (draws[0] == draws[1]).all()
    assert (draws[0] != draws[2]).any()


def test_no_amount_of_noise_is_no_noise():
    params, rows = random_params(3), random_rows(3, 8)
    silent = TOP_2(params, rows, noise=noise_of(range(8)))
    plain = TOP_2(params, rows)
    assert (np.asarray(silent.weights) == np.asarray(plain.weights)).all()


def test_gaussian_noise_is_divided_by_the_experts():
    logits = jnp.zeros((4096, 4))
    noisy = np.asarray(with_gaussian(logits, noise_of(range(4096), gaussian=2.0)))
    assert abs(noisy.std() - 0.5) < 0.02  # 16,384 deviates: 1 in 180
    assert abs(noisy.mean()) < 0.02


def test_later_choices_are_kept_with_twice_their_weight():
    tokens = 4096
    choice = TokenChoice(2).decide(jnp.tile(jnp.array([1.0, 0.0]), (tokens, 1)))
    weights = jnp.tile(jnp.array([0.8, 0.2]), (tokens, 1))
    kept = np.asarray(thinned(choice, weights, noise_of(range(tokens))).kept)
    assert kept[:, 0].all()
    assert abs(kept[:, 1].mean() - 0.4) < 0.04
    certain = thinned(choice, jnp.full((tokens, 2), 0.5), noise_of(range(tokens)))
    assert np.asarray(certain.kept).all()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_thinned_choices_are_counted_and_keep_their_weights(num_groups):
    params, rows = random_params(4), random_rows(4, 32)
    router = Router(TokenChoice(2), num_groups=num_groups, thins=True)
    routed = router(params, rows, noise=noise_of(range(32)))
    kept = np.asarray(routed.choice.kept)
    assert int(routed.sums.dropped) == (~kept).sum() > 0
    assert int(routed.sums.counts.sum()) == 64
    plain = TOP_2(params, rows)
    expected = np.where(kept, plain.weights, 0)
    np.testing.assert_allclose(routed.weights, expected, atol=1e-6)
    silent = router(params, rows)
    assert int(silent.sums.dropped) == 0


def test_gradients_flow_through_jitter_to_router_and_rows():
    params, rows = random_params(5), random_rows(5, 6)
    noise = noise_of(range(6), jitter=0.2)
    choice = TOP_2(params, rows, noise=noise).choice

    def loss(router, rows):
        own = TOP_2({"router": router}, rows, noise=noise, replay=choice)
        return jnp.sum(own.weights[:, 0] ** 2)

    gradient = jax.grad(loss)(params["router"], rows)
    step = 1e-2
    nudge = np.zeros_like(params["router"])
    nudge[1, 2] = step
    quotient = (
        loss(params["router"] + nudge, rows) - loss(params["router"] - nudge, rows)
    ) / (2 * step)
    np.testing.assert_allclose(gradient[1, 2], quotient, atol=1e-3)
