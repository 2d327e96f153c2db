"""A mixture-of-experts layer on a dataflow, its experts spread over shards.

    route =sparse exchange=> experts =the same permutation back=> combine

Tokens are routed where they are. Rows go to the shards of the experts they chose, each
expert computes once per time on all its rows, and results come back to the tokens'
places. Everything is written in the vocabulary of differentiable dataflows, so the way
back is the same graph transposed: what `dense` computes in one program is what the
layer computes on any number of shards.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from timelyml.errors import ConfigError
from timelyml.graph import StreamRef
from timelyml.ml import sharded
from timelyml.ml.moe.dense import moe_dense
from timelyml.ml.moe.dispatch import combine
from timelyml.ml.moe.experts import ExpertFn, expert_forward, shared_forward
from timelyml.ml.moe.losses import RouterSums, balance, share_of, updated_bias, z_loss
from timelyml.ml.moe.noise import Noise
from timelyml.ml.moe.replicas import ExpertPlacement
from timelyml.ml.moe.router import Routed, Router
from timelyml.ml.moe.rules import Choice, TokenChoice


class Routing(NamedTuple):
    """What a layer gives beside its output: columns of each shard of tokens."""

    choice: Choice
    weights: Any
    """`(tokens, top_k)`."""
    sums: RouterSums
    """This shard's part of the losses."""


