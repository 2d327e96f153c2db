"""How a step ends: the loss is summed up, and every stage of every replica updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import optax

from timelyml.errors import ConfigError
from timelyml.ml.client.handle import Handle
from timelyml.ml.pipeline.all_reduce import AllReduce
from timelyml.ml.pipeline.chunking import Chunking
from timelyml.ml.pipeline.clipping import clipped_update, mean, norm
from timelyml.ml.pipeline.interpreting import Pass
from timelyml.ml.pipeline.state import Layout, ReplicaState, TrainState
from timelyml.ml.pipeline.tying import Tie, borrowed, resolve_ties
from timelyml.ml.pipeline.updating import (
    added,
    check_optimiser,
    copied,
    start,
    tally,
    update,
)

Given: TypeAlias = list[Any]
"""For each replica, what says the gradients of a stage to its update."""


class Ending:
    """Begins the optimiser of each stage, and ends steps.

    Args:
        layout: Of the pipeline.
        optimiser: Run on each stage by itself.
        clip_norm: The most that the norm of all stages' gradients may be.

    Raises:
        ConfigError: No norm can be as large as that.
    """

    def __init__(
        self,
        layout: Layout,
        optimiser: optax.GradientTransformation,
        clip_norm: float | None,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ConfigError(
                f"gradients cannot be clipped to such a norm; got {clip_norm!r}; "
                f"expected a number above 0; leave clip_norm= out not to clip",
                option="clip_norm",
            )
        self._layout = layout
        self._optimiser = optimiser
        self._clip_norm = clip_norm
        self._ties: tuple[Tie, ...] = ()
        self._last = layout.schedule.num_stages - 1

    def begin(self, params: Sequence[Any]) -> None:
        """Look at the weights of all stages.

        Raises:
            ConfigError: They cannot be tied so, or the optimiser looks across stages.
        """
        self._ties = resolve_ties(self._layout.tied, params)
        check_optimiser(self._optimiser, params)

    def start(self, replica: int, index: int, params: Any) -> tuple[Any, Any]:
        """Return the first state of a stage's optimiser, and zeros for its gradients."""
        slice_ = self._layout.slice_of(replica, index)
        key = "start", index, slice_.name, self._optimiser, self._ties
        begin = self._layout.once(
            key,
            lambda: start(slice_, self._optimiser, borrowed(self._ties, index)),
        )
        state, zeros = begin(params)
        return state, zeros

    def finish(
        self, state: TrainState, passes: Sequence[Pass]
    ) -> tuple[TrainState, Handle]:
        """Sum up the loss, and update every stage of every replica alike."""
        slice_ = self._layout.slice_of(0, self._last)
        sum_up = self._layout.once(("tally", slice_.name), lambda: tally(slice_))
        totals = [each for one in passes for _, each in sorted(one.totals.items())]
        counts = [each for one in passes for _, each in sorted(one.counts.items())]
        loss, count = sum_up(totals, counts)
        given = [
            self._given(index, params, passes)
            for index, params in enumerate(state.params)
        ]
        finish = self._updated if self._clip_norm is None else self._clipped
        replicas = finish(state.replicas, given, count)
        for replica, new in enumerate(replicas):
            self._hand_out(replica, new)
        return TrainState(replicas), loss

    def _updated(
        self, replicas: Sequence[ReplicaState], given: Sequence[Given], count: Any
    ) -> list[ReplicaState]:
        new = [ReplicaState([], [], []) for _ in replicas]
        for replica, held in enumerate(replicas):
            for index, params in enumerate(held.params):
                function = self._update_of(replica, index, params)
                state = held.optimiser[index]
                updated = function(params, state, given[index][replica], count)
                _append(new[replica], updated)
        return new

    def _clipped(
        self, replicas: Sequence[ReplicaState], given: Sequence[Given], count: Any
    ) -> list[ReplicaState]:
        """Update by gradients that are divided first, and as long as they may be."""
        means, squares = [], []
        for replica, held in enumerate(replicas):
            found = [
                self._mean_of(replica, index, params)(given[index][replica], count)
                for index, params in enumerate(held.params)
            ]
            means.append([gradients for gradients, _ in found])
            squares.append([square for _, square in found])
        slice_ = self._layout.slice_of(0, self._last)
        of_all = self._layout.once(("norm", slice_.name), lambda: norm(slice_))
        length = of_all(squares[0])  # which are the same in all replicas
        new = [ReplicaState([], [], []) for _ in replicas]
        for replica, held in enumerate(replicas):
            for index, params in enumerate(held.params):
                function = self._clipped_update_of(replica, index, params)
                arguments = params, held.optimiser[index], means[replica][index], length
                _append(new[replica], function(*arguments))
        return new

    def _update_of(self, replica: int, index: int, params: Any) -> Any:
        slice_ = self._layout.slice_of(replica, index)
        key = "update", index, slice_.name, self._optimiser, self._ties
        return self._layout.once(
            key,
            lambda: update(
                slice_,
                self._optimiser,
                borrowed(self._ties, index),
                params,
                self._summed(index, params),
                keeps_given=self._are_read_elsewhere,
            ),
        )

    def _mean_of(self, replica: int, index: int, params: Any) -> Any:
        slice_ = self._layout.slice_of(replica, index)
        return self._layout.once(
            ("mean", index, slice_.name, self._ties),
            lambda: mean(
                slice_,
                borrowed(self._ties, index),
                params,
                self._summed(index, params),
                keeps_given=self._are_read_elsewhere,
            ),
        )

    def _clipped_update_of(self, replica: int, index: int, params: Any) -> Any:
        slice_, limit = self._layout.slice_of(replica, index), self._clip_norm or 0.0
        key = "clipped", index, slice_.name, self._optimiser, self._ties, limit
        return self._layout.once(
            key,
            lambda: clipped_update(
                slice_, self._optimiser, borrowed(self._ties, index), params, limit
            ),
        )

    @property
    def _are_read_elsewhere(self) -> bool:
        """Whether what updates are given is more than that stage's own."""
        return len(self._layout.slices) > 1 or bool(self._ties)

    def _summed(self, index: int, params: Any) -> Callable[[Any], Any]:
        """Return the function of what an update is given that sums it up."""
        if len(self._layout.slices) > 1:
            return self._chunking(index, params).joined
        return lambda given: added(*given)

    def _given(self, index: int, params: Any, passes: Sequence[Pass]) -> Given:
        """Return for each replica what its update of a stage is given."""
        gradients = [each.gradients[index] for each in passes]
        shared = [self._shared(index, each) for each in passes]
        if len(passes) == 1:
            return list(zip(gradients, shared, strict=True))
        slices = [self._layout.slice_of(i, index) for i in range(len(passes))]
        all_reduce = self._layout.once(
            ("all-reduce", index, slices[0].name, self._ties),
            lambda: AllReduce(slices, self._chunking(index, params), self._layout.once),
        )
        chunks: Given = all_reduce(gradients, shared)
        return chunks

    def _shared(self, index: int, each: Pass) -> dict[int, list[Any]]:
        """Return the gradients of other stages for what a stage owns."""
        return {
            tie.owner[1]: [
                jax.tree.leaves(each.gradients[stage])[leaf]
                for stage, leaf in tie.others
            ]
            for tie in self._ties
            if tie.owner[0] == index
        }

    def _chunking(self, index: int, params: Any) -> Chunking:
        found: Chunking = self._layout.once(
            ("chunking", index, self._ties),
            lambda: Chunking.of(
                params,
                self._layout.slice_of(0, index).mesh,
                len(self._layout.slices),
                borrowed(self._ties, index),
            ),
        )
        return found

    def _hand_out(self, replica: int, new: ReplicaState) -> None:
        """Bring shared weights from their owners to who else uses them."""
        for tie in self._ties:
            owner, position = tie.owner
            value = jax.tree.leaves(new.params[owner])[position]
            for stage, leaf in tie.others:
                slice_ = self._layout.slice_of(replica, stage)
                copy = self._layout.once(("copy", slice_.name), lambda: copied(slice_))  # noqa: B023 - called at once
                leaves, tree = jax.tree.flatten(new.params[stage])
                leaves[leaf] = copy(value)
                new.params[stage] = jax.tree.unflatten(tree, leaves)


def _append(new: ReplicaState, updated: tuple[Any, Any, Any]) -> None:
    weights, optimiser, zeros = updated
    new.params.append(weights)
    new.optimiser.append(optimiser)
    new.gradients.append(zeros)
