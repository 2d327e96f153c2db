"""A training step of a pipeline: cut the batch, run the schedule, update each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from timelyml.errors import ConfigError
from timelyml.ml.client.handle import Handle
from timelyml.ml.client.slices import Slice
from timelyml.ml.functions import partition_spec, recorder
from timelyml.ml.pipeline.actions import Action, Schedule
from timelyml.ml.pipeline.interpreting import Pass
from timelyml.ml.pipeline.microbatches import cut_batch, masked, padded
from timelyml.ml.pipeline.observing import PipelineRecord
from timelyml.ml.pipeline.stages import Stage
from timelyml.ml.pipeline.tying import Place, Tie, borrowed, resolve_ties
from timelyml.ml.pipeline.updating import (
    check_optimiser,
    copied,
    start,
    tally,
    update,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What one replica holds between steps; each a list over stages, on their slices.

    Attributes:
        params: The weights.
        optimiser: The state of the optimiser.
        gradients: Zeros, which the next step adds to.
    """

    params: list[Any]
    optimiser: list[Any]
    gradients: list[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TrainState:
    """What a training step takes and returns; a step destroys the one it takes."""

    replicas: list[ReplicaState]

    @property
    def params(self) -> list[Any]:
        """The weights of each stage, which are the same in all replicas."""
        return self.replicas[0].params


@dataclass(frozen=True, slots=True)
class Layout:
    """What a training step is made of.

    Attributes:
        order: All actions of the schedule, as the client starts them.
        slices: For each replica the slice of each rank.
        batch_axis: The axis of a slice's mesh over which rows are cut, if it has it.
        tied: Groups of places of shared weights.
        made: Functions made before, shared by all pipelines of the same stages.
    """

    stages: tuple[Callable[..., Any], ...]
    schedule: Schedule
    order: tuple[Action, ...]
    slices: tuple[tuple[Slice, ...], ...]
    batch_axis: str
    tied: tuple[tuple[Place, ...], ...]
    made: dict[Any, Any]

    def slice_of(self, replica: int, stage: int) -> Slice:
        """Return where a stage of a replica is."""
        return self.slices[replica][self.schedule.rank_of_stage[stage]]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made for this key, or make it."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


class TrainStep:
    """Trains a pipeline by one batch at a time; what `Pipeline.train_step` returns.

    Calling it starts a step and returns the next state and the loss, a handle, without
    waiting for either.
    """

    def __init__(
        self,
        layout: Layout,
        loss_fn: Callable[..., Any],
        optimiser: optax.GradientTransformation,
        *,
        pad_rows: bool = False,
    ) -> None:
        self._layout = layout
        self._is_padded = pad_rows
        self._loss_fn = loss_fn
        if pad_rows:
            key = "masked", loss_fn
            self._loss_fn = layout.once(key, lambda: masked(loss_fn))
        self._optimiser = optimiser
        self._ties: tuple[Tie, ...] = ()
        self._last = layout.schedule.num_stages - 1
        self._stages = [
            [self._stage(replica, index) for index in range(self._last + 1)]
            for replica in range(len(layout.slices))
        ]

    def init(self, params: Sequence[Any]) -> TrainState:
        """Bring weights to their slices and begin the optimiser there.

        Args:
            params: The tree of each stage: arrays, or handles on the stage's slice with
                a sharding of their own. Shared weights are given by every stage that
                uses them.

        Raises:
            ConfigError: There is not one tree for each stage, a weight is not floating,
                or the optimiser looks across stages.
        """
        self._check(params)
        self._ties = resolve_ties(self._layout.tied, params)
        check_optimiser(self._optimiser, params)
        replicas = []
        for replica in range(len(self._layout.slices)):
            placed, states, gradients = [], [], []
            for index, tree in enumerate(params):
                slice_ = self._layout.slice_of(replica, index)
                placed.append(_placed(tree, slice_))
                state, zeros = self._begin_of(replica, index)(placed[-1])
                states.append(state)
                gradients.append(zeros)
            replicas.append(ReplicaState(placed, states, gradients))
        return TrainState(replicas)

    def __call__(
        self,
        state: TrainState,
        inputs: Any,
        targets: Any,
        *,
        record: PipelineRecord | None = None,
    ) -> tuple[TrainState, Handle]:
        """Train by one batch.

        Args:
            state: Destroyed.
            inputs: What the first stage takes, all microbatches in one: rows first.
            targets: What the loss takes, with as many rows.
            record: Told what runs when, and what is held.

        Raises:
            ConfigError: There are too few rows.
            TraceError: A stage or the loss cannot be traced.
        """
        num_parts = self._layout.schedule.num_microbatches
        parts = cut_batch((inputs, targets), num_parts * len(self._layout.slices))
        return self.on_microbatches(state, parts, record=record)

    def on_microbatches(
        self,
        state: TrainState,
        microbatches: Sequence[tuple[Any, Any]],
        *,
        record: PipelineRecord | None = None,
    ) -> tuple[TrainState, Handle]:
        """Train by microbatches of any sizes, those of the first replica first.

        Each size is compiled once, or each that they are padded to. The loss is the sum over all of them, divided by the
        sum of their counts.

        Args:
            state: Destroyed.
            microbatches: Inputs and targets of each.
            record: As of a call.

        Raises:
            ConfigError: There are not as many as the schedule has.
            TraceError: A stage or the loss cannot be traced.
        """
        count = self._layout.schedule.num_microbatches
        if len(microbatches) != count * len(self._layout.slices):
            raise ConfigError(
                f"step has another number of microbatches; got {len(microbatches)}; "
                f"expected {count} for each of {len(self._layout.slices)} replicas; "
                f"make the pipeline for as many",
                option="microbatches",
            )
        if self._is_padded:
            microbatches = [padded(x, target) for x, target in microbatches]
        timed = PipelineRecord() if record is None else record
        passes = [
            self._pass(state, replica, microbatches[replica * count :][:count], timed)
            for replica in range(len(self._layout.slices))
        ]
        if record is not None:
            client = self._layout.slice_of(0, 0).client
            record.begin(self._layout.schedule, client)
        for action in self._layout.order:
            for each in passes:
                each.do(action)
        return self._finish(state, passes)

    def _pass(
        self,
        state: TrainState,
        replica: int,
        microbatches: Sequence[tuple[Any, Any]],
        record: PipelineRecord,
    ) -> Pass:
        first, last = (self._layout.slice_of(replica, s) for s in (0, self._last))
        held = state.replicas[replica]
        return Pass(
            self._layout.schedule,
            self._stages[replica],
            held.params,
            list(held.gradients),
            [self._put(x, first) for x, _ in microbatches],
            [self._put(target, last) for _, target in microbatches],
            record if replica == 0 else PipelineRecord(),
        )

    def _finish(
        self, state: TrainState, passes: Sequence[Pass]
    ) -> tuple[TrainState, Handle]:
        """Sum up the loss, and update every stage of every replica alike."""
        slice_ = self._layout.slice_of(0, self._last)
        sum_up = self._layout.once(("tally", slice_.name), lambda: tally(slice_))
        totals = [each for one in passes for _, each in sorted(one.totals.items())]
        counts = [each for one in passes for _, each in sorted(one.counts.items())]
        loss, count = sum_up(totals, counts)
        replicas = [
            self._updated(replica, held, passes, count)
            for replica, held in enumerate(state.replicas)
        ]
        return TrainState(replicas), loss

    def _updated(
        self, replica: int, held: ReplicaState, passes: Sequence[Pass], count: Any
    ) -> ReplicaState:
        new = ReplicaState([], [], [])
        for index, params in enumerate(held.params):
            function = self._update_of(replica, index, params)
            # In the same order on every replica, or they would drift apart.
            gradients = [each.gradients[index] for each in passes]
            shared = self._shared(index, passes)
            weights, optimiser, zeros = function(
                params, held.optimiser[index], gradients, shared, count
            )
            new.params.append(weights)
            new.optimiser.append(optimiser)
            new.gradients.append(zeros)
        self._hand_out(replica, new)
        return new

    def _begin_of(self, replica: int, index: int) -> Any:
        slice_ = self._layout.slice_of(replica, index)
        key = "start", index, slice_.name, self._optimiser, self._ties
        return self._layout.once(
            key,
            lambda: start(slice_, self._optimiser, borrowed(self._ties, index)),
        )

    def _update_of(self, replica: int, index: int, params: Any) -> Any:
        slice_ = self._layout.slice_of(replica, index)
        is_read_elsewhere = len(self._layout.slices) > 1 or bool(self._ties)
        key = "update", index, slice_.name, self._optimiser, self._ties
        return self._layout.once(
            key,
            lambda: update(
                slice_,
                self._optimiser,
                borrowed(self._ties, index),
                params,
                keeps_gradients=is_read_elsewhere,
            ),
        )

    def _shared(self, index: int, passes: Sequence[Pass]) -> dict[int, list[Any]]:
        """Return the gradients that other stages have of weights that this one owns."""
        found: dict[int, list[Any]] = {}
        for tie in self._ties:
            if tie.owner[0] == index:
                found[tie.owner[1]] = [
                    jax.tree.leaves(each.gradients[stage])[leaf]
                    for each in passes
                    for stage, leaf in tie.others
                ]
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

    def _stage(self, replica: int, index: int) -> Stage:
        slice_ = self._layout.slice_of(replica, index)
        loss_fn = self._loss_fn if index == self._last else None
        return self._layout.once(  # type: ignore[no-any-return]  # what is made here
            ("stage", index, slice_.name, loss_fn),
            lambda: Stage(
                self._layout.stages[index],
                slice_,
                self._layout.made,
                loss_fn=loss_fn,
                is_first=index == 0,
            ),
        )

    def _put(self, tree: Any, slice_: Slice) -> Any:
        """Bring the rows of a microbatch to a slice, cut over its replicas if it has any."""
        if recorder() is not None or all(_is_handle(v) for v in jax.tree.leaves(tree)):
            return tree
        axis = self._layout.batch_axis
        has_axis = axis in slice_.mesh.axis_names
        spec = partition_spec((axis,) if has_axis else ())
        return slice_.client.put(tree, slice_.sharding(spec))

    def _check(self, params: Sequence[Any]) -> None:
        if len(params) != self._last + 1:
            raise ConfigError(
                f"weights do not fit the pipeline; got {len(params)} trees; expected "
                f"one for each of {self._last + 1} stages; give a list of them",
                option="params",
            )
        for index, tree in enumerate(params):
            for leaf in jax.tree.leaves(tree):
                if not jnp.issubdtype(leaf.dtype, jnp.floating):
                    raise ConfigError(
                        f"stage {index} has a weight that cannot be trained; got "
                        f"{leaf.dtype}; expected a floating type; let the stage's "
                        f"function hold constants",
                        option="params",
                    )


def _is_handle(leaf: Any) -> bool:
    return isinstance(leaf, Handle)


def _placed(tree: Any, slice_: Slice) -> Any:
    """Bring weights to a slice whole, those of them that are not on one already."""
    whole = slice_.sharding()
    return jax.tree.map(
        lambda leaf: leaf if _is_handle(leaf) else slice_.client.put(leaf, whole), tree
    )