@dataclass(frozen=True, slots=True)
class MoE:
    """A mixture-of-experts layer; a value without arrays.

    Attributes:
        expert_fn: From an expert's parameters and rows `(rows, d_model)` to rows, row
            by row, finite on zeros.
        num_experts: How many there are.
        top_k: Experts per token, where no `router` says so.
        router: How tokens find experts; by default the `top_k` best, their softmax
            renormalised unless there is only one, none dropped.
        num_shards: Over how many shards experts are spread, each with an equal number;
            one each by default.
        replicas: On how many shards an expert stands, where it is more than one: its rows
            are dealt out to these, and its parameters stay equal there. See
            `replicas_by_load`.
        d_ff: Width of the experts that `init` draws.
        d_shared: Width of a shared expert that sees every token; 0: there is none.
        bias_rate: Balance without a loss: how far the selection bias of each expert
            moves at every step. None: there is no such bias.
        jitter: See `Noise`.
        gaussian: See `Noise`.
        seed: Of noise.
        smallest: Rows of the smallest bucket.
        keeps: Experts keep what the way back needs, instead of computing forward
            again; it takes the memory of what is inside them.
    """

    expert_fn: ExpertFn = expert_forward
    num_experts: int = 8
    top_k: int = 2
    router: Router | None = None
    num_shards: int | None = None
    replicas: Mapping[int, int] | tuple[tuple[int, int], ...] = ()
    d_ff: int | None = None
    d_shared: int = 0
    bias_rate: float | None = None
    jitter: float = 0.0
    gaussian: float = 0.0
    seed: int = 0
    smallest: int = 16
    keeps: bool = False

    def __post_init__(self) -> None:
        shards = self.spread
        if self.num_experts < 1 or shards < 1 or self.num_experts % shards:
            raise ConfigError(
                f"moe cannot spread its experts; got {self.num_experts} experts and "
                f"{shards} shards; expected the same number on each; change num_shards",
                option="num_shards",
            )
        placement = ExpertPlacement.of(self.num_experts, shards, self.replicas)
        object.__setattr__(self, "replicas", placement.replicas)  # to be hashed

    @property
    def spread(self) -> int:
        """Shards of experts."""
        return self.num_experts if self.num_shards is None else self.num_shards

    @property
    def placement(self) -> ExpertPlacement:
        """Where experts stand."""
        return ExpertPlacement.of(self.num_experts, self.spread, self.replicas)

    @property
    def routes(self) -> Router:
        """The router, given or by default."""
        if self.router is not None:
            return self.router
        return Router(TokenChoice(self.top_k, renormalise=self.top_k > 1))

    def init(self, key: Any, x: Any) -> dict[str, Any]:
        """Draw parameters: router, gated experts, perhaps a shared one and a bias.

        Args:
            key: As `jax.random.key` makes it.
            x: `(tokens, d_model)`, or anything of that shape.

        Raises:
            ConfigError: There is no `d_ff`, or experts of another kind.
        """
        if self.d_ff is None or self.expert_fn is not expert_forward:
            raise ConfigError(
                f"moe cannot draw its experts; got d_ff {self.d_ff!r} and "
                f"{self.expert_fn!r}; expected d_ff, and the gated expert; draw others "
                "yourself, stacked along a leading axis of experts",
                option="d_ff",
            )
        width = x.shape[-1]
        keys = jax.random.split(key, 3)
        params: dict[str, Any] = {
            "router": _normal(keys[0], (width, self.num_experts), width),
            "experts": _gated(keys[1], (self.num_experts,), width, self.d_ff),
        }
        if self.d_shared:
            params["shared"] = _gated(keys[2], (), width, self.d_shared)
        if self.bias_rate is not None:
            params["bias"] = np.zeros(self.num_experts, np.float32)
        return params

    def __call__(
        self,
        params: Mapping[str, Any],
        x: Any,
        *,
        valid: Any = None,
        step: Any = None,
        positions: Any = None,
        capacity: int | None = None,
    ) -> tuple[Any, Routing]:
        """Apply the layer inside a dataflow function.

        Args:
            params: Parameters of the shape of `init`'s; experts stacked.
            x: `(tokens, d_model)` column.
            valid: `(tokens,) bool` column; False for padding. With drops, give
                `capacity` too.
            step: `(1,)` integer column, for noise: another one draws other noise.
                Without it there is none.
            positions: `(tokens,)` integer column: of each token in the whole batch.
            capacity: Overrides that of the router.

        Returns:
            `(tokens, d_model)`, and what the router gave, for `losses` and reports.
        """
        if step is not None and positions is None:
            raise ConfigError(
                "moe cannot draw noise; got a step and no positions; expected both, "
                "so that a token's noise does not depend on its shard; pass positions",
                option="positions",
            )
        weights = {
            key: params[key] for key in ("router", "router_bias") if key in params
        }
        rows = _given(valid=valid, positions=positions)
        whole = _given(bias=params.get("bias"), step=step)
        decision, (gates, sums) = sharded.call(
            functools.partial(_route, self, capacity),
            weights,
            {"x": x, **rows},
            whole,
            name="route",
            decides=True,
            pad=(1,) if self._pads else False,
            masks=self._pads,
        )
        routing = Routing(decision["choice"], gates, sums)
        if self.bias_rate is not None:
            counts = sharded.total(sums.counts)
            moved = functools.partial(_moved_bias, self.bias_rate)
            fresh = sharded.call(moved, params["bias"], counts, name="bias")
            sharded.assign(params["bias"], fresh)
        placed = self._experts(params["experts"], x, decision, gates)
        gate = decision["choice"].kept if self.routes.rule.weighs_input else gates
        shared = (params["shared"],) if "shared" in params else ()
        out = sharded.call(
            _mix, placed, gate, x, *shared, name="combine", pad=self._pads
        )
        return out, routing

    @property
    def _pads(self) -> bool:
        """Whether rows are padded: not where their number or order means something."""
        return self.routes.num_groups == 1 and not self.routes.rule.weighs_input

    def _experts(self, experts: Any, x: Any, decision: Any, gates: Any) -> Any:
        """Send rows to experts and back; give `(tokens, top_k, d_model)`."""
        placement = self.placement
        to, tag, kept = decision["to"], decision["tag"], decision["choice"].kept
        rows = x
        if self.routes.rule.weighs_input:
            scaled = sharded.call(_scaled, x, gates, to, tag, kept, name="scale")
            rows, to, tag, kept = scaled
        sent = sharded.exchange(
            rows,
            to,
            num_shards=self.spread,
            where=kept,
            tag=tag if placement.per_shard > 1 or placement.replicas else None,
        )
        given = sharded.by_group(
            self.expert_fn,
            sharded.split(experts, copies=placement.copies),
            sent.rows,
            index=sent.tag,
            name="experts",
            smallest=self.smallest,
            keeps=self.keeps,
        )
        return sharded.give_back(given, sent)

    def losses(self, routing: Routing, *, balance: float = 0.0, z: float = 0.0) -> Any:
        """Give each shard's share of the router's losses, weighted and added.

        Args:
            routing: Of the layer.
            balance: Factor of the load-balance loss, `experts * sum(f * P)` over the
                whole batch, whose value is `top_k` when balanced.
            z: Factor of the mean of `logsumexp(logits) ** 2`.

        Returns:
            `(1,)`; shares add up to the loss of the whole batch.
        """
        whole = sharded.total(
            {key: getattr(routing.sums, key) for key in ("counts", "tokens")}
        )
        share = functools.partial(_share, balance, z)
        return sharded.call(share, routing.sums, whole, name="router loss")

    def on(
        self, stream: Any, params: Mapping[str, Any], *, name: str = "moe"
    ) -> StreamRef:
        """Apply the layer, as it is, to a stream of tokens `(tokens, d_model)`.

        Args:
            stream: Whose blocks are float32 arrays.
            params: Of `init`; experts are kept by the shards that they belong to.
            name: Prefix of the operators.
        """
        like = np.zeros((8, np.shape(params["router"])[0]), np.float32)
        build = sharded.flow(lambda held, x: self(held, x)[0], name=name)
        applied: StreamRef = build(params, sharded.rows(stream, like))
        return applied

    def dense(
        self, params: Mapping[str, Any], x: Any, **options: Any
    ) -> tuple[jax.Array, Routed]:
        """Apply the same layer in one program, every expert on every token.

        Args:
            params: Of `init`.
            x: `(tokens, d_model)` array.
            options: See `moe_dense`.
        """
        held = {key: value for key, value in params.items() if key != "bias"}
        return moe_dense(
            held,
            x,
            self.routes,
            expert_fn=self.expert_fn,
            bias=params.get("bias"),
            **options,
        )


