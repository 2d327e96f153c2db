"""What operators that hold parameters do beside their stations: rules of the update.

Gradients of shared parameters go to all shards, which add them up in the same order and
take the same step; those of split ones stay. Either way the update of a time is seen by
no pass of that time, and by every pass of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from timelyml.graph import Broadcast, GraphBuilder, LoopRef, StreamRef
from timelyml.ml.checkpoints import Checkpoint, Checkpoints
from timelyml.ml.firing import Rule
from timelyml.ml.sharded.ending import add_ending, add_norm, add_weights
from timelyml.ml.sharded.frames import Frame, there
from timelyml.ml.sharded.naming import names_of
from timelyml.ml.sharded.optimisers import Optimiser, Owned, Step
from timelyml.ml.sharded.parts import Parts
from timelyml.ml.sharded.saving import add_saving
from timelyml.ml.sharded.stations import NO_OUTPUT
from timelyml.ml.sharded.structure import Structure
from timelyml.ml.sharded.updates import (
    ClippedUpdate,
    Contributing,
    ReportState,
    SendGradients,
    Source,
    Start,
    Update,
)


@dataclass(frozen=True, slots=True)
class Learnt:
    """The parameters of a dataflow function, and what becomes of their gradients.

    Attributes:
        structure: Of all parameters.
        params: Their leaves, arrays.
        trained: Places of those that have gradients.
        optimiser: Updates them; None: gradients are given out.
        clip_norm: Clip gradients by their global norm.
        checkpoints: Where and how often all of it is saved.
    """

    structure: Structure
    params: Sequence[Any]
    trained: frozenset[int]
    optimiser: Optimiser | None = None
    clip_norm: float | None = None
    checkpoints: Checkpoints | None = None
    resumed: Checkpoint | None = None
    """Its parameters are `params`; its state goes to who holds them."""


@dataclass(slots=True, eq=False)
class Learning:
    """Adds the rules of updates to operators, and then what stands beside them."""

    builder: GraphBuilder
    learnt: Learnt
    tick: LoopRef
    is_dense: bool
    """Whether the loss comes at every time."""
    asked: LoopRef = field(init=False)
    norm: LoopRef | None = field(init=False, default=None)
    norms: list[tuple[Frame, int]] = field(default_factory=list)
    told: list[tuple[Frame, int]] = field(default_factory=list)
    saved: list[tuple[Frame, int]] = field(default_factory=list)
    given: list[tuple[Frame, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.learnt.optimiser is not None:
            self.asked = self.builder.feedback(by=0, num_shards=1)
            if self.learnt.clip_norm is not None:
                self.norm = self.builder.feedback(by=0, num_shards=1)

    def add(self, frame: Frame, sources: Sequence[Source]) -> Start:
        """Add the rules of an operator; give what puts its parameters in place.

        Args:
            frame: The operator, its stations' rules added.
            sources: Stations with gradients.
        """
        start = start_of(frame, self.learnt)
        trained = set(frame.parameters) & self.learnt.trained
        made = Contributing(tuple(sorted(trained)), tuple(sources))
        ports = tuple(port for source in sources for port in source.ports)
        ports = ports or (self.tick_port(frame),)
        if self.learnt.optimiser is None:
            self._add_give(frame, made, ports)
            return start
        owned = Owned(self.learnt.optimiser, self.learnt.structure, made.trained)
        told = tuple((p, parts.own) for p, parts in _parts_of(frame).items() if parts)
        step = Step.of(owned, self.learnt.clip_norm, told)
        self._add_update(frame, step, made, ports)
        self._add_tell(frame, owned)
        resumed = self.learnt.resumed
        return Start(start.params, step, None if resumed is None else resumed.state)

    def tick_port(self, frame: Frame) -> int:
        """Let an operator hear of every time that has a loss."""
        return frame.port(self.tick.stream, Broadcast(dense=self.is_dense))

    def finish(
        self, name: str, loss: StreamRef
    ) -> tuple[StreamRef | None, StreamRef | None]:
        """Add what stands beside; give the streams of weights and of checkpoints."""
        if self.norm is not None:
            squares = [frame.outputs[output] for frame, output in self.norms]
            norm = add_norm(
                self.builder, f"{name} norm", squares, is_dense=self.is_dense
            )
            self.norm.connect(norm)
        if self.learnt.optimiser is None:
            return None, None
        checkpoints, resumed = self.learnt.checkpoints, self.learnt.resumed
        end = add_ending(
            self.builder,
            f"{name} end",
            loss,
            is_dense=self.is_dense,
            every=0 if checkpoints is None else checkpoints.every,
            first=0 if resumed is None else resumed.step,
        )
        self.asked.connect(end)
        told = [frame.outputs[output] for frame, output in self.told]
        if not told:
            return None, None
        weights = add_weights(self.builder, f"{name} weights", told)
        if checkpoints is None:
            return weights, None
        states = [frame.outputs[output] for frame, output in self.saved]
        return weights, add_saving(self.builder, f"{name} save", states, checkpoints)

    def _add_update(
        self, frame: Frame, step: Step, made: Contributing, ports: tuple[int, ...]
    ) -> None:
        every = tuple(range(frame.num_outputs))
        shared = frozenset(p.index for p in frame.parameters.values() if not p.is_split)
        if self.norm is None:
            update = Update(step, made, shared, NO_OUTPUT)
            frame.rules.append(Rule(ports, update, later=every))
            return
        output = frame.output()
        self.norms.append((frame, output))
        update = Update(step, made, shared, output)
        frame.rules.append(Rule(ports, update, outputs=there(output)))
        port = frame.port(self.norm.stream, Broadcast(dense=self.is_dense))
        frame.rules.append(Rule((port,), ClippedUpdate(step, port), later=every))

    def _add_give(
        self, frame: Frame, made: Contributing, ports: tuple[int, ...]
    ) -> None:
        every = tuple(range(frame.num_outputs))
        outputs = [
            (place, frame.output(), _parts_of(frame)[place]) for place in made.trained
        ]
        self.given += [(frame, place, output) for place, output, _ in outputs]
        to = tuple(output for _, output, _ in outputs)
        rule = Rule(ports, SendGradients.of(made, outputs), outputs=to, later=every)
        frame.rules.append(rule)

    def _add_tell(self, frame: Frame, owned: Owned) -> None:
        port = frame.port(self.asked.stream, Broadcast())
        output = frame.output()
        saved = NO_OUTPUT if self.learnt.checkpoints is None else frame.output()
        held = tuple(_parts_of(frame).items())
        names = tuple(names_of(self.learnt.structure))
        frame.rules.append(
            Rule(
                tuple(range(len(frame.inputs))),  # after everything else of a time
                ReportState(port, output, held, owned, names, saved),
                outputs=there(output, saved),
                asked_by=(port,),
            )
        )
        self.told.append((frame, output))
        if saved != NO_OUTPUT:
            self.saved.append((frame, saved))


def start_of(frame: Frame, learnt: Learnt) -> Start:
    """Give what puts the parameters of an operator in place."""
    return Start(
        tuple(
            (place, parts, learnt.params[place])
            for place, parts in _parts_of(frame).items()
        ),
        None,
    )


def _parts_of(frame: Frame) -> dict[int, Parts | None]:
    """Say how each parameter is shared out, if it is."""
    every = frame.parameters.values()
    return {each.index: each.parts(frame.num_shards) for each in every}
