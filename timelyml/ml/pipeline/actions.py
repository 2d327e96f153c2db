"""A pipeline schedule as data: which rank does what, in which order.

An action is one operation of one stage on one microbatch. A schedule gives each rank
a list of rows; a row is one action, several transfers posted together, or nothing (an
explicit bubble). Schedules are plain values: generators make them, the validator
proves them, the simulator times them, and the runtime only interprets them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self, TypeAlias

from timelyml.errors import ScheduleError


class Op(StrEnum):
    """What an action does; the value is its spelling in a schedule file."""

    FORWARD = "F"
    BACKWARD = "B"
    """Backward for inputs and weights at once: `INPUT` and `WEIGHT` undivided."""
    INPUT = "I"
    WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def is_compute(self) -> bool:
        """Whether the action occupies its rank's device."""
        return len(self.value) == 1

    @property
    def is_send(self) -> bool:
        """Whether the action hands a value to the channel of a stage edge."""
        return self.value.startswith("SEND")

    @property
    def is_receive(self) -> bool:
        """Whether the action takes a value from the channel of a stage edge."""
        return self.value.startswith("RECV")


_SPELLING = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One operation of one stage on one microbatch.

    A send and a receive carry the stage that performs them: stage 0 does `0SEND_F3`
    and stage 1 does `1RECV_F3`.

    >>> str(Action(0, Op.SEND_F, 3)), Action.parse("1RECV_F3").peer_stage
    ('0SEND_F3', 0)
    """

    stage: int
    op: Op
    microbatch: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < 0:
            raise ScheduleError(
                f"action has a negative number; got {self.stage}{self.op.value}"
                f"{self.microbatch}; expected stage and microbatch of 0 or more; "
                f"count both from 0",
                reason="range",
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `<stage><op><microbatch>`.

        Raises:
            ScheduleError: The text is not spelt so.
        """
        match = _SPELLING.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"schedule has an unknown action; got {text!r}; expected "
                f"<stage><op><microbatch> with op one of F, B, I, W, SEND_F, RECV_F, "
                f"SEND_B, RECV_B; correct the spelling",
                reason="spelling",
                action=text,
            )
        return cls(int(match[1]), Op(match[2]), int(match[3]))

    @property
    def peer_stage(self) -> int:
        """The stage at the other end of a send's or receive's edge."""
        upwards = self.op in (Op.SEND_F, Op.RECV_B)
        return self.stage + 1 if upwards else self.stage - 1

    @property
    def counterpart(self) -> Action:
        """The receive that takes what this send sent, and the other way round."""
        kind = "RECV" if self.op.is_send else "SEND"
        return Action(self.peer_stage, Op(kind + self.op.value[4:]), self.microbatch)


Row: TypeAlias = tuple[Action, ...]
"""One action, several transfers posted together, or () for an explicit bubble."""


def made_by(action: Action) -> Action:
    """Name the value that a computation hands on: `I` stands for an input gradient.

    A full backward makes the same gradient as its input part alone, so consumers
    need not know whether the stage below splits its backward.
    """
    return replace(action, op=Op.INPUT) if action.op is Op.BACKWARD else action


