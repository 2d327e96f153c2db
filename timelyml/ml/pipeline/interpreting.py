"""Interprets the actions of a schedule: each one is a call that nobody waits for.

Calls say which rank they are of: those of one are launched in the order of the schedule.
A value goes from stage to stage as a handle. A send puts it into the channel of its edge
and direction, a receive says that it is expected there, and the call that takes it has
it moved. The interpreter checks nothing that the validator has proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from timelyml.ml.pipeline.actions import Action, Op, Schedule, made_by, received_for
from timelyml.ml.pipeline.channels import value_of
from timelyml.ml.pipeline.observing import PipelineRecord
from timelyml.ml.pipeline.stages import Stage, StageFunctions


@dataclass(slots=True)
class _Live:
    """What a stage holds of a microbatch between its forward pass and its last part."""

    functions: StageFunctions
    given: Any
    saved: tuple[Any, ...]
    carried: tuple[Any, ...] = ()


@dataclass(slots=True)
class Pass:
    """One run of a schedule over the microbatches of one replica.

    Attributes:
        params: Weights of each stage.
        gradients: Sums so far, of each stage; replaced as microbatches are done.
        inputs: Of the first stage, for each microbatch.
        targets: Of the loss, for each microbatch.
        totals: The loss of each microbatch that is through, summed over what counts.
        counts: How much counted in each.
        first_order: Number of the order in which the first rank launches its actions;
            those of the other ranks follow.
    """

    schedule: Schedule
    stages: Sequence[Stage]
    params: Sequence[Any]
    gradients: list[Any]
    inputs: Sequence[Any]
    targets: Sequence[Any]
    record: PipelineRecord
    first_order: int = 1
    totals: dict[int, Any] = field(default_factory=dict)
    counts: dict[int, Any] = field(default_factory=dict)
    _values: dict[Action, Any] = field(default_factory=dict)
    _channels: dict[Action, Any] = field(default_factory=dict)
    _expected: set[Action] = field(default_factory=set)
    _live: dict[tuple[int, int], _Live] = field(default_factory=dict)

    def do(self, action: Action) -> None:
        """Start one action."""
        if action.op.is_send:
            receive = action.counterpart
            self._channels[receive] = self._values.pop(value_of(receive))
        elif action.op.is_receive:
            self._expected.add(action)
        else:
            tick = self._compute(action)
            rank = self.schedule.rank_of_stage[action.stage]
            self.record.started(rank, action, tick)

    def _compute(self, action: Action) -> Any:
        if action.op is Op.FORWARD:
            return self._forward(action)
        if action.op is Op.BACKWARD:
            return self._backward(action)
        if action.op is Op.INPUT:
            return self._input_part(action)
        return self._weight_part(action)

    def _forward(self, action: Action) -> Any:
        stage, params = self.stages[action.stage], self.params[action.stage]
        x = self.inputs[action.microbatch]
        if not stage.is_first:
            x = self._taken(
                action, Action(action.stage - 1, Op.FORWARD, action.microbatch)
            )
        extra = (self.targets[action.microbatch],) if stage.has_loss else ()
        functions = stage.functions_for(params, x, extra)
        y, saved, tick = functions.forward.in_order(
            self._order(action), params, x, extra
        )
        given = (params, x, extra) if stage.is_first else (params, extra)
        self._live[action.stage, action.microbatch] = _Live(functions, given, saved)
        self.record.holds(action.stage, action.microbatch, saved)
        if stage.has_loss:
            self.totals[action.microbatch], self.counts[action.microbatch] = y
        else:
            self._values[made_by(action)] = y
        return tick

    def _backward(self, action: Action) -> Any:
        live = self._live.pop((action.stage, action.microbatch))
        dx, self.gradients[action.stage], tick = live.functions.backward.in_order(
            self._order(action),
            live.given,
            live.saved,
            self._cotangents(action),
            self.gradients[action.stage],
        )
        self._hand_down(action, dx)
        return tick

    def _input_part(self, action: Action) -> Any:
        live = self._live[action.stage, action.microbatch]
        dx, live.carried, tick = live.functions.input_part.in_order(
            self._order(action), live.given, live.saved, self._cotangents(action)
        )
        live.saved = tuple(live.saved[i] for i in live.functions.kept)
        self.record.holds(action.stage, action.microbatch, live.carried)
        self._hand_down(action, dx)
        return tick

    def _weight_part(self, action: Action) -> Any:
        live = self._live.pop((action.stage, action.microbatch))
        self.gradients[action.stage], tick = live.functions.weight_part.in_order(
            self._order(action),
            live.given,
            live.saved,
            live.carried,
            self.gradients[action.stage],
        )
        return tick

    def _order(self, action: Action) -> int:
        """Return which order an action is part of: that of its rank."""
        return self.first_order + self.schedule.rank_of_stage[action.stage]

    def _hand_down(self, action: Action, dx: tuple[Any, ...]) -> None:
        if action.stage:
            self._values[made_by(action)] = dx

    def _cotangents(self, action: Action) -> tuple[Any, ...]:
        if self.stages[action.stage].has_loss:
            return ()
        above = Action(action.stage + 1, Op.INPUT, action.microbatch)
        taken: tuple[Any, ...] = self._taken(action, above)
        return taken

    def _taken(self, action: Action, value: Action) -> Any:
        receive = received_for(action, self.schedule.num_stages)
        if receive is None or not self.schedule.crosses_ranks(receive):
            return self._values.pop(value)
        self._expected.remove(receive)
        return self._channels.pop(receive)
