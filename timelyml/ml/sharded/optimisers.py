"""Optax on parameters that live with shards, one closed time after the other.

Every shard updates what it holds, so an optimiser must treat each array, and each part
of a split one, by itself. One that looks across them would see another model than the
unsharded one does; it is found by trying, and refused. The one such rule that training
cannot do without, clipping by the global norm, is done here, from a norm of all shards.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from timelyml.errors import ConfigError
from timelyml.ml.compiled import Compiled, compiled
from timelyml.ml.sharded.structure import Structure


@dataclass(frozen=True, slots=True)
class Optimiser:
    """An optax transformation; equal for equal arguments, so compiled once.

    `make` gives the transformation, or is one. A function of a module with `bound`
    static arguments shares what is compiled with other runs on the same workers.
    """

    make: Any
    bound: tuple[Any, ...] = ()

    @classmethod
    def of(cls, given: Any) -> Optimiser:
        """Take a transformation, or a function or partial that makes one."""
        if isinstance(given, functools.partial) and not given.keywords:
            return cls(given.func, given.args)
        if callable(given) or isinstance(given, optax.GradientTransformation):
            return cls(given)
        raise ConfigError(
            f"optimiser cannot work; got {given!r}; expected an optax transformation, "
            "or a function that makes one; pass optax.adam(1e-3)",
            option="optimiser",
        )

    def transformation(self) -> optax.GradientTransformation:
        """Give the transformation."""
        if isinstance(self.make, optax.GradientTransformation):
            return self.make
        made: optax.GradientTransformation = self.make(*self.bound)
        return made


@dataclass(frozen=True, slots=True)
class Owned:
    """The parameters of one operator, by their places among all.

    Attributes:
        optimiser: What updates them.
        structure: Of all parameters, so that optax finds them by name.
        trained: Places of those that it updates.
    """

    optimiser: Optimiser
    structure: Structure
    trained: tuple[int, ...]

    def tree(self, leaves: Mapping[int, Any]) -> Any:
        """Give all parameters, None for those that are not here."""
        count = self.structure.num_leaves
        places = [leaves.get(place) for place in range(count)]
        return self.structure.unflatten(places)

    def leaves(self, tree: Any) -> dict[int, Any]:
        """Give back what `tree` was made of."""
        found = self.structure.flatten_up_to(tree)
        return {place: found[place] for place in self.trained}

    def chosen(self, params: Mapping[int, Any]) -> dict[int, Any]:
        """Give those that are trained."""
        return {place: params[place] for place in self.trained}

    def start(self, params: Mapping[int, Any]) -> Any:
        """Give the first state of the optimiser."""
        return self.optimiser.transformation().init(self.tree(self.chosen(params)))


@dataclass(frozen=True, slots=True)
class Step:
    """The compiled parts of an update."""

    owned: Owned
    clip_norm: float | None
    whole: Compiled
    add: Compiled
    clipped: Compiled

    @classmethod
    def of(
        cls,
        owned: Owned,
        clip_norm: float | None,
        told: tuple[tuple[int, int], ...] = (),
    ) -> Step:
        """Compile the update of some parameters, once per worker.

        Args:
            owned: The parameters.
            clip_norm: The most that the norm of all gradients may be.
            told: Place of each that is split, and how much of it counts in the norm:
                what comes then are copies.
        """
        limit = clip_norm or 0.0
        return cls(
            owned,
            clip_norm,
            compiled(functools.partial(_updated, owned), donate=(1,)),
            compiled(functools.partial(_added, owned, told)),
            compiled(functools.partial(_clipped, owned, limit), donate=(1,)),
        )


Contributions = tuple[tuple[Any, ...], ...]
"""By trained parameter: gradients to be added; stacked by shard if shared."""


def _gradients(
    owned: Owned, params: Mapping[int, Any], contributions: Contributions
) -> dict[int, Any]:
    return {
        place: functools.reduce(jnp.add, [sum_in_order(part) for part in parts])
        if parts
        else jnp.zeros_like(params[place])
        for place, parts in zip(owned.trained, contributions, strict=True)
    }


def sum_in_order(stacked: Any) -> Any:
    """Add up the leading axis, one after the other: XLA may not reorder that."""
    return functools.reduce(jnp.add, [stacked[i] for i in range(stacked.shape[0])])


def _applied(
    owned: Owned, params: Mapping[int, Any], state: Any, gradients: Mapping[int, Any]
) -> tuple[dict[int, Any], Any]:
    tree, own = owned.tree(gradients), owned.tree(params)
    updates, state = owned.optimiser.transformation().update(tree, state, own)
    return owned.leaves(optax.apply_updates(own, updates)), state


def _updated(
    owned: Owned,
    params: Mapping[int, Any],
    state: Any,
    contributions: Contributions,
) -> tuple[dict[int, Any], Any]:
    return _applied(owned, params, state, _gradients(owned, params, contributions))


def _added(
    owned: Owned,
    told: tuple[tuple[int, int], ...],
    params: Mapping[int, Any],
    contributions: Contributions,
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Give gradients, and the sum of squares of each."""
    gradients = _gradients(owned, params, contributions)
    counted = gradients | {
        place: gradients[place][:own] for place, own in told if place in gradients
    }
    return gradients, {place: jnp.sum(g**2) for place, g in counted.items()}


