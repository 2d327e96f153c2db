"""The derivative of one compiled function, as functions that are compiled in turn.

A function is differentiated as `jax.vjp` does it. What the way back reads of its
operands and results goes by reference; only the rest are results more of the way
there. The functions can be pickled wherever the user's can, since some are shipped as
code: what JAX says of the linear part is found anew by each process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from timelyml.ml.functions import FlatFunction
from timelyml.ml.functions.blame import name_of
from timelyml.ml.functions.types import abstract_array


class Source(NamedTuple):
    """Where a part of the residual comes from: of which list, and its place in it."""

    kind: str
    """"operand", "result" or "saved"."""
    position: int


@dataclass(frozen=True, slots=True)
class Residual:
    """What the linear part of a function reads.

    Attributes:
        structure: Of what `jax.vjp` gave.
        sources: Of each of its leaves.
        saved: Places, among results and leaves together, of those that are kept.
        live: Types of the live results.
    """

    structure: Any
    sources: tuple[Source, ...]
    saved: tuple[int, ...]
    live: tuple[Any, ...]

    def read(self, kind: str) -> tuple[int, ...]:
        """Return which operands or results are read, ascending."""
        found = {each.position for each in self.sources if each.kind == kind}
        return tuple(sorted(found))


@dataclass(frozen=True)  # no slots: what JAX says of it is kept
class Derivative:
    """A function, and what of its derivative is wanted.

    Attributes:
        wanted: Positions of operands whose gradients are wanted.
        live: Positions of results that have cotangents.
        seeds: Those of them that are the loss, whose cotangent is 1.
        keeps: Keep residuals; else the function is computed again.
    """

    flat: FlatFunction
    wanted: tuple[int, ...]
    live: tuple[int, ...]
    seeds: frozenset[int]
    keeps: bool

    def __reduce__(self) -> tuple[Any, ...]:
        parts = self.flat, self.wanted, self.live, self.seeds, self.keeps
        return Derivative, parts  # JAX's own structures cannot be pickled

    @property
    def name(self) -> str:
        """The name of the function."""
        return name_of(self.flat.function)

    @cached_property
    def residual(self) -> Residual:
        """What the linear part reads; traces the function.

        Only in a context with its settings and mesh. Two parts that are one value are
        read, and kept, once.
        """
        shape: dict[str, Any] = {}

        def run(*operands: Any) -> list[Any]:
            results, pull = self.linearised(operands)
            leaves, shape["structure"] = jax.tree.flatten(pull)
            shape["num_results"] = len(results)
            return [*results, *leaves]

        closed = jax.make_jaxpr(run)(*map(abstract_array, self.flat.operand_types))
        inner, num_results = closed.jaxpr, shape["num_results"]
        live = tuple(closed.out_avals[position] for position in self.live)
        known: dict[Var, Source] = {}
        for position, var in enumerate(inner.outvars[:num_results]):
            if not isinstance(var, Literal):
                known[var] = Source("result", position)
        for position, var in enumerate(inner.invars):
            known[var] = Source("operand", position)
        sources, saved = [], list[int]()
        for place, var in enumerate(inner.outvars[num_results:], num_results):
            source = None if isinstance(var, Literal) else known.get(var)
            if source is None:
                source = Source("saved", len(saved))
                saved.append(place)
                if not isinstance(var, Literal):
                    known[var] = source
            sources.append(source)
        return Residual(shape["structure"], tuple(sources), tuple(saved), live)

    @property
    def operands_read(self) -> tuple[int, ...]:
        """Which operands the way back reads, ascending."""
        if self.keeps:
            return self.residual.read("operand")
        return tuple(range(len(self.flat.used)))

    @property
    def results_read(self) -> tuple[int, ...]:
        """Which results the way back reads, ascending."""
        return self.residual.read("result") if self.keeps else ()

    def linearised(self, operands: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return all results, and the linear part from live to wanted."""

        def run(*some: Any) -> tuple[list[Any], list[Any]]:
            merged = list(operands)
            for position, value in zip(self.wanted, some, strict=True):
                merged[position] = value
            results = self.flat(*merged)
            return [results[position] for position in self.live], results

        chosen = [operands[position] for position in self.wanted]
        _, pull, results = jax.vjp(run, *chosen, has_aux=True)
        return results, pull

    def summed(self, parts: Sequence[Sequence[Any]], like: Sequence[Any]) -> list[Any]:
        """Return the cotangent of each live result, of the parts it has."""
        sums = []
        for position, each, result in zip(self.live, parts, like, strict=True):
            is_seed = position in self.seeds
            seed = [jnp.ones(result.shape, result.dtype)] if is_seed else []
            sums.append(added(*seed, *each))
        return sums


class _Made:
    """A function made of a derivative; equal for equal ones."""

    part = ""

    def __init__(self, derivative: Derivative) -> None:
        self._derivative = derivative

    @property
    def __name__(self) -> str:
        """What traces and errors call it."""
        return f"{self._derivative.name}{self.part}"


class Forward(_Made):
    """`(*operands) -> (*results, *returned, *saved)`; `returned` are operands as they are.

    Whoever destroys an operand that is still read returns it.
    """

    part = "_forward"

    def __init__(self, derivative: Derivative, returned: tuple[int, ...]) -> None:
        super().__init__(derivative)
        self._returned = returned

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        """Compute the function, and what its way back reads beside."""
        derivative = self._derivative
        back = [operands[position] for position in self._returned]
        if not (derivative.live and derivative.keeps):
            return (*derivative.flat(*operands), *back)
        results, pull = derivative.linearised(operands)
        whole = [*results, *jax.tree.leaves(pull)]
        saved = [whole[place] for place in derivative.residual.saved]
        return (*results, *back, *saved)


class Backward(_Made):
    """`(operands, results, saved, cotangents) -> gradients` of the wanted operands.

    Operands and results are those that are read. Each live result has a tuple of
    cotangents, which are added up in their order.
    """

    part = "_backward"

    def __call__(
        self,
        operands: Sequence[Any],
        results: Sequence[Any],
        saved: Sequence[Any],
        cotangents: Sequence[Sequence[Any]],
    ) -> tuple[Any, ...]:
        """Compute the gradients."""
        derivative = self._derivative
        if derivative.keeps:
            pull = self._pull(operands, results, saved)
            types = list(derivative.residual.live)
        else:
            found, pull = derivative.linearised(operands)
            types = [found[position] for position in derivative.live]
        return tuple(pull(derivative.summed(cotangents, types)))

    def _pull(
        self, operands: Sequence[Any], results: Sequence[Any], saved: Sequence[Any]
    ) -> Any:
        derivative = self._derivative
        known = {
            "operand": dict(zip(derivative.operands_read, operands, strict=True)),
            "result": dict(zip(derivative.results_read, results, strict=True)),
            "saved": dict(enumerate(saved)),
        }
        residual = derivative.residual
        leaves = [known[kind][position] for kind, position in residual.sources]
        return jax.tree.unflatten(residual.structure, leaves)


class Turn(_Made):
    """`(*operands) -> (*results, *returned, *gradients)`, where nothing is in between."""

    part = "_turn"

    def __init__(self, derivative: Derivative, returned: tuple[int, ...]) -> None:
        super().__init__(derivative)
        self._returned = returned

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        """Compute the function and its gradients."""
        derivative = self._derivative
        results, pull = derivative.linearised(operands)
        back = [operands[position] for position in self._returned]
        like = [results[position] for position in derivative.live]
        return (*results, *back, *pull(derivative.summed([()] * len(like), like)))


def added(*parts: Any) -> Any:
    """Add up arrays in their order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
