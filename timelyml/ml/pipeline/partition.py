"""Layers joined into stages: balanced by what they cost, or as the user says.

A pipeline is as fast as its slowest stage, so the largest cost of a stage is made as
small as it can be; among cuts that are equally good in that, the most even one is taken.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from timelyml.errors import ConfigError
from timelyml.ml.client.slices import Slice
from timelyml.ml.functions import jit, type_of
from timelyml.ml.functions.blame import name_of
from timelyml.ml.functions.costs import flops_of
from timelyml.ml.functions.types import abstract_array

Layer = Callable[[Any, Any], Any]
"""`layer(params, x) -> y`."""


@dataclass(frozen=True)
class Chain:
    """Layers run one after the other, as one stage; alike if the layers are."""

    layers: tuple[Layer, ...]

    @property
    def __name__(self) -> str:
        """Names the stage in traces and errors."""
        names = list(dict.fromkeys(map(name_of, self.layers)))
        return "_".join(names)

    def __call__(self, params: Sequence[Any], x: Any) -> Any:
        """Run the layers, each on its own weights."""
        for layer, weights in zip(self.layers, params, strict=True):
            x = layer(weights, x)
        return x


@dataclass(frozen=True, slots=True)
class Partition:
    """Where a row of layers is cut into stages.

    Attributes:
        layers: All of them, in order.
        sizes: How many of them each stage has.
        costs: What each layer costs, in any one unit.
    """

    layers: tuple[Layer, ...]
    sizes: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def stages(self) -> tuple[Chain, ...]:
        """The stages, as `ml.pipeline` takes them."""
        return tuple(Chain(self.layers[a:b]) for a, b in self._bounds)

    @property
    def stage_costs(self) -> tuple[float, ...]:
        """What each stage costs."""
        return tuple(sum(self.costs[a:b]) for a, b in self._bounds)

    def params_of(self, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Group the weights of layers by stages."""
        return [tuple(params[a:b]) for a, b in self._bounds]

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        ends = [0, *itertools.accumulate(self.sizes)]
        return list(itertools.pairwise(ends))


def partition(
    layers: Sequence[Layer],
    num_stages: int | None = None,
    *,
    costs: Sequence[float] | None = None,
    sizes: Sequence[int] | None = None,
) -> Partition:
    """Cut a row of layers into stages.

    Args:
        layers: Pure functions `layer(params, x) -> y`, each on what the one before
            returns.
        num_stages: How many stages to balance them into.
        costs: What each layer costs, as `estimated_costs` or `measured_costs` tell; all
            the same unless given.
        sizes: How many layers each stage has, in place of balancing.

    Raises:
        ConfigError: There are fewer layers than stages, or the numbers do not fit.

    >>> cut = partition([max] * 5, 3, costs=[1, 1, 1, 1, 4])
    >>> cut.sizes, cut.stage_costs
    ((2, 2, 1), (2, 2, 4))
    """
    layers = tuple(layers)
    known = (1.0,) * len(layers) if costs is None else tuple(costs)
    if len(known) != len(layers):
        raise _error(f"{len(known)} costs", f"one for each of {len(layers)} layers")
    if (num_stages is None) == (sizes is None):
        raise _error(f"num_stages={num_stages}, sizes={sizes}", "one of the two")
    if sizes is not None:
        if sum(sizes) != len(layers) or min(sizes, default=0) < 1:
            raise _error(f"sizes {tuple(sizes)}", f"{len(layers)} layers in all")
        return Partition(layers, tuple(sizes), known)
    if not 1 <= (num_stages or 0) <= len(layers):
        raise _error(f"{num_stages} stages", f"1 to {len(layers)}, as there are layers")
    return Partition(layers, _balanced(known, num_stages or 1), known)


def estimated_costs(
    layers: Sequence[Layer], params: Sequence[Any], x: Any
) -> tuple[float, ...]:
    """Return about how many operations each layer takes, from its traced code alone.

    Args:
        layers: As of `partition`.
        params: The weights of each, or what has their types.
        x: A microbatch for the first layer, or what has its type.
    """
    costs = []
    x = _types(x)
    for layer, weights in zip(layers, params, strict=True):
        traced = jax.jit(layer).trace(_types(weights), x)
        costs.append(float(flops_of(traced.jaxpr)))
        x = traced.out_info
    return tuple(costs)


def measured_costs(
    layers: Sequence[Layer],
    params: Sequence[Any],
    x: Any,
    slice_: Slice,
    *,
    repeats: int = 5,
) -> tuple[float, ...]:
    """Return the seconds that forward and backward of each layer take on a slice.

    Args:
        layers: As of `partition`.
        params: The weights of each.
        x: A microbatch for the first layer.
        slice_: Where to run; one like those of the pipeline.
        repeats: Runs of each, whose shortest counts.
    """
    whole = slice_.sharding()
    x = slice_.client.put(x, whole)
    costs = []
    for layer, weights in zip(layers, params, strict=True):
        placed = slice_.client.put(weights, whole)
        run = jit(_forward_and_backward(layer), slice=slice_)
        y, *_ = run(placed, x)
        _wait_for(y)  # compiled by now
        seconds = [_seconds(lambda: run(placed, x)) for _ in range(repeats)]  # noqa: B023 - called at once
        costs.append(min(seconds))
        x = y
    return tuple(costs)


def _forward_and_backward(layer: Layer) -> Callable[[Any, Any], Any]:
    def both(params: Any, x: Any) -> Any:
        leaves, tree = jax.tree.flatten(x)
        moving = [i for i, leaf in enumerate(leaves) if _is_floating(leaf)]

        def run(params: Any, floating: list[Any]) -> Any:
            for position, value in zip(moving, floating, strict=True):
                leaves[position] = value
            return layer(params, jax.tree.unflatten(tree, leaves))

        y, pullback = jax.vjp(run, params, [leaves[i] for i in moving])
        return y, pullback(jax.tree.map(jax.numpy.ones_like, y))

    return both


def _seconds(start: Callable[[], Any]) -> float:
    began = time.perf_counter()
    _wait_for(start())
    return time.perf_counter() - began


def _wait_for(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        leaf.block_until_ready()


def _is_floating(leaf: Any) -> bool:
    return bool(jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact))


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: abstract_array(type_of(leaf)), tree)


def _balanced(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return sizes whose largest cost is least, then whose squares are.

    Each row of the table holds, for the first layers so far, the best cut into one
    stage more than the row before.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    rows: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for _ in range(num_stages):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(1, len(sums)):
            cuts = []
            for start, (largest, squares, sizes) in rows.items():
                if start < end:
                    cost = sums[end] - sums[start]
                    size = end - start
                    worst = max(largest, cost)
                    cuts.append((worst, squares + cost**2, (*sizes, size)))
            if cuts:
                longer[end] = min(cuts)
        rows = longer
    return rows[len(costs)][2]


def _error(got: str, expected: str) -> ConfigError:
    return ConfigError(
        f"layers cannot be cut into stages; got {got}; expected {expected}; correct it",
        option="partition",
    )
