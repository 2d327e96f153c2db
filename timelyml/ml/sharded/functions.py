"""What a call does on one shard: forward, and back from cotangents to gradients.

A function takes a list of leaves, columns and parameters as they stand among its
arguments, and gives a list of outputs. Prepared for what is wanted of it, it also
gives gradients: it either keeps what its linear part needs, or computes forward once
more, from the same inputs and the same decisions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from timelyml.ml.buckets import bucket_size, cut_rows, pad_rows
from timelyml.ml.compiled import Compiled, compiled
from timelyml.ml.sharded.structure import Structure

Leaves: TypeAlias = Sequence[Any]


class Needs(NamedTuple):
    """What of a function's gradient is wanted; three flags by place."""

    wanted: tuple[bool, ...]
    """Leaves that gradients are wanted of."""
    live: tuple[bool, ...]
    """Outputs that have cotangents."""
    losses: tuple[bool, ...]
    """Outputs that are parts of the loss: the cotangent of each element is 1."""


class Prepared(Protocol):
    """A function with its compiled parts; travels to workers."""

    def forward(self, leaves: Leaves) -> tuple[list[Any], Any]:
        """Give the outputs, and what to keep for the way back."""
        ...

    def backward(self, leaves: Leaves, kept: Any, cotangents: Leaves) -> list[Any]:
        """Give the gradient of each leaf, None where it is not wanted.

        Cotangents of outputs that are not live are None.
        """
        ...


class Function(Protocol):
    """What a call computes."""

    def prepared(self, needs: Needs) -> Prepared:
        """Compile what is needed, on the worker that calls it first."""
        ...


class Outputs(Protocol):
    """Gives outputs from leaves; equal for equal functions, so compiled once."""

    def outputs(self, leaves: Leaves, decision: Leaves = ()) -> list[Any]:
        """Compute; replay the leaves of a decision, if there are any."""
        ...


@dataclass(frozen=True, slots=True)
class Body:
    """A JAX function on leaves; equal for equal functions, so compiled once."""

    function: Callable[..., Any]
    bound: tuple[Any, ...]
    """What a partial binds; static."""
    structure: Structure
    """Of the arguments."""
    decision: Structure | None = None
    """Of the first result, if the function decides something by it."""
    has_mask: bool = False
    """Whether the last leaf is a mask of real rows, which it takes as `is_row=`."""

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        structure: Structure,
        decision: Structure | None = None,
    ) -> Body:
        """Take partials apart, since two of the same are not equal."""
        if isinstance(function, functools.partial) and not function.keywords:
            with contextlib.suppress(TypeError):
                hash(function.args)
                return cls(function.func, function.args, structure, decision)
        return cls(function, (), structure, decision)

    @property
    def num_decisions(self) -> int:
        """How many outputs, the first ones, are taken as they were when replayed."""
        return 0 if self.decision is None else self.decision.num_leaves

    def called(self, leaves: Leaves, decision: Leaves = ()) -> Any:
        """Call the function; replay the leaves of a decision, if there are any."""
        more: dict[str, Any] = {}
        if self.has_mask:
            *leaves, more["is_row"] = leaves
        arguments = self.structure.unflatten(leaves)
        if decision and self.decision is not None:
            more["decision"] = self.decision.unflatten(decision)
        return self.function(*self.bound, *arguments, **more)

    def shapes(self, like: Leaves, is_rows: Sequence[bool], *, more: int = 0) -> Any:
        """Give shapes of what the function gives, with so many rows more."""
        leaves = [
            _struct((each.shape[0] + more, *each.shape[1:]), each.dtype) if ok else each
            for each, ok in zip(like, is_rows, strict=True)
        ]
        if self.has_mask:
            rows = next(e.shape[0] for e, ok in zip(leaves, is_rows, strict=True) if ok)
            leaves.append(_struct((rows,), np.bool_))
        return jax.eval_shape(self.called, leaves)

    def outputs(self, leaves: Leaves, decision: Leaves = ()) -> list[Any]:
        """Give the leaves of what the function gives."""
        return list(jax.tree.leaves(self.called(leaves, decision)))


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]  # JAX has none


