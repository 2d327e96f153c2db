"""Saving what is learnt: shards tell what they hold, and one of them writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from timelyml.errors import CheckpointError
from timelyml.graph import Gather, GraphBuilder, InputSpec, StreamRef
from timelyml.ml.checkpoints import Checkpoint, Checkpoints
from timelyml.ml.firing import Firing, Rule, add_firing_operator
from timelyml.ml.sharded.naming import Named

PARAMS, STATE = "params", "state"
NOT_SAVED = -1


class SaveRequest(NamedTuple):
    """What all operators with parameters are asked for at a time."""

    is_end: bool
    """The parameters, since there was no loss."""
    step: int
    """To be saved as this step, or not at all."""


class SavedArray(NamedTuple):
    """One array that a shard holds at a step, on its way to who writes it."""

    step: int
    kind: str
    named: Named


def add_saving(
    builder: GraphBuilder,
    name: str,
    told: Sequence[StreamRef],
    checkpoints: Checkpoints,
) -> StreamRef:
    """Write what all shards tell at a time; give a record for each file."""
    ports = tuple(range(len(told)))
    (saved,) = add_firing_operator(
        builder,
        name,
        [InputSpec(stream, Gather()) for stream in told],
        [Rule(ports, _Save(ports, checkpoints), outputs=(0,))],
        num_outputs=1,
        kind="save",
        num_shards=1,
    )
    return saved


@dataclass(frozen=True, slots=True)
class _Save:
    """Joins parts in the order of shards, and writes the file."""

    ports: tuple[int, ...]
    checkpoints: Checkpoints

    def __call__(self, firing: Firing) -> None:
        """Send step and path of the file; nothing if the step was saved before."""
        records = [
            SavedArray(*record)
            for port in self.ports
            for payload in firing.inputs[port].payloads
            for record in payload
        ]
        step = records[0].step
        if firing.state.get("step") == step:  # the last one, and the end that it is
            return
        checkpoint = Checkpoint(
            step,
            _joined(records, PARAMS),
            _joined(records, STATE),
            self.checkpoints.about,
        )
        path = self.checkpoints.save(checkpoint)
        firing.state["step"] = step
        firing.send(0, [(step, str(path))])


def _joined(records: Sequence[SavedArray], kind: str) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    parts: dict[str, list[Any]] = {}
    for told in records:
        name, is_part, array = told.named
        if told.kind != kind:
            continue
        if is_part:
            parts.setdefault(name, []).append(array)
        elif name not in whole:
            whole[name] = array
        elif whole[name].tobytes() != array.tobytes():
            raise CheckpointError(
                f"the state of the optimiser is not the same everywhere; got two values "
                f"of {name!r}; expected one for all operators; take an optimiser that "
                "treats each array by itself",
                name=name,
            )
    return whole | {name: np.concatenate(each) for name, each in parts.items()}
