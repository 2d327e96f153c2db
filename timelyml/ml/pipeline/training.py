"""A training step of a pipeline: cut the batch, run the schedule, update each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from timelyml.errors import ConfigError
from timelyml.ml.client.handle import Handle
from timelyml.ml.client.slices import Slice
from timelyml.ml.functions import partition_spec, recorder
from timelyml.ml.pipeline.ending import Ending
from timelyml.ml.pipeline.interpreting import Pass
from timelyml.ml.pipeline.microbatches import cut_batch, masked, padded
from timelyml.ml.pipeline.observing import PipelineRecord
from timelyml.ml.pipeline.stages import Stage
from timelyml.ml.pipeline.state import Layout, ReplicaState, TrainState
from timelyml.ml.pipeline.updating import copied, specs_of


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
        clip_norm: float | None = None,
    ) -> None:
        self._layout = layout
        self._is_padded = pad_rows
        self._loss_fn = loss_fn
        if pad_rows:
            key = "masked", loss_fn
            self._loss_fn = layout.once(key, lambda: masked(loss_fn))
        self._ending = Ending(layout, optimiser, clip_norm)
        self._last = layout.schedule.num_stages - 1
        self._stages = [
            [self._stage(replica, index) for index in range(self._last + 1)]
            for replica in range(len(layout.slices))
        ]

    def init(self, params: Sequence[Any]) -> TrainState:
        """Bring weights to their slices and begin the optimiser there.

        Args:
            params: The tree of each stage: arrays, or handles with a sharding of their
                own, which other replicas get copies of. Shared weights are given by
                every stage that uses them.

        Raises:
            ConfigError: There is not one tree for each stage, a weight is not floating,
                or the optimiser looks across stages.
        """
        self._check(params)
        self._ending.begin(params)
        replicas = []
        for replica in range(len(self._layout.slices)):
            placed, states, gradients = [], [], []
            for index, tree in enumerate(params):
                slice_ = self._layout.slice_of(replica, index)
                placed.append(_placed(tree, slice_))
                state, zeros = self._ending.start(replica, index, placed[-1])
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
        return self._ending.finish(state, passes)

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
            first_order=1 + replica * self._layout.schedule.num_ranks,
        )

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
    """Bring weights to a slice: whole, or those on another one cut as they are there."""
    leaves, structure = jax.tree.flatten(tree)
    away = [i for i, x in enumerate(leaves) if _is_handle(x) and x.slice is not slice_]
    if away:
        came = [leaves[i] for i in away]
        for i, copy in zip(away, copied(slice_, specs_of(came))(came), strict=True):
            leaves[i] = copy
    whole = slice_.sharding()
    placed = [x if _is_handle(x) else slice_.client.put(x, whole) for x in leaves]
    return jax.tree.unflatten(structure, placed)
