"""Writes out the transfers of a plan of computations.

There are two places for a receive. *Early*: where its sender's send falls, so that
both ends of every pair of ranks agree on the order; such a plan runs on channels
without any buffer, but a rank may wait for a value that it does not need yet.
*Late*: just before the value is used; nothing waits too soon, but crossing sends need
buffers, or must be posted together.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from timelyml.errors import ScheduleError
from timelyml.ml.pipeline.actions import (
    Action,
    Row,
    Schedule,
    made_by,
    needed_by,
    received_for,
    sent_by,
)


def with_early_receives(schedule: Schedule) -> Schedule:
    """Write each receive where the sending rank's send falls.

    Ranks take turns, one computation a turn, and a send puts its receive at the end
    of what the receiver has so far. Bubbles are left out.

    Raises:
        ScheduleError: A computation waits for a value that no rank makes in time.

    Source:
        The plans with communications of PyTorch's pipelining, which this equals.
    """
    _refuse_communications(schedule)
    ranks = range(schedule.num_ranks)
    left = [deque(schedule.numbered(rank)) for rank in ranks]
    lowered: list[list[Row]] = [[] for _ in ranks]
    known: list[set[Action]] = [set() for _ in ranks]
    is_moving = True
    while is_moving:
        is_moving = False
        for rank in ranks:
            if not left[rank]:
                continue
            _, action = left[rank][0]
            if known[rank].issuperset(needed_by(action, schedule.num_stages)):
                _emit(schedule, action, lowered, known)
                left[rank].popleft()
                is_moving = True
    _refuse_rest(schedule, left)
    return replace(schedule, rows=tuple(map(tuple, lowered)))


def _emit(
    plan: Schedule,
    action: Action,
    lowered: list[list[Row]],
    known: list[set[Action]],
) -> None:
    rank = plan.rank_of_stage[action.stage]
    value = made_by(action)
    lowered[rank].append((action,))
    known[rank].add(value)
    send = sent_by(action, plan.num_stages)
    if send is None:
        return
    peer = plan.rank_of_stage[send.peer_stage]
    known[peer].add(value)
    if peer != rank:
        lowered[rank].append((send,))
        lowered[peer].append((send.counterpart,))


def _refuse_rest(schedule: Schedule, left: list[deque[tuple[int, Action]]]) -> None:
    for rank, actions in enumerate(left):
        if actions:
            row, action = actions[0]
            raise ScheduleError(
                f"{schedule.name}: rank {rank} cannot reach row {row}; got {action}, "
                f"whose inputs never come; expected an order that can run; validate "
                f"the schedule to learn why",
                reason="order",
                rank=rank,
                row=row,
                action=str(action),
            )


def late_rows(schedule: Schedule, rank: int) -> list[tuple[int, Row]]:
    """Return the rows of `rank` with receives just before use, sends just after.

    Each row comes with the index of the row that it was written for.
    """
    rows: list[tuple[int, Row]] = []
    for row, action in schedule.numbered(rank):
        receive = received_for(action, schedule.num_stages)
        if receive is not None and schedule.crosses_ranks(receive):
            rows.append((row, (receive,)))
        rows.append((row, (action,)))
        send = sent_by(action, schedule.num_stages)
        if send is not None and schedule.crosses_ranks(send):
            rows.append((row, (send,)))
    return rows


def with_late_receives(schedule: Schedule, *, post_together: bool = True) -> Schedule:
    """Write each receive just before its value is used, each send just after.

    Args:
        schedule: A plan of computations.
        post_together: Put a send and the receive after it in one row where the other
            rank does the two in the opposite order: one after the other, both ranks
            would wait in their sends for ever if the channel has no buffer.

    Source:
        With `post_together`, what PyTorch's runtime does for GPipe and 1F1B.
    """
    _refuse_communications(schedule)
    programs = [
        [row for _, row in late_rows(schedule, rank)]
        for rank in range(schedule.num_ranks)
    ]
    if post_together:
        positions = {
            action: index
            for rows in programs
            for index, row in enumerate(rows)
            for action in row
        }
        programs = [_join_crossing(schedule, rows, positions) for rows in programs]
    return replace(schedule, rows=tuple(map(tuple, programs)))


def _join_crossing(
    schedule: Schedule, rows: list[Row], positions: dict[Action, int]
) -> list[Row]:
    joined: list[Row] = []
    for row in rows:
        if joined and _cross(schedule, joined[-1], row, positions):
            joined[-1] += row
        else:
            joined.append(row)
    return joined


def _cross(
    schedule: Schedule, before: Row, after: Row, positions: dict[Action, int]
) -> bool:
    """Whether two rows are an exchange that the other rank does the other way round."""
    send, receive = before[0], after[0]
    if len(before) > 1 or not (send.op.is_send and receive.op.is_receive):
        return False
    homes = schedule.rank_of_stage
    if homes[send.peer_stage] != homes[receive.peer_stage]:
        return False
    return positions[receive.counterpart] < positions[send.counterpart]


def _refuse_communications(schedule: Schedule) -> None:
    if schedule.has_communications:
        raise ScheduleError(
            f"{schedule.name} is written out already; got sends and receives; expected "
            f"computations alone; pass the plan that it was made from",
            reason="communication",
        )
