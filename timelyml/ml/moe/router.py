"""The router: logits, choice, drops and weights of a group of tokens, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from timelyml.errors import ConfigError
from timelyml.ml.choice import at_least_float32
from timelyml.ml.moe.drops import Dropping, drop_beyond
from timelyml.ml.moe.losses import RouterSums, router_sums
from timelyml.ml.moe.noise import Noise, jittered, thinned, with_gaussian
from timelyml.ml.moe.rules import Choice, ExpertChoice, Rule


class Routed(NamedTuple):
    """What the router gives for a block of tokens."""

    choice: Choice
    """To be stored, and passed back as `replay` when anything is recomputed."""
    weights: jax.Array
    """`(tokens, top_k)`, float32 or wider; zero where a pair is not kept."""
    sums: RouterSums
    """This block's part of the losses."""


@dataclass(frozen=True, slots=True)
class Router:
    """How tokens find experts; without arrays, so it may be static in `jit`.

    Attributes:
        rule: Which experts, with what weights.
        dropping: A limit on the tokens of an expert; by default none is dropped.
        num_groups: Tokens of a block fall into so many groups of equal size, one
            after the other; capacity holds within each. Expert choice too.
        thins: Drop later choices at random by their weight, if there is noise.
    """

    rule: Rule
    dropping: Dropping | None = None
    num_groups: int = 1
    thins: bool = False

    def __post_init__(self) -> None:
        needs_capacity = isinstance(self.rule, ExpertChoice)
        if self.num_groups < 1 or (
            needs_capacity and (self.dropping is None or self.thins)
        ):
            raise ConfigError(
                f"router cannot work; got {self!r}; expected 1 group or more, and with "
                "expert choice a Dropping and no thinning; correct the router",
                option="router",
            )

    def logits(
        self, params: Mapping[str, Any], rows: jax.Array, *, noise: Noise | None = None
    ) -> jax.Array:
        """Give `(tokens, experts)` logits, in float32 whatever the rows are.

        Args:
            params: `router` `(d_model, experts)`, and perhaps `router_bias`
                `(experts,)`, which is learnt; a selection bias is not one of them.
            rows: `(tokens, d_model)`, not changed by noise.
            noise: Drawn for this step.
        """
        seen = at_least_float32(rows)
        if noise is not None:
            seen = jittered(seen, noise)
        kernel = at_least_float32(jnp.asarray(params["router"]))
        logits = jnp.matmul(seen, kernel, precision=jax.lax.Precision.HIGHEST)
        if "router_bias" in params:
            logits = logits + params["router_bias"]
        return logits if noise is None else with_gaussian(logits, noise)

    def decide(
        self,
        logits: jax.Array,
        *,
        bias: jax.Array | None = None,
        valid: jax.Array | None = None,
        capacity: jax.Array | int | None = None,
        noise: Noise | None = None,
    ) -> Choice:
        """Choose, thin and drop, group by group; see `__call__` for arguments."""
        if self.dropping is None and capacity is not None:
            raise ConfigError(
                f"router drops nothing; got capacity {capacity!r}; expected none; give "
                "the router a Dropping, which says who is kept",
                option="capacity",
            )
        if capacity is None:
            capacity = self._capacity(logits, is_padded=valid is not None)
        mask = jnp.ones(logits.shape[0], bool) if valid is None else valid
        draws = None if noise is None or not self.thins else noise
        inputs = (logits, mask, None if draws is None else draws.positions)
        if self.num_groups == 1:
            return self._decide_group(inputs, capacity, bias, draws)
        self._check_groups(logits.shape[0])
        split = jax.tree.map(
            lambda leaf: leaf.reshape(self.num_groups, -1, *leaf.shape[1:]), inputs
        )
        limits = (
            None
            if capacity is None
            else jnp.broadcast_to(jnp.asarray(capacity), (self.num_groups,))
        )
        by_group = jax.vmap(
            lambda part, limit: self._decide_group(part, limit, bias, draws)
        )(split, limits)
        return Choice(*(leaf.reshape(-1, leaf.shape[2]) for leaf in by_group))

    def __call__(
        self,
        params: Mapping[str, Any],
        rows: jax.Array,
        *,
        bias: jax.Array | None = None,
        valid: jax.Array | None = None,
        capacity: jax.Array | int | None = None,
        noise: Noise | None = None,
        replay: Choice | None = None,
    ) -> Routed:
        """Route a block of tokens; weights and sums are differentiable.

        Args:
            params: See `logits`.
            rows: `(tokens, d_model)`; a whole number of groups.
            bias: `(experts,)`, added to scores for the choice only; no gradient.
            valid: `(tokens,) bool`; False for padding, which is not routed.
            capacity: By default from `dropping` and the tokens of a group. With
                padding it must be given, from the tokens that are real: one number,
                or one per group.
            noise: Drawn for this step, in training only.
            replay: A stored choice, which is taken as it is; nothing is chosen.
        """
        logits = self.logits(params, rows, noise=noise)
        choice = replay
        if choice is None:
            choice = self.decide(
                logits, bias=bias, valid=valid, capacity=capacity, noise=noise
            )
        return Routed(
            choice,
            self.weights(logits, choice),
            router_sums(logits, choice, self.rule, valid=valid),
        )

    def weights(self, logits: jax.Array, choice: Choice) -> jax.Array:
        """Weigh a stored choice, `(tokens, top_k)`; the gradient flows to logits."""
        over_survivors = self.dropping is not None and self.dropping.over_survivors
        return self.rule.weights(logits, choice, over_survivors=over_survivors)

    def _decide_group(
        self,
        inputs: tuple[jax.Array, jax.Array, jax.Array | None],
        capacity: jax.Array | int | None,
        bias: jax.Array | None,
        noise: Noise | None,
    ) -> Choice:
        logits, valid, positions = inputs
        logits = jax.lax.stop_gradient(logits)
        choice = self.rule.decide(logits, bias=bias, valid=valid, capacity=capacity)
        if noise is not None and positions is not None:
            weights = self.rule.weights(logits, choice)
            choice = thinned(choice, weights, noise._replace(positions=positions))
        if self.dropping is None or capacity is None:
            return choice
        scores = self.rule.chosen_scores(logits, choice)
        return drop_beyond(choice, capacity, self.dropping.order, scores)

    def capacity_among(self, is_row: jax.Array, num_experts: int) -> jax.Array | None:
        """Give the capacity of a group of rows that was padded; None: no one is limited.

        Args:
            is_row: `(rows,) bool`; False for padding.
            num_experts: Number of experts.
        """
        if self.dropping is None:
            return None
        by_count = [
            self.dropping.capacity.of(
                count, num_experts=num_experts, top_k=getattr(self.rule, "top_k", 1)
            )
            for count in range(len(is_row) + 1)
        ]
        if None in by_count:
            return jnp.array(len(is_row), jnp.int32)  # which nobody reaches
        capacity: jax.Array = jnp.array(by_count, jnp.int32)[jnp.sum(is_row)]
        return capacity

    def _check_groups(self, num_tokens: int) -> None:
        if num_tokens % self.num_groups:
            raise ConfigError(
                f"router cannot split tokens into groups; got {num_tokens} tokens and "
                f"{self.num_groups} groups; expected groups of equal size; pad the "
                "block and mark padding by valid",
                option="num_groups",
            )

    def _capacity(self, logits: jax.Array, *, is_padded: bool) -> int | None:
        if self.dropping is None:
            return None
        if is_padded:
            raise ConfigError(
                "router does not know how many tokens are real; got padding and no "
                "capacity; expected capacity from the real tokens of each group; pass "
                "router.dropping.capacity.of(...)",
                option="capacity",
            )
        tokens, num_experts = logits.shape
        return self.dropping.capacity.of(
            tokens // self.num_groups,
            num_experts=num_experts,
            top_k=getattr(self.rule, "top_k", 1),
        )
