"""Executes a schedule over given channels: when each action runs, or who waits for whom.

A pipeline over FIFO channels is deterministic: which actions get done does not depend
on how fast they are. So one execution under any times proves the order free of
deadlock for all times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from timelyml.errors import ScheduleError
from timelyml.ml.pipeline.actions import (
    Action,
    Op,
    Row,
    Schedule,
    made_by,
    needed_by,
)
from timelyml.ml.pipeline.lowering import late_rows


@dataclass(frozen=True, slots=True)
class Channels:
    """How sends and receives of two ranks meet.

    Attributes:
        depth: Messages that a channel holds beyond those in the ranks' hands. With 0
            a send blocks until its receive is posted; None means without limit.
        shared: One FIFO per ordered pair of ranks, instead of one per stage edge and
            direction. Then a message may stand behind one that is wanted later.
        posted: A receive only announces itself, and its rank waits where the value is
            used. Otherwise the rank waits in the receive.
    """

    depth: int | None = 1
    shared: bool = False
    posted: bool = False

    def __post_init__(self) -> None:
        if self.depth is not None and self.depth < 0:
            raise ScheduleError(
                f"channels have a negative depth; got {self.depth}; expected 0 or "
                f"more, or None; pass None for channels without limit",
                reason="range",
            )


@dataclass(frozen=True, slots=True)
class Span:
    """One computation on one rank, from `start` to `end`."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Wait:
    """An action that cannot go on until another rank does something."""

    rank: int
    row: int
    action: Action
    on_rank: int
    until: str

    def __str__(self) -> str:
        return f"rank {self.rank} row {self.row} {self.action} waits until {self.until}"


@dataclass(frozen=True, slots=True)
class Execution:
    """What came of executing a schedule.

    Attributes:
        spans: Every computation that ran, rank by rank in order.
        waits: Every action that is stuck; empty if all rows ran.
    """

    spans: tuple[Span, ...]
    waits: tuple[Wait, ...]

    def wait_cycle(self) -> tuple[Wait, ...]:
        """Return waits each of which waits for the next, the last for the first.

        Empty if nothing is stuck. If the ranks wait for one that has finished, the
        chain of waits that leads to it.
        """
        first: dict[int, Wait] = {}
        for wait in self.waits:
            first.setdefault(wait.rank, wait)
        chain: list[Wait] = []
        rank = min(first, default=-1)
        while rank in first and first[rank] not in chain:
            chain.append(first[rank])
            rank = first[rank].on_rank
        return tuple(chain[chain.index(first[rank]) :] if rank in first else chain)


def execute(
    schedule: Schedule,
    channels: Channels,
    *,
    duration: Callable[[Action], float] = lambda _: 1,
    latency: float = 0,
) -> Execution:
    """Run every row as soon as its rank is free and its messages are there.

    A plan without transfers receives just before use and sends just after. A send
    blocks its rank only while the channel is full.

    Args:
        schedule: Stages and microbatches must exist; `validate` checks that.
        channels: What sends and receives go through.
        duration: Time of a computation on its rank.
        latency: Time from a send to the arrival of its message.
    """
    machine = _Machine(schedule, channels, duration, latency)
    machine.run()
    return Execution(tuple(machine.spans()), tuple(machine.waits()))


