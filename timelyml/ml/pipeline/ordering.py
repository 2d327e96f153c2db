"""In which order a single client starts the actions of all ranks.

Nothing waits for a reply, so any order does that begins each rank's rows in order and
nothing before what it reads: calls of a rank are launched in the order in which they were
started, also where one waits for a value of another island that comes late. Other calls
on an island are launched as they can be, by its policy; the order of a simulated run keeps
ranks that share one from standing behind each other.
"""

from __future__ import annotations

from collections import deque

from timelyml.ml.pipeline.actions import Action, Schedule
from timelyml.ml.pipeline.channels import steps_of
from timelyml.ml.pipeline.simulate import Costs, simulate


def issue_order(schedule: Schedule, costs: Costs | None = None) -> tuple[Action, ...]:
    """Return every action of a valid schedule, transfers included.

    Receives stand before the computation that follows them on their rank, sends after
    the one before; so a receive may come before its send, and only announces itself.

    >>> from timelyml.ml.pipeline.schedules import gpipe
    >>> [str(action) for action in issue_order(gpipe(2, 1))]
    ['0F0', '0SEND_F0', '1RECV_F0', '1F0', '1B0', '1SEND_B0', '0RECV_B0', '0B0']
    """
    spans = simulate(schedule, costs).spans
    in_time = sorted(spans, key=lambda span: (span.start, span.rank))
    rows = [
        deque(action for _, row in steps_of(schedule, rank) for action in row)
        for rank in range(schedule.num_ranks)
    ]
    order: list[Action] = []
    for span in in_time:
        left = rows[span.rank]
        while left[0] != span.action:
            order.append(left.popleft())
        order.append(left.popleft())
        while left and left[0].op.is_send:
            order.append(left.popleft())
    for left in rows:
        order.extend(left)
    return tuple(order)