def needed_by(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return the values that a computation reads, as `made_by` names them.

    >>> [str(value) for value in needed_by(Action(1, Op.BACKWARD, 0), num_stages=4)]
    ['1F0', '2I0']
    """
    stage, microbatch = action.stage, action.microbatch
    if action.op is Op.FORWARD:
        return (Action(stage - 1, Op.FORWARD, microbatch),) if stage else ()
    if action.op is Op.WEIGHT:
        return (Action(stage, Op.INPUT, microbatch),)
    own = (Action(stage, Op.FORWARD, microbatch),)
    if stage == num_stages - 1:
        return own
    return (*own, Action(stage + 1, Op.INPUT, microbatch))


def sent_by(action: Action, num_stages: int) -> Action | None:
    """Return the send that carries a computation's value to the next stage, if any."""
    if action.op is Op.FORWARD and action.stage < num_stages - 1:
        return Action(action.stage, Op.SEND_F, action.microbatch)
    if action.op in (Op.BACKWARD, Op.INPUT) and action.stage > 0:
        return Action(action.stage, Op.SEND_B, action.microbatch)
    return None


def received_for(action: Action, num_stages: int) -> Action | None:
    """Return the receive that brings a computation its neighbour's value, if any."""
    if action.op is Op.FORWARD and action.stage > 0:
        return Action(action.stage, Op.RECV_F, action.microbatch)
    if action.op in (Op.BACKWARD, Op.INPUT) and action.stage < num_stages - 1:
        return Action(action.stage, Op.RECV_B, action.microbatch)
    return None


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rows of every rank, and where each stage lives.

    A schedule may be wrong; `validate` says so. `name` tells only people what it is.

    Attributes:
        name: Shown in errors and pictures.
        rank_of_stage: The rank that holds each stage.
        num_microbatches: Every stage handles microbatches 0 to this, exclusive.
        rows: For each rank its rows in order.
    """

    name: str
    rank_of_stage: tuple[int, ...]
    num_microbatches: int
    rows: tuple[tuple[Row, ...], ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks take part."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return len(self.rank_of_stage)

    @property
    def has_communications(self) -> bool:
        """Whether sends and receives are written out."""
        return any(not a.op.is_compute for rank in self.rows for r in rank for a in r)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, ascending."""
        return tuple(s for s, home in enumerate(self.rank_of_stage) if home == rank)

    def numbered(self, rank: int) -> Iterator[tuple[int, Action]]:
        """Yield `(row, action)` of one rank in order, bubbles left out."""
        for row, actions in enumerate(self.rows[rank]):
            for action in actions:
                yield row, action

    def crosses_ranks(self, transfer: Action) -> bool:
        """Whether a send or receive joins two ranks; within one, nothing is sent."""
        peer = transfer.peer_stage
        return self.rank_of_stage[transfer.stage] != self.rank_of_stage[peer]

    def without_bubbles(self) -> Schedule:
        """Return the same order without explicit bubbles: what a runtime executes."""
        rows = tuple(tuple(row for row in rank if row) for rank in self.rows)
        return replace(self, rows=rows)

    def to_csv(self) -> str:
        r"""Write one line per rank and one cell per row, as other projects do.

        An empty cell is a bubble; `a+b` are transfers posted together. Lines end in
        `\r\n`, as the csv format has it.
        """
        lines = (
            ",".join("+".join(map(str, row)) for row in rank) for rank in self.rows
        )
        return "".join(f"{line}\r\n" for line in lines)

    @classmethod
    def from_csv(
        cls,
        text: str,
        *,
        name: str = "schedule",
        rank_of_stage: tuple[int, ...] | None = None,
        num_microbatches: int | None = None,
    ) -> Self:
        """Read what `to_csv` writes; the text may be wrong as a schedule.

        Args:
            text: One line per rank.
            name: Shown in errors.
            rank_of_stage: Where the stages live; by default where each first appears.
            num_microbatches: By default the forwards of stage 0 tell.

        Raises:
            ScheduleError: A cell is not spelt as an action, or nothing tells where a
                stage lives.
        """
        rows = tuple(
            tuple(_parse_cell(cell, rank, row) for row, cell in enumerate(_cells(line)))
            for rank, line in enumerate(text.splitlines())
        )
        if rank_of_stage is None:
            rank_of_stage = _homes(rows, name)
        if num_microbatches is None:
            num_microbatches = _count_microbatches(rows)
        return cls(name, tuple(rank_of_stage), num_microbatches, rows)


def _cells(line: str) -> list[str]:
    return line.split(",") if line else []


def _parse_cell(cell: str, rank: int, row: int) -> Row:
    if not cell.strip():
        return ()
    try:
        return tuple(Action.parse(part.strip()) for part in cell.split("+"))
    except ScheduleError as error:
        raise ScheduleError(
            f"rank {rank}, row {row}: {error}",
            reason="spelling",
            rank=rank,
            row=row,
            action=cell,
        ) from None


def _homes(rows: tuple[tuple[Row, ...], ...], name: str) -> tuple[int, ...]:
    homes: dict[int, int] = {}
    for rank, program in enumerate(rows):
        for row in program:
            for action in row:
                homes.setdefault(action.stage, rank)
    for stage in range(max(homes, default=-1) + 1):
        if stage not in homes:
            raise ScheduleError(
                f"{name} never mentions stage {stage}; got stages {sorted(homes)}; "
                f"expected every stage up to the last; pass rank_of_stage",
                reason="placement",
            )
    return tuple(homes[stage] for stage in range(len(homes)))


def _count_microbatches(rows: tuple[tuple[Row, ...], ...]) -> int:
    # Not the largest number anywhere: a wrong plan may run one microbatch too many.
    first = {
        action.microbatch
        for program in rows
        for row in program
        for action in row
        if action.stage == 0 and action.op is Op.FORWARD
    }
    return max(first, default=-1) + 1