@dataclass(slots=True)
class _Rank:
    """Where a rank stands: at the first of `steps`, reached at time `clock`.

    `known` and `posted` tell since when it has a value, or waits for a message.
    """

    steps: deque[tuple[int, Row]]
    clock: float = 0
    end: float = 0
    pending: list[Action] = field(default_factory=list)
    known: dict[Action, float] = field(default_factory=dict)
    posted: dict[Action, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def next_step(self) -> None:
        self.clock = self.end
        self.pending = list(self.steps[0][1]) if self.steps else []

    def finish(self, action: Action, end: float) -> None:
        self.pending.remove(action)
        self.end = max(self.end, end)


@dataclass(slots=True)
class _Channel:
    """Messages on their way, and the times at which free buffers became free."""

    messages: deque[tuple[Action, float]]
    buffers: deque[float] | None


class _Machine:
    def __init__(
        self,
        schedule: Schedule,
        channels: Channels,
        duration: Callable[[Action], float],
        latency: float,
    ) -> None:
        self._schedule = schedule
        self._model = channels
        self._duration = duration
        self._latency = latency
        self._ranks = [_Rank(deque(steps_of(schedule, r))) for r in self._all()]
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._ready = deque(self._all())

    def _all(self) -> range:
        return range(self._schedule.num_ranks)

    def run(self) -> None:
        for state in self._ranks:
            state.next_step()
        while self._ready:
            self._advance(self._ready.popleft())

    def spans(self) -> list[Span]:
        return [span for state in self._ranks for span in state.spans]

    def waits(self) -> list[Wait]:
        return [
            Wait(rank, state.steps[0][0], action, *self._reason(rank, action))
            for rank, state in enumerate(self._ranks)
            for action in state.pending
        ]

    def _advance(self, rank: int) -> None:
        state = self._ranks[rank]
        while state.steps:
            before = 0
            while len(state.pending) != before:  # one half may let the other go
                before = len(state.pending)
                for action in tuple(state.pending):
                    self._attempt(rank, action)
            if state.pending:
                return
            state.steps.popleft()
            state.next_step()

    def _attempt(self, rank: int, action: Action) -> None:
        if action.op.is_compute:
            self._compute(rank, action)
        elif action.op.is_send:
            self._send(rank, action)
        else:
            self._receive(rank, action)

    def _compute(self, rank: int, action: Action) -> None:
        state = self._ranks[rank]
        needs = needed_by(action, self._schedule.num_stages)
        if all(value in state.known for value in needs):
            start = max(state.clock, *(state.known[value] for value in needs), 0)
            end = start + self._duration(action)
            state.spans.append(Span(rank, action, start, end))
            state.known[made_by(action)] = end
            state.finish(action, end)

    def _send(self, rank: int, action: Action) -> None:
        mine, theirs = self._ranks[rank], self._ranks[self._peer(action)]
        receive = action.counterpart
        if self._model.depth == 0:
            if receive in theirs.posted:
                end = max(mine.clock, theirs.posted[receive]) + self._latency
                mine.finish(action, end)
                self._take(receive, end)
            return
        channel = self._channel(action)
        start = mine.clock
        if channel.buffers is not None:
            if not channel.buffers:
                return
            start = max(start, channel.buffers.popleft())
        channel.messages.append((receive, start + self._latency))
        mine.finish(action, start)
        self._settle(channel)

    def _receive(self, rank: int, action: Action) -> None:
        state = self._ranks[rank]
        if action in state.posted:
            return  # waits for its message
        state.posted[action] = state.clock
        if self._model.posted:
            state.finish(action, state.clock)
        if self._model.depth == 0:
            self._ready.append(self._peer(action))
        else:
            self._settle(self._channel(action.counterpart))

    def _settle(self, channel: _Channel) -> None:
        """Hand over messages from the head of a channel while they are waited for."""
        while channel.messages:
            receive, arrival = channel.messages[0]
            taker = self._ranks[self._home(receive)]
            if receive not in taker.posted:
                return
            channel.messages.popleft()
            taken = max(arrival, taker.posted[receive])
            if channel.buffers is not None:
                channel.buffers.append(taken)
            self._take(receive, taken)
            self._ready.append(self._peer(receive))

    def _take(self, receive: Action, time: float) -> None:
        rank = self._home(receive)
        state = self._ranks[rank]
        state.known[value_of(receive)] = time
        if receive in state.pending:
            state.finish(receive, time)
        self._ready.append(rank)

    def _home(self, action: Action) -> int:
        return self._schedule.rank_of_stage[action.stage]

    def _peer(self, action: Action) -> int:
        return self._schedule.rank_of_stage[action.peer_stage]

    def _channel(self, send: Action) -> _Channel:
        key = (send.stage, send.peer_stage)
        if self._model.shared:
            homes = self._schedule.rank_of_stage
            key = (homes[send.stage], homes[send.peer_stage])
        if key not in self._channels:
            depth = self._model.depth
            free = None if depth is None else deque([0.0] * depth)
            self._channels[key] = _Channel(deque(), free)
        return self._channels[key]

    def _reason(self, rank: int, action: Action) -> tuple[int, str]:
        if action.op.is_compute:
            waited = [r for r in self._ranks[rank].posted if self._is_input(r, action)]
            if not waited:
                return rank, "its inputs are there, which nothing brings"
            action = waited[0]
        peer = self._peer(action)
        if action.op.is_receive:
            messages = self._channel(action.counterpart).messages
            if not messages:
                return peer, f"rank {peer} reaches {action.counterpart}"
            head = messages[0][0]
            return rank, f"{head}, ahead of it in the same channel, is taken"
        if self._model.depth == 0:
            return peer, f"rank {peer} reaches {action.counterpart}"
        head = self._channel(action).messages[0][0]
        return peer, f"rank {peer} takes {head} from the full channel"

    def _is_input(self, receive: Action, action: Action) -> bool:
        value = value_of(receive)
        is_needed = value in needed_by(action, self._schedule.num_stages)
        return is_needed and value not in self._ranks[self._home(receive)].known


def steps_of(schedule: Schedule, rank: int) -> list[tuple[int, Row]]:
    """Return `(row, actions)` of what `rank` does, transfers included."""
    if not schedule.has_communications:
        return late_rows(schedule, rank)
    return [(index, row) for index, row in enumerate(schedule.rows[rank]) if row]


def value_of(receive: Action) -> Action:
    """Name the value that a receive brings, as `made_by` names it."""
    op = Op.FORWARD if receive.op is Op.RECV_F else Op.INPUT
    return Action(receive.peer_stage, op, receive.microbatch)