@jax.tree_util.register_pytree_node_class
class Residual:
    """What the linear part needs, without what the caller has anyway: its inputs."""

    __slots__ = ("arrays", "static")

    def __init__(self, arrays: Sequence[Any], static: Any) -> None:
        self.arrays = arrays
        self.static = static

    @classmethod
    def of(cls, pull: Any, leaves: Leaves) -> Residual:
        """Take apart what `jax.vjp` gave, while it is traced."""
        found, structure = jax.tree.flatten(pull)
        place = {id(leaf): index for index, leaf in enumerate(leaves)}
        inputs = tuple(place.get(id(leaf), -1) for leaf in found)
        fresh = [leaf for leaf, i in zip(found, inputs, strict=True) if i < 0]
        return cls(fresh, (structure, inputs))

    def pull(self, leaves: Leaves) -> Any:
        """Put the linear part together again."""
        structure, inputs = self.static
        fresh = iter(self.arrays)
        found = [next(fresh) if index < 0 else leaves[index] for index in inputs]
        return jax.tree.unflatten(structure, found)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """Give arrays and what is static, to JAX."""
        return tuple(self.arrays), self.static

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Sequence[Any]) -> Residual:
        """Take them back, from JAX."""
        return cls(arrays, static)


@dataclass(frozen=True, slots=True)
class JaxFunction:
    """A JAX function of all its leaves at once.

    Attributes:
        body: The function.
        keeps: Keep residuals; else the forward pass is computed again.
        smallest: Pad rows to buckets from this size on; 0: never.
        is_rows: By leaf: columns that are padded; they share their leading axis.
        gives_rows: By output: those that have that axis too.
        has_mask: One more leaf, the last, says which rows are not padding.
    """

    body: Body
    keeps: bool = False
    smallest: int = 0
    is_rows: tuple[bool, ...] = ()
    gives_rows: tuple[bool, ...] = ()
    has_mask: bool = False

    def prepared(self, needs: Needs) -> Prepared:
        """See `Function`."""
        body, wanted, live, losses = self.body, *needs
        if self.has_mask:
            wanted = (*wanted, False)
        start = (
            functools.partial(compute_keeping, body, wanted, live)
            if self.keeps and any(live)
            else functools.partial(compute, body)
        )
        return PreparedJax(
            self,
            needs,
            compiled(start),
            compiled(functools.partial(pull_again, body, wanted, live)),
            compiled(pull_kept),
            compiled(functools.partial(_turn, body, wanted, losses)),
        )


