"""How a step ends: the loss is summed up, and every stage of every replica updated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax

from timelyml.errors import ConfigError
from timelyml.ml.client.handle import Handle
from timelyml.ml.pipeline.clipping import clipped_update, mean, norm
from timelyml.ml.pipeline.interpreting import Pass
from timelyml.ml.pipeline.state import Layout, ReplicaState, TrainState
from timelyml.ml.pipeline.tying import Tie, borrowed, resolve_ties
from timelyml.ml.pipeline.updating import (
    check_optimiser,
    copied,
    start,
    tally,
    update,
)


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
        if self._clip_norm is None:
            replicas = [
                self._updated(replica, held, passes, count)
                for replica, held in enumerate(state.replicas)
            ]
        else:
            replicas = self._clipped(state.replicas, passes, count)
        for replica, new in enumerate(replicas):
            self._hand_out(replica, new)
        return TrainState(replicas), loss

    def _updated(
        self, replica: int, held: ReplicaState, passes: Sequence[Pass], count: Any
    ) -> ReplicaState:
        new = ReplicaState([], [], [])
        for index, params in enumerate(held.params):
            function = self._update_of(replica, index, params)
            summed = self._gradients(index, passes)
            given = params, held.optimiser[index], *summed, count
            _append(new, function(*given))
        return new

    def _clipped(
        self, replicas: Sequence[ReplicaState], passes: Sequence[Pass], count: Any
    ) -> list[ReplicaState]:
        """Update by gradients that are divided first, and as long as they may be."""
        means, squares = [], []
        for replica, held in enumerate(replicas):
            found = [
                self._mean_of(replica, index, params)(
                    *self._gradients(index, passes), count
                )
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
                given = params, held.optimiser[index], means[replica][index], length
                _append(new[replica], function(*given))
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
                keeps_gradients=self._are_read_elsewhere,
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
                keeps_gradients=self._are_read_elsewhere,
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
        """Whether gradients of a stage are more than that stage's own."""
        return len(self._layout.slices) > 1 or bool(self._ties)

    def _gradients(
        self, index: int, passes: Sequence[Pass]
    ) -> tuple[list[Any], dict[int, list[Any]]]:
        """Return the gradients of a stage, and those of others for what it owns."""
        # In the same order on every replica, or they would drift apart.
        gradients = [each.gradients[index] for each in passes]
        shared: dict[int, list[Any]] = {}
        for tie in self._ties:
            if tie.owner[0] == index:
                shared[tie.owner[1]] = [
                    jax.tree.leaves(each.gradients[stage])[leaf]
                    for each in passes
                    for stage, leaf in tie.others
                ]
        return gradients, shared

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
