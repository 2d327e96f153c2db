"""Router rules: which experts a token visits, and with what weights.

A rule is a value without arrays, so it can be a static argument of `jit`. It turns
logits into a `Choice`, which is all that a backward pass needs to replay the routing,
and a choice into weights, through which the gradient flows to the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from timelyml.errors import ConfigError
from timelyml.ml.choice import among_best, at_least_float32, choose, routing_weights

Score = Literal["softmax", "sigmoid"]

_SIGMOID_EPSILON = 1e-20
"""Added to the sum of sigmoid scores, as DeepSeek-V3 and Megatron do."""


class Choice(NamedTuple):
    """What the router decided; stored, and replayed whenever weights are recomputed.

    Without a gradient. Losses count what was asked for, dispatch sends what was
    kept, and neither looks at weights: one that underflows to 0 is still sent.
    """

    chosen: jax.Array
    """`(tokens, top_k) int32`: experts, best first."""
    asked: jax.Array
    """`(tokens, top_k) bool`: pairs that the rule chose; not those of padding."""
    kept: jax.Array
    """`(tokens, top_k) bool`: pairs that are sent; those asked for minus dropped."""


class Rule(Protocol):
    """How logits become a choice and weights."""

    @property
    def weighs_input(self) -> bool:
        """Whether weights scale what experts read instead of what they give."""
        ...

    def decide(
        self,
        logits: jax.Array,
        *,
        bias: jax.Array | None = None,
        valid: jax.Array | None = None,
        capacity: jax.Array | int | None = None,
    ) -> Choice:
        """Choose for every token of a group."""
        ...

    def chosen_scores(self, logits: jax.Array, choice: Choice) -> jax.Array:
        """Give `(tokens, top_k)` scores of the chosen, by which drops may rank."""
        ...

    def weights(
        self, logits: jax.Array, choice: Choice, *, over_survivors: bool = False
    ) -> jax.Array:
        """Weigh a stored choice, `(tokens, top_k)`; zero where it was not kept."""
        ...

    def probabilities(self, logits: jax.Array) -> jax.Array:
        """Give `(tokens, experts)` shares of each token, for load-balance losses."""
        ...


@dataclass(frozen=True, slots=True)
class Groups:
    """Experts may come only from the best groups of equal, contiguous size.

    Attributes:
        num_groups: Divides the number of experts.
        num_kept: How many groups a token may use.
        num_summed: How many of a group's best scores make the score of the group:
            2 in DeepSeek-V3, `top_k // num_kept` in Megatron.
    """

    num_groups: int
    num_kept: int
    num_summed: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.num_kept <= self.num_groups or self.num_summed < 1:
            raise ConfigError(
                f"groups of experts cannot be kept; got {self!r}; expected num_kept "
                "between 1 and num_groups, and num_summed of 1 or more; correct them",
                option="groups",
            )

    def allowed(self, scores: jax.Array) -> jax.Array:
        """Mark the experts of the kept groups, `(tokens, experts) bool`."""
        tokens, num_experts = scores.shape
        size = num_experts // self.num_groups
        grouped = scores.reshape(tokens, self.num_groups, size)
        best = choose(grouped, min(self.num_summed, size))
        sums = jnp.sum(jnp.take_along_axis(grouped, best, axis=-1), axis=-1)
        kept = choose(sums, self.num_kept)  # (tokens, num_kept)
        groups = jnp.arange(self.num_groups)
        is_kept = jnp.any(kept[:, :, None] == groups, axis=1)  # (tokens, num_groups)
        return jnp.repeat(is_kept, size, axis=1, total_repeat_length=num_experts)


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Every token chooses its `top_k` best experts.

    Attributes:
        top_k: Experts per token.
        score: What weights are made of.
        renormalise: Make the weights of a token sum to `scale`. For softmax this
            is the softmax over the chosen logits, so softmax-then-top-k and
            top-k-then-softmax are one rule. With `top_k` 1 it makes every weight
            `scale` and leaves the router without a gradient.
        scale: Factor on all weights.
        groups: Limits the choice; no limit by default.
        weighs_input: Scale what experts read by the weights, and sum what they give
            unweighted.
    """

    top_k: int
    score: Score = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: Groups | None = None
    weighs_input: bool = False

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.score not in ("softmax", "sigmoid"):
            raise ConfigError(
                f"router rule cannot work; got top_k {self.top_k!r} and score "
                f"{self.score!r}; expected 1 or more, and 'softmax' or 'sigmoid'; "
                "correct the rule",
                option="rule",
            )

    def decide(
        self,
        logits: jax.Array,
        *,
        bias: jax.Array | None = None,
        valid: jax.Array | None = None,
        capacity: jax.Array | int | None = None,  # noqa: ARG002  drops come later
    ) -> Choice:
        """Choose on logits, or on scores plus bias; see `Rule`.

        Logits and scores order experts alike, but scores round ties into being, so
        they are used only where they must be added to something.

        Args:
            logits: `(tokens, experts)`.
            bias: `(experts,)`, added to the scores for the choice only.
            valid: `(tokens,) bool`; False for padding, which asks for nothing.
            capacity: Not used: a token may always ask.
        """
        self._check(logits.shape[1])
        base = at_least_float32(jax.lax.stop_gradient(logits))
        scores = self._scores(base)
        if bias is not None:
            base = scores = scores + jax.lax.stop_gradient(bias)
        allowed = None if self.groups is None else self.groups.allowed(scores)
        chosen = choose(base, self.top_k, allowed=allowed)
        asked = jnp.ones(chosen.shape, bool)
        if valid is not None:
            asked = asked & valid[:, None]
        return Choice(chosen, asked, asked)

    def chosen_scores(self, logits: jax.Array, choice: Choice) -> jax.Array:
        """Give the chosen experts' scores, neither renormalised nor scaled."""
        if self.score == "softmax":
            return routing_weights(logits, choice.chosen, renormalise=False)
        scores = self._scores(at_least_float32(logits))
        return jnp.take_along_axis(scores, choice.chosen, axis=-1)

    def weights(
        self, logits: jax.Array, choice: Choice, *, over_survivors: bool = False
    ) -> jax.Array:
        """Weigh a stored choice; see `Rule`.

        Args:
            logits: `(tokens, experts)`; the gradient flows to them.
            choice: From `decide`, as stored.
            over_survivors: If the rule renormalises: over the pairs that were kept
                and not over all that were asked for.
        """
        summed = choice.kept if over_survivors else choice.asked
        if not self.renormalise:
            weights = self.chosen_scores(logits, choice)
        elif self.score == "softmax":
            weights = _softmax_where(at_least_float32(logits), choice.chosen, summed)
        else:
            picked = self.chosen_scores(logits, choice)
            total = jnp.sum(jnp.where(summed, picked, 0), axis=-1, keepdims=True)
            weights = picked / (total + _SIGMOID_EPSILON)
        return jnp.where(choice.kept, weights * self.scale, 0)

    def probabilities(self, logits: jax.Array) -> jax.Array:
        """Give softmax probabilities, or sigmoid scores divided by their sum."""
        scores = self._scores(at_least_float32(logits))
        if self.score == "softmax":
            return scores
        return scores / (jnp.sum(scores, axis=-1, keepdims=True) + _SIGMOID_EPSILON)

    def _scores(self, logits: jax.Array) -> jax.Array:
        if self.score == "softmax":
            return jax.nn.softmax(logits, axis=-1)
        return jax.nn.sigmoid(logits)

    def _check(self, num_experts: int) -> None:
        reachable = num_experts
        if self.groups is not None:
            size, rest = divmod(num_experts, self.groups.num_groups)
            reachable = 0 if rest else size * self.groups.num_kept
        if self.top_k > reachable:
            raise ConfigError(
                f"router rule does not fit {num_experts} experts; got {self!r}; "
                "expected groups of equal size, and at most as many choices as a "
                "token can reach; correct the rule",
                option="rule",
            )


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """Every expert chooses the tokens of a group that score it highest.

    A token may be chosen by any number of experts, also by none: its choices are
    all experts in order, and `asked` says which took it. Who is chosen depends on
    the whole group, so causal models leak the future through it.

    Source:
        Zhou et al. 2022. Weights are softmax probabilities, not renormalised.
    """

    weighs_input: bool = False

    def decide(
        self,
        logits: jax.Array,
        *,
        bias: jax.Array | None = None,
        valid: jax.Array | None = None,
        capacity: jax.Array | int | None = None,
    ) -> Choice:
        """Let experts choose; see `Rule`.

        Args:
            logits: `(tokens, experts)`.
            bias: `(tokens,)` has no meaning here; None.
            valid: `(tokens,) bool`; padding is never chosen.
            capacity: Tokens per expert.
        """
        if capacity is None or bias is not None:
            raise ConfigError(
                f"expert choice fills experts to a capacity; got capacity {capacity!r} "
                f"and {'a' if bias is not None else 'no'} bias; expected a capacity "
                "and no bias; give the layer a capacity",
                option="capacity",
            )
        tokens, num_experts = logits.shape
        # Log probabilities do not underflow into ties.
        scores = jax.nn.log_softmax(at_least_float32(logits), axis=-1).T
        allowed = None if valid is None else jnp.broadcast_to(valid, scores.shape)
        taken = among_best(scores, capacity, allowed=allowed).T  # (tokens, experts)
        experts = jnp.arange(num_experts, dtype=jnp.int32)
        return Choice(jnp.broadcast_to(experts, (tokens, num_experts)), taken, taken)

    def chosen_scores(self, logits: jax.Array, choice: Choice) -> jax.Array:
        """Give the softmax probabilities of all experts."""
        return routing_weights(logits, choice.chosen, renormalise=False)

    def weights(
        self,
        logits: jax.Array,
        choice: Choice,
        *,
        over_survivors: bool = False,  # noqa: ARG002  nothing is renormalised
    ) -> jax.Array:
        """Weigh a stored choice by probabilities; see `Rule`."""
        return jnp.where(choice.kept, self.chosen_scores(logits, choice), 0)

    def probabilities(self, logits: jax.Array) -> jax.Array:
        """Give softmax probabilities."""
        return jax.nn.softmax(at_least_float32(logits), axis=-1)


def _softmax_where(logits: jax.Array, chosen: jax.Array, where: jax.Array) -> jax.Array:
    """Give the softmax over some of the chosen logits of each token.

    Equal to probabilities divided by their sum, but survives the underflow of all
    of them. A token without any gets zeros, and a gradient of zero.
    """
    picked = jnp.take_along_axis(logits, chosen, axis=-1)
    has_any = jnp.any(where, axis=-1, keepdims=True)
    within = jnp.where(where | ~has_any, picked, -jnp.inf)
    return jnp.where(where, jax.nn.softmax(within, axis=-1), 0)