def _normal(key: Any, shape: tuple[int, ...], width: int) -> Any:
    return np.asarray(jax.random.normal(key, shape) * width**-0.5)


def _gated(key: Any, leading: tuple[int, ...], width: int, d_ff: int) -> Any:
    first, second = jax.random.split(key)
    return {
        "gate_up": _normal(first, (*leading, width, 2 * d_ff), width),
        "down": _normal(second, (*leading, d_ff, width), d_ff),
    }


def _given(**columns: Any) -> dict[str, Any]:
    return {name: each for name, each in columns.items() if each is not None}


def _route(
    layer: MoE,
    capacity: Any,
    weights: Mapping[str, Any],
    rows: Mapping[str, jax.Array],
    whole: Mapping[str, jax.Array],
    *,
    decision: Any = None,
    is_row: jax.Array | None = None,
) -> tuple[Any, Any]:
    """Route one shard's tokens; `decision` is replayed."""
    noise, valid = None, rows.get("valid")
    if "step" in whole:
        key = jax.random.fold_in(jax.random.key(layer.seed), whole["step"][0])
        noise = Noise(key, rows["positions"], layer.jitter, layer.gaussian)
    if is_row is not None and valid is None:
        if capacity is None:
            capacity = layer.routes.capacity_among(is_row, layer.num_experts)
        valid = is_row
    elif is_row is not None and valid is not None:
        valid = valid & is_row
    routed = layer.routes(
        weights,
        rows["x"],
        bias=whole.get("bias"),
        valid=valid,
        capacity=capacity,
        noise=noise,
        replay=None if decision is None else decision["choice"],
    )
    if decision is None:
        to, tag = layer.placement.place(routed.choice.chosen, routed.choice.kept)
        decision = {"choice": routed.choice, "to": to, "tag": tag}
    return decision, (routed.weights, routed.sums)


def _mix(
    placed: jax.Array, gates: jax.Array, x: jax.Array, shared: Any = None
) -> jax.Array:
    """Weigh what experts gave, `(tokens, top_k, d_model)` or by slot, and sum.

    Gates are booleans where weights have scaled what experts read.
    """
    if gates.dtype == bool:
        gates = gates.astype(placed.dtype)
    by_choice = placed.reshape(*gates.shape, placed.shape[-1])
    output = combine(by_choice, gates)
    if shared is not None:
        output = output + shared_forward(shared, x)
    return output.astype(x.dtype)


def _scaled(
    x: jax.Array, gates: jax.Array, to: jax.Array, tag: jax.Array, kept: jax.Array
) -> tuple[jax.Array, ...]:
    """Give a row for each slot, scaled by its weight."""
    rows = x[:, None] * gates[:, :, None].astype(x.dtype)  # (tokens, top_k, d_model)
    flat = rows.reshape(-1, x.shape[-1])
    return flat, to.reshape(-1), tag.reshape(-1), kept.reshape(-1)


def _share(balance_by: float, z_by: float, own: RouterSums, whole: Any) -> jax.Array:
    sums = share_of(own, own._replace(**whole))
    return (balance_by * balance(sums) + z_by * z_loss(sums))[None]


def _moved_bias(rate: float, bias: jax.Array, counts: jax.Array) -> jax.Array:
    return updated_bias(bias, counts, rate)
