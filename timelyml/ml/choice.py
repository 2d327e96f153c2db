"""The one choice of experts: top-k over router logits, and the weights it implies.

Every side of the wire that chooses experts calls `choose`, because frameworks differ
on ties, NaN and -0.0, and a token must not be sent by one rule and counted by
another. Pure JAX, deterministic.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

_TAKEN = -(2**31)
_BARRED = -(2**31) + 1
_NAN = -(2**31) + 2

_LARGEST_SCAN = 32
"""Above this a sort compiles to less than one pass per choice.

It does not run faster: over 64 experts for 4,096 tokens XLA's sort on a CPU takes
40 ms, a pass 0.23.
"""


def at_least_float32(values: jax.Array) -> jax.Array:
    """Cast up to float32; float64 stays, and bfloat16 makes 1 token in 130 stray."""
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def _sortable(logits: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """Map float32 to int32 keys of the same order; NaN lowest, -0.0 equal to 0.0.

    What is not allowed ranks below NaN.
    """
    scores = jax.lax.stop_gradient(logits).astype(jnp.float32)
    canonical = jnp.where(scores == 0, jnp.float32(0), scores)
    bits = jax.lax.bitcast_convert_type(canonical, jnp.int32)
    key = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    key = jnp.where(jnp.isnan(scores), jnp.int32(_NAN), key)
    return key if allowed is None else jnp.where(allowed, key, jnp.int32(_BARRED))


def ranked(logits: jax.Array, *, allowed: jax.Array | None = None) -> jax.Array:
    """Order the last axis, best first, by the rule of `choose`.

    Returns:
        Indices of the same shape, int32, without a gradient.

    >>> ranked(jnp.array([0.0, jnp.nan, 2.0, -0.0, -jnp.inf])).tolist()
    [2, 0, 3, 4, 1]
    """
    # ~key reverses the order of key and cannot overflow; a stable sort keeps ties.
    descending = ~_sortable(logits, allowed)
    return jnp.argsort(descending, axis=-1, stable=True).astype(jnp.int32)


def choose(
    logits: jax.Array, top_k: int, *, allowed: jax.Array | None = None
) -> jax.Array:
    """Choose the `top_k` experts of each token, best first.

    Equal logits go to the lowest index, -0.0 equals 0.0, and NaN ranks below
    -inf. The choice is made on logits in float32: probabilities round ties into
    being.

    Args:
        logits: `(..., experts)`, compared in float32.
        top_k: How many experts, between 1 and `experts`.
        allowed: `(..., experts) bool`; others are taken only when none is left,
            after NaN and -inf. At least `top_k` of each token should be allowed.

    Returns:
        `(..., top_k) int32`, without a gradient.
    """
    num_experts = logits.shape[-1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"choose: top_k out of range; got {top_k!r}; expected 1 to {num_experts}; "
            "a token cannot visit more experts than there are"
        )
    if top_k > _LARGEST_SCAN:
        return ranked(logits, allowed=allowed)[..., :top_k]
    keys = _sortable(logits, allowed)
    columns = jnp.arange(num_experts, dtype=jnp.int32)
    chosen = []
    for _ in range(top_k):
        best = jnp.argmax(keys, axis=-1).astype(jnp.int32)
        chosen.append(best)
        keys = jnp.where(columns == best[..., None], jnp.int32(_TAKEN), keys)
    return jnp.stack(chosen, axis=-1)


def among_best(
    scores: jax.Array, count: jax.Array | int, *, allowed: jax.Array | None = None
) -> jax.Array:
    """Mark the `count` best of the last axis, by the rule of `choose`.

    The cost does not depend on `count`: the last one to be taken is found bit by
    bit, in 4 ms for 64 experts and 4,096 tokens where a sort takes 40.

    Args:
        scores: `(..., n)`.
        count: May be traced; all are taken if it is above `n`.
        allowed: `(..., n) bool`; others are never marked.

    >>> among_best(jnp.array([1.0, 3.0, 1.0, jnp.nan]), 2).tolist()
    [True, True, False, False]
    """
    signed = _sortable(scores, allowed)
    keys = jax.lax.bitcast_convert_type(signed, jnp.uint32) ^ jnp.uint32(1 << 31)
    places = jnp.arange(keys.shape[-1], dtype=jnp.uint32)

    def count_of(marked: jax.Array) -> jax.Array:
        return jnp.sum(marked, axis=-1, keepdims=True, dtype=jnp.int32)

    least = _largest(lambda key: count_of(keys >= key) >= count, keys.shape[:-1])
    above, tied = keys > least, keys == least
    room = count - count_of(above)
    end = _largest(
        lambda place: count_of(tied & (places < place)) <= room, keys.shape[:-1]
    )
    taken: jax.Array = above | (tied & (places < end))
    return taken if allowed is None else jnp.logical_and(taken, allowed)


def _largest(
    holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]
) -> jax.Array:
    """Give the largest uint32 up to which a condition holds; 0 if nowhere."""

    def refine(index: int, found: jax.Array) -> jax.Array:
        raised = found | (jnp.uint32(1 << 31) >> jnp.uint32(index))
        return jnp.where(holds(raised), raised, found)

    start = jnp.zeros((*shape, 1), jnp.uint32)
    found: jax.Array = jax.lax.fori_loop(0, 32, refine, start)
    return found


def routing_weights(
    logits: jax.Array, chosen: jax.Array, *, renormalise: bool = True
) -> jax.Array:
    """Weigh the chosen experts by their softmax probabilities.

    Args:
        logits: `(tokens, experts)`, cast up to float32 at least.
        chosen: `(tokens, top_k)` from `choose`, replayed and not chosen again when
            a backward pass recomputes.
        renormalise: Make the weights of a token sum to 1. With one expert per
            token that makes every weight 1 and leaves the router without a
            gradient, so pass False there.

    Returns:
        `(tokens, top_k)`; the gradient flows to the logits.

    Source:
        Mixtral (renormalised), Switch Transformer (not).
    """
    probabilities = jax.nn.softmax(at_least_float32(logits), axis=-1)
    picked = jnp.take_along_axis(probabilities, chosen, axis=-1)
    if not renormalise:
        return picked
    return picked / jnp.sum(picked, axis=-1, keepdims=True)


def count_choices(
    chosen: jax.Array, num_experts: int, *, where: jax.Array | None = None
) -> jax.Array:
    """Count how many of the chosen pairs go to each expert, `(experts,) int32`.

    Args:
        chosen: `(tokens, top_k)`.
        num_experts: Number of experts.
        where: `(tokens, top_k) bool`; others are not counted.
    """
    columns = jnp.arange(num_experts, dtype=jnp.int32)
    hits = chosen.reshape(-1, 1) == columns  # (tokens * top_k, experts)
    if where is not None:
        hits = hits & where.reshape(-1, 1)
    return jnp.sum(hits, axis=0, dtype=jnp.int32)


def balance_loss(
    counts: jax.Array, probability_sums: jax.Array, num_tokens: jax.Array | int
) -> jax.Array:
    """Penalise routing that loads few experts: `experts * sum(f * P)`.

    Both arguments are sums over the whole batch, of all shards: the mean of
    per-shard losses is another number. Balanced routing gives `top_k`; without
    tokens the loss is 0. It is linear in `probability_sums`: a shard's own sums,
    with counts and tokens of the whole batch, give the shard's share of the loss.

    Args:
        counts: `(experts,)` choices of each expert; carries no gradient.
        probability_sums: `(experts,)` softmax probabilities summed over tokens.
        num_tokens: Tokens in the whole batch.

    Source:
        Switch Transformer, as Mixtral's reference code generalises it to top-k.
    """
    tokens = jnp.maximum(num_tokens, 1)
    fractions = jax.lax.stop_gradient(counts.astype(probability_sums.dtype)) / tokens
    means = probability_sums / tokens
    return counts.shape[0] * jnp.sum(fractions * means)
