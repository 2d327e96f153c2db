"""What a router's losses are made of: sums that add up over shards and microbatches.

A loss is a ratio of sums over the whole batch. The mean of per-shard losses is
another number, so each shard gives `RouterSums`, these are added, and the losses
divide once. A shard's own share of a loss, which it differentiates, comes from
`share_of`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from timelyml.ml.choice import at_least_float32, balance_loss, count_choices
from timelyml.ml.moe.rules import Choice, Rule


class RouterSums(NamedTuple):
    """Sums over tokens of one layer; padding has no part in them.

    Counts are of choices before any is dropped. Counts of a recomputation equal
    those of the first pass, since it replays the choice; add them once.
    """

    counts: jax.Array
    """`(experts,) int32`: all choices of each expert."""
    first_counts: jax.Array
    """`(experts,) int32`: first choices only."""
    probabilities: jax.Array
    """`(experts,)`: the router's probabilities; carries the gradient of balance."""
    squares: jax.Array
    """`()`: `logsumexp(logits) ** 2`; carries the gradient of the z-loss."""
    tokens: jax.Array
    """`() int32`."""
    dropped: jax.Array
    """`() int32`: choices that were not sent."""
    emptied: jax.Array
    """`() int32`: tokens with choices of which none was sent."""


def router_sums(
    logits: jax.Array, choice: Choice, rule: Rule, *, valid: jax.Array | None = None
) -> RouterSums:
    """Sum up what one shard's tokens contribute to the losses of a layer.

    Args:
        logits: `(tokens, experts)`; the gradient flows to them.
        choice: Of these tokens, as stored.
        rule: That made it.
        valid: `(tokens,) bool`; False for padding. All by default.
    """
    num_experts = logits.shape[1]
    raw = at_least_float32(logits)
    mask = jnp.ones(raw.shape[0], bool) if valid is None else valid
    # Before and after: padding may hold NaN, and 0 * NaN would reach the gradient.
    clean = jnp.where(mask[:, None], raw, 0)
    probabilities = jnp.where(mask[:, None], rule.probabilities(clean), 0)
    squares = jnp.where(mask, jax.nn.logsumexp(clean, axis=-1) ** 2, 0)
    dropped = choice.asked & ~choice.kept
    emptied = jnp.any(choice.asked, axis=1) & ~jnp.any(choice.kept, axis=1)
    return RouterSums(
        counts=count_choices(choice.chosen, num_experts, where=choice.asked),
        first_counts=count_choices(
            choice.chosen[:, :1], num_experts, where=choice.asked[:, :1]
        ),
        probabilities=jnp.sum(probabilities, axis=0),
        squares=jnp.sum(squares),
        tokens=jnp.sum(mask, dtype=jnp.int32),
        dropped=jnp.sum(dropped, dtype=jnp.int32),
        emptied=jnp.sum(emptied, dtype=jnp.int32),
    )


def grouped_sums(
    logits: jax.Array,
    choice: Choice,
    rule: Rule,
    *,
    num_groups: int,
    valid: jax.Array | None = None,
) -> RouterSums:
    """Give the sums of each group by itself, along a leading axis `(groups, ...)`.

    For a balance per sequence, as flaxformer and transformers' Switch have it: the
    mean of `balance` over groups. A group must be whole in its shard.
    """

    def split(array: jax.Array) -> jax.Array:
        return array.reshape(num_groups, -1, *array.shape[1:])

    mask = jnp.ones(logits.shape[0], bool) if valid is None else valid
    return jax.vmap(
        lambda part, chosen, ok: router_sums(part, Choice(*chosen), rule, valid=ok)
    )(split(logits), tuple(split(leaf) for leaf in choice), split(mask))


def add_sums(first: RouterSums, *others: RouterSums) -> RouterSums:
    """Add sums of shards or microbatches, in the order given.

    Added over layers, the losses are those of the pooled layers, as transformers
    has it; the mean of per-layer losses is another number.
    """
    total = first
    for other in others:
        total = RouterSums(*(a + b for a, b in zip(total, other, strict=True)))
    return total


def share_of(own: RouterSums, whole: RouterSums) -> RouterSums:
    """Prepare a shard's share of every loss; shares of all shards add up to it.

    Counts and tokens are those of the whole batch and carry no gradient; what is
    differentiated is the shard's own.
    """
    return whole._replace(probabilities=own.probabilities, squares=own.squares)


def balance(
    sums: RouterSums,
    *,
    counted: Literal["all", "first"] = "all",
    divided_by: int = 1,
) -> jax.Array:
    """Give the load-balance loss of one layer, `experts * sum(f * P)`.

    Args:
        sums: Of the whole batch, or from `share_of`.
        counted: Which choices make f: all (transformers, Megatron, MaxText), or
            first ones only (GShard, Tutel).
        divided_by: `top_k` makes a balanced layer 1 (Megatron, MegaBlocks,
            DeepSpeed); 1 leaves it at `top_k` (transformers, MaxText, flaxformer).
    """
    counts = sums.counts if counted == "all" else sums.first_counts
    return balance_loss(counts, sums.probabilities, sums.tokens) / divided_by


def z_loss(sums: RouterSums) -> jax.Array:
    """Give the mean of `logsumexp(logits) ** 2`, which keeps logits small.

    Source:
        ST-MoE; used with a coefficient of 1e-3.
    """
    return sums.squares / jnp.maximum(sums.tokens, 1)


def updated_bias(bias: jax.Array, counts: jax.Array, rate: float) -> jax.Array:
    """Move the selection bias towards balance, once per step of the optimiser.

    Args:
        bias: `(experts,)`; state like a weight: it belongs in checkpoints.
        counts: `(experts,) int32` of the whole batch: all shards, all microbatches.
        rate: How far each expert's bias moves.

    Source:
        DeepSeek-V3: `bias + rate * sign(mean(counts) - counts)`. The sign is taken
        in integers, so no rounding of the mean turns a balanced expert away.
    """
    counts = counts.astype(jnp.int32)
    whole, rest = jnp.divmod(jnp.sum(counts), counts.shape[0])
    at_floor = jnp.where(rest > 0, 1, 0)
    sign = jnp.where(counts > whole, -1, jnp.where(counts < whole, 1, at_floor))
    return bias + jnp.asarray(rate, bias.dtype) * sign.astype(bias.dtype)
