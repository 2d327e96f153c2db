"""Adam on parameters that live with a shard, and sums that keep their order."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optree

from examples.moe_routing import model
from examples.moe_routing.config import Settings
from timelyml import Shard
from timelyml.ml.compiled import Compiled, compiled


def as_numpy(tree: Any) -> Any:
    """Give the arrays of a pytree as numpy, without a copy."""
    return optree.tree_map(np.asarray, tree)


@dataclass(frozen=True, slots=True)
class Update:
    """Adam on one set of parameters, whose state lives with the shard."""

    settings: Settings
    by_sum: Compiled
    by_nothing: Compiled

    @classmethod
    def of(cls, settings: Settings) -> Update:
        """Compile the updates that these settings ask for."""
        return cls(
            settings,
            compiled(functools.partial(apply_sum, settings), donate=(0, 1)),
            compiled(functools.partial(apply_nothing, settings), donate=(0, 1)),
        )

    def fresh(self, params: Any) -> dict[str, Any]:
        """Give the state of a shard before the first step."""
        params = jax.tree.map(jnp.asarray, params)
        adam = model.optimiser(self.settings).init(params)
        return {"params": params, "adam": adam, "version": 0}

    def start(self, shard: Shard, params: Any) -> None:
        """Put the first state of a shard in place, unless a snapshot did."""
        if "params" not in shard.state:
            shard.state.update(self.fresh(params))

    def __call__(self, state: dict[str, Any], stacked: Any) -> None:
        """Take over gradients of one step, stacked by producer shard."""
        state["params"], state["adam"] = self.by_sum(
            state["params"], state["adam"], stacked
        )
        state["version"] += 1

    def catch_up(self, state: dict[str, Any], version: int) -> None:
        """Apply the zero gradients of steps at which nothing was computed."""
        while state["version"] < version:
            state["params"], state["adam"] = self.by_nothing(
                state["params"], state["adam"]
            )
            state["version"] += 1


def apply_gradients(
    settings: Settings, params: Any, adam: Any, gradients: Any
) -> tuple[Any, Any]:
    """Give the next weights and optimiser state."""
    updates, adam = model.optimiser(settings).update(gradients, adam, params)
    return optax.apply_updates(params, updates), adam


def apply_sum(
    settings: Settings, params: Any, adam: Any, stacked: Any
) -> tuple[Any, Any]:
    """Give the next weights and optimiser state from stacked gradients."""
    gradients = jax.tree.map(sum_in_order, stacked)
    return apply_gradients(settings, params, adam, gradients)


def apply_nothing(settings: Settings, params: Any, adam: Any) -> tuple[Any, Any]:
    """Give the weights and optimiser state after a step without gradients."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return apply_gradients(settings, params, adam, zeros)


def sum_in_order(stacked: jax.Array) -> jax.Array:
    """Sum over the leading axis, one after the other: XLA may not reorder that."""
    total = stacked[0]
    for index in range(1, stacked.shape[0]):
        total = total + stacked[index]
    return total
