"""What a training step is made of, and what it holds between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from timelyml.ml.client.slices import Slice
from timelyml.ml.pipeline.actions import Action, Schedule
from timelyml.ml.pipeline.tying import Place


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