def _clipped(
    owned: Owned,
    limit: float,
    params: Mapping[int, Any],
    state: Any,
    clipping: tuple[Mapping[int, Any], Any],
) -> tuple[dict[int, Any], Any]:
    gradients, norm = clipping
    scaled = {
        place: jnp.where(norm < limit, g, (g / norm.astype(g.dtype)) * limit)
        for place, g in gradients.items()
    }
    return _applied(owned, params, state, scaled)


def check_by_itself(
    given: Optimiser, structure: Structure, params: Sequence[Any], split: Sequence[bool]
) -> None:
    """Refuse an optimiser that looks across parameters, or across parts of one.

    It is tried on small arrays: one of them is changed, and the updates of all others
    must keep their bits; then one row of a split one.

    Args:
        given: The optimiser.
        structure: Of all parameters.
        params: Their leaves.
        split: Which of them are split.

    Raises:
        ConfigError: It does.
    """
    rng = np.random.default_rng(0)
    small = [_small(leaf, rng) for leaf in params]
    gradients = [_small(leaf, rng) for leaf in params]
    optimiser = given.transformation()
    state = optimiser.init(structure.unflatten(small))

    @jax.jit
    def compiled_update(gradients: list[Any]) -> list[Any]:
        tree, own = (structure.unflatten(each) for each in (gradients, small))
        updates, _ = optimiser.update(tree, state, own)
        return structure.flatten_up_to(updates)

    def updates_of(gradients: list[Any]) -> list[Any]:
        return [np.asarray(leaf) for leaf in compiled_update(gradients)]

    expected = updates_of(gradients)
    for place, is_split in enumerate(split):
        if not np.issubdtype(gradients[place].dtype, np.floating):
            continue
        for rows in (slice(0, 1), slice(None)) if is_split else (slice(None),):
            tried = list(gradients)
            tried[place] = gradients[place].copy()
            tried[place][rows] *= 1e3
            _compare(expected, updates_of(tried), place, rows)


def _small(leaf: Any, rng: np.random.Generator) -> Any:
    shape = tuple(min(size, 3) for size in np.shape(leaf))
    return np.atleast_1d(rng.standard_normal(shape)).astype(np.asarray(leaf).dtype)


def _compare(expected: list[Any], got: list[Any], place: int, rows: slice) -> None:
    for other, (before, after) in enumerate(zip(expected, got, strict=True)):
        if other == place and rows.stop is None:
            continue
        rest = slice(rows.stop, None) if other == place else slice(None)
        if before[rest].tobytes() != after[rest].tobytes():
            raise ConfigError(
                "optimiser looks across parameters, which live on different shards; "
                f"got an update of parameter {other} that depends on the gradient of "
                f"parameter {place}; expected each by itself; leave global clipping to "
                "clip_norm, and other such rules away",
                option="optimiser",
            )