@dataclass(frozen=True, slots=True)
class PreparedJax:
    """See `JaxFunction`; also does both passes in one computation."""

    function: JaxFunction
    needs: Needs
    start: Compiled
    pull: Compiled
    finish: Compiled
    both: Compiled

    @property
    def can_turn(self) -> bool:
        """Whether `turn` works: padding would be part of the loss."""
        return not self.function.smallest

    @property
    def num_sizes(self) -> int:
        """For how many numbers of rows a worker has compiled the function."""
        return len(self.start.sizes | self.pull.sizes | self.finish.sizes)

    def forward(self, leaves: Leaves) -> tuple[list[Any], Any]:
        """Give outputs, cut to the rows there are."""
        count, leaves = self._padded(leaves)
        result = self.start.on_rows(self._sizes(count), tuple(leaves))
        if self.function.keeps and any(self.needs.live):
            outputs, kept = result
        else:
            outputs = result
            kept = outputs[: self.function.body.num_decisions]
        return self._cut(outputs, count), kept

    def backward(self, leaves: Leaves, kept: Any, cotangents: Leaves) -> list[Any]:
        """Give gradients; cotangents of padding are zeros."""
        count, leaves = self._padded(leaves)
        sizes = self._sizes(count)
        if sizes:
            rows = self.function.gives_rows
            cotangents = [
                pad_rows(c, *sizes) if c is not None and ok else c
                for c, ok in zip(cotangents, rows, strict=True)
            ]
        live = tuple(c for c, ok in zip(cotangents, self.needs.live, strict=True) if ok)
        if isinstance(kept, Residual):
            found = self.finish.on_rows(sizes, kept, tuple(leaves), live)
        else:
            found = self.pull.on_rows(sizes, tuple(leaves), (tuple(kept), live))
        return self._spread(found, count)

    def turn(self, leaves: Leaves) -> tuple[list[Any], list[Any]]:
        """Give outputs and gradients of the loss at once."""
        outputs, found = self.both(tuple(leaves))
        return [np.asarray(each) for each in outputs], self._spread(found, None)

    def _sizes(self, count: int | None) -> tuple[int, ...]:
        """Give the bucket of so many rows; nothing where nothing is padded."""
        if count is None:
            return ()
        return (bucket_size(count, smallest=self.function.smallest),)

    def _padded(self, leaves: Leaves) -> tuple[int | None, Leaves]:
        if not self.function.smallest:
            return None, leaves
        pairs = list(zip(leaves, self.function.is_rows, strict=True))
        count = next(len(leaf) for leaf, yes in pairs if yes)
        (size,) = self._sizes(count)
        padded = [pad_rows(leaf, size) if yes else leaf for leaf, yes in pairs]
        if self.function.has_mask:
            padded.append(np.arange(size) < count)
        return count, padded

    def _cut(self, outputs: Sequence[Any], count: int | None) -> list[Any]:
        if count is None:
            return [np.asarray(each) for each in outputs]
        return [
            cut_rows(each, count) if ok else np.asarray(each)
            for each, ok in zip(outputs, self.function.gives_rows, strict=True)
        ]

    def _spread(self, found: Sequence[Any], count: int | None) -> list[Any]:
        """Give found gradients their places among all leaves."""
        ready = iter(found)
        spread: list[Any] = []
        for place, wanted in enumerate(self.needs.wanted):
            gradient = next(ready) if wanted else None
            if wanted and count is not None and self.function.is_rows[place]:
                gradient = cut_rows(gradient, count)
            spread.append(gradient)
        return spread


def _merged(leaves: Leaves, wanted: tuple[bool, ...], some: Leaves) -> list[Any]:
    ready = iter(some)
    return [
        next(ready) if is_wanted else leaf
        for leaf, is_wanted in zip(leaves, wanted, strict=True)
    ]


def _some(leaves: Leaves, flags: tuple[bool, ...]) -> list[Any]:
    return [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]


def compute(body: Outputs, leaves: Leaves) -> tuple[Any, ...]:
    """Compute forward."""
    return tuple(body.outputs(leaves))


def pull_again(
    body: Outputs,
    wanted: tuple[bool, ...],
    live: tuple[bool, ...],
    leaves: Leaves,
    back: tuple[Leaves, Leaves],
) -> Any:
    """Compute forward again, by the decision that was kept, and back."""
    decision, cotangents = back

    def of(*some: Any) -> list[Any]:
        return _some(body.outputs(_merged(leaves, wanted, some), decision), live)

    _, pull = jax.vjp(of, *_some(leaves, wanted))
    return pull(list(cotangents))


def compute_keeping(
    body: Outputs, wanted: tuple[bool, ...], live: tuple[bool, ...], leaves: Leaves
) -> tuple[tuple[Any, ...], Residual]:
    """Compute forward, and keep what the way back needs."""

    def of(*some: Any) -> tuple[list[Any], list[Any]]:
        outputs = body.outputs(_merged(leaves, wanted, some))
        return _some(outputs, live), outputs

    _, back, outputs = jax.vjp(of, *_some(leaves, wanted), has_aux=True)
    return tuple(outputs), Residual.of(back, leaves)


def pull_kept(kept: Residual, leaves: Leaves, cotangents: Leaves) -> Any:
    """Compute back from what was kept."""
    return kept.pull(leaves)(list(cotangents))


def _turn(
    body: Outputs, wanted: tuple[bool, ...], losses: tuple[bool, ...], leaves: Leaves
) -> Any:
    def of(*some: Any) -> tuple[list[Any], list[Any]]:
        outputs = body.outputs(_merged(leaves, wanted, some))
        return _some(outputs, losses), outputs

    parts, back, outputs = jax.vjp(of, *_some(leaves, wanted), has_aux=True)
    return outputs, back([jnp.ones(part.shape, part.dtype) for part in parts])
