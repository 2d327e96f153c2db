"""Proves a schedule before it runs, or says what is wrong with it.

Every operation once, on the rank of its stage, after what it reads; transfers that
match; no deadlock over the channels there are; activations within a bound. Whoever
interprets a schedule that passed need not check anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from timelyml.errors import ScheduleError
from timelyml.ml.pipeline.actions import (
    Action,
    Op,
    Schedule,
    made_by,
    needed_by,
    received_for,
    sent_by,
)
from timelyml.ml.pipeline.channels import Channels, execute, value_of
from timelyml.ml.pipeline.simulate import PerStage, live_levels, refuse_deadlock

REASONS = (
    "placement",
    "missing",
    "duplicate",
    "range",
    "row",
    "order",
    "communication",
)
"""Words for what is wrong with the text of a schedule, the telling ones first."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong; `row` is None if something is not there at all."""

    reason: str
    rank: int
    row: int | None
    action: str
    what: str

    def __str__(self) -> str:
        row = "" if self.row is None else f", row {self.row}"
        return f"rank {self.rank}{row}: {self.what}"


def validate(
    schedule: Schedule,
    *,
    channels: Channels | None = None,
    max_live: PerStage | None = None,
    sizes: PerStage = 1,
) -> None:
    """Return if `schedule` can run; otherwise raise and say why.

    Args:
        schedule: A plan of computations, or one with transfers written out.
        channels: What the ranks have between them; by default one message deep, one
            channel per stage edge and direction.
        max_live: The most activations that a rank may hold at once, one number for
            all or a tuple with one for each; None for no bound.
        sizes: What the activations of one microbatch count, by stage.

    Raises:
        ScheduleError: `reason` is one of `REASONS` or `memory`; `faults` tells all of
            them, worst first.
        ScheduleDeadlockError: Ranks wait for each other; `cycle` tells how.
    """
    faults = find_faults(schedule)
    if faults:
        expected = "every operation once, after what it reads; mend the rows"
        raise _error(schedule, faults, expected)
    channels = Channels() if channels is None else channels
    refuse_deadlock(schedule, execute(schedule, channels))
    if max_live is not None:
        excess = list(_excess(schedule, max_live, sizes))
        if excess:
            expected = f"at most {max_live!r}; allow more or hold fewer at once"
            raise _error(schedule, excess, expected)


def find_faults(schedule: Schedule) -> list[Fault]:
    """Return all that is wrong with the rows themselves, worst first."""
    finders = (_misplaced, _uncounted, _ill_formed, _out_of_order, _misconnected)
    faults = [fault for find in finders for fault in find(schedule)]
    return sorted(faults, key=lambda fault: REASONS.index(fault.reason))


def needed_depth(
    schedule: Schedule, *, shared: bool = False, posted: bool = False
) -> int | None:
    """Return the least depth of channels that keeps a valid schedule from deadlock.

    None if none is enough: then some message stands for ever behind one that is
    wanted later.
    """

    def is_stuck(depth: int | None) -> bool:
        channels = Channels(depth=depth, shared=shared, posted=posted)
        return bool(execute(schedule, channels).waits)

    if is_stuck(None):
        return None
    low, high = 0, 1
    while is_stuck(high):
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if is_stuck(middle) else (low, middle)
    return low


def _error(schedule: Schedule, faults: list[Fault], expected: str) -> ScheduleError:
    first, *others = faults
    more = f" (and {len(others)} more)" if others else ""
    return ScheduleError(
        f"{schedule.name} cannot run; got {first}{more}; expected {expected}",
        reason=first.reason,
        rank=first.rank,
        row=first.row,
        action=first.action,
        faults=tuple(map(str, faults)),
    )


def _all_numbered(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank in range(schedule.num_ranks):
        for row, action in schedule.numbered(rank):
            yield rank, row, action


def _misplaced(schedule: Schedule) -> Iterator[Fault]:
    for stage, home in enumerate(schedule.rank_of_stage):
        if not 0 <= home < schedule.num_ranks:
            what = f"stage {stage} lives on a rank that does not exist"
            yield Fault("placement", home, None, f"stage {stage}", what)
    for rank, row, action in _all_numbered(schedule):
        text = str(action)
        if action.stage >= schedule.num_stages:
            what = f"{text} is of a stage that does not exist"
            yield Fault("range", rank, row, text, what)
        elif schedule.rank_of_stage[action.stage] != rank:
            home = schedule.rank_of_stage[action.stage]
            what = f"{text} is of a stage that lives on rank {home}"
            yield Fault("placement", rank, row, text, what)
        if action.microbatch >= schedule.num_microbatches:
            what = f"{text} is of a microbatch beyond {schedule.num_microbatches - 1}"
            yield Fault("range", rank, row, text, what)


def _uncounted(schedule: Schedule) -> Iterator[Fault]:
    """Find computations that are missing or repeated."""
    seen: set[Action] = set()
    for rank, row, action in _all_numbered(schedule):
        text = str(action)
        if action in seen:
            yield Fault("duplicate", rank, row, text, f"{text} is done before")
        elif action.op in (Op.INPUT, Op.WEIGHT):
            whole = Action(action.stage, Op.BACKWARD, action.microbatch)
            if whole in seen:
                what = f"{text} is part of {whole}, done before"
                yield Fault("duplicate", rank, row, text, what)
        elif action.op is Op.BACKWARD:
            for part in (Op.INPUT, Op.WEIGHT):
                half = Action(action.stage, part, action.microbatch)
                if half in seen:
                    what = f"{text} repeats {half}, done before"
                    yield Fault("duplicate", rank, row, text, what)
        seen.add(action)
    for stage, rank in enumerate(schedule.rank_of_stage):
        for microbatch in range(schedule.num_microbatches):
            for op in _missing_ops(stage, microbatch, seen):
                text = str(Action(stage, op, microbatch))
                yield Fault("missing", rank, None, text, f"{text} is never done")


def _missing_ops(stage: int, microbatch: int, seen: set[Action]) -> Iterator[Op]:
    done = {op for op in Op if Action(stage, op, microbatch) in seen}
    if Op.FORWARD not in done:
        yield Op.FORWARD
    if Op.BACKWARD in done:
        return
    parts = {Op.INPUT, Op.WEIGHT} - done
    if len(parts) == 2:
        yield Op.BACKWARD
    else:
        yield from parts


def _ill_formed(schedule: Schedule) -> Iterator[Fault]:
    for rank, rows in enumerate(schedule.rows):
        for index, row in enumerate(rows):
            if len(row) > 1 and any(action.op.is_compute for action in row):
                text = "+".join(map(str, row))
                what = f"{text} holds a computation beside something else"
                yield Fault("row", rank, index, text, what)


def _out_of_order(schedule: Schedule) -> Iterator[Fault]:
    """Find computations that stand before what they read from their own rank."""
    for rank in range(schedule.num_ranks):
        made: set[Action] = set()
        for row, action in _of_known_stages(schedule, rank):
            if not action.op.is_compute:
                continue
            for value in needed_by(action, schedule.num_stages):
                if schedule.rank_of_stage[value.stage] == rank and value not in made:
                    text, what = str(action), f"{action} runs without {value} before it"
                    yield Fault("order", rank, row, text, what)
            made.add(made_by(action))


def _misconnected(schedule: Schedule) -> Iterator[Fault]:
    """Find transfers that are missing, not needed, or on the wrong side of their use."""
    if not schedule.has_communications:
        return
    for rank in range(schedule.num_ranks):
        wanted = dict(_wanted_transfers(schedule, rank))
        known: set[Action] = set()
        for row, action in _of_known_stages(schedule, rank):
            what = _fault_of_transfer(schedule, action, wanted, known)
            if what is not None:
                yield Fault("communication", rank, row, str(action), what)
            is_receive = action.op.is_receive
            known.add(value_of(action) if is_receive else made_by(action))
        done = {action for _, action in schedule.numbered(rank)}
        for action in sorted(wanted.keys() - done):
            text = str(action)
            yield Fault("communication", rank, None, text, f"{text} is never done")


def _fault_of_transfer(
    schedule: Schedule,
    action: Action,
    wanted: dict[Action, Action],
    known: set[Action],
) -> str | None:
    if action.op.is_compute:
        receive = received_for(action, schedule.num_stages)
        if receive in wanted and wanted[receive] not in known:
            return f"{action} runs without {receive} before it"
    elif action not in wanted:
        return f"{action} carries nothing that is needed"
    elif action.op.is_send and wanted[action] not in known:
        return f"{action} stands before {wanted[action]}, which it sends"
    return None


def _wanted_transfers(schedule: Schedule, rank: int) -> Iterator[tuple[Action, Action]]:
    """Yield each transfer that the computations of `rank` need, with its value."""
    for _, action in _of_known_stages(schedule, rank):
        send = sent_by(action, schedule.num_stages)
        if send is not None and schedule.crosses_ranks(send):
            yield send, made_by(action)
        receive = received_for(action, schedule.num_stages)
        if receive is not None and schedule.crosses_ranks(receive):
            yield receive, value_of(receive)


def _of_known_stages(schedule: Schedule, rank: int) -> Iterator[tuple[int, Action]]:
    return (
        (row, action)
        for row, action in schedule.numbered(rank)
        if action.stage < schedule.num_stages
    )


def _excess(schedule: Schedule, max_live: PerStage, sizes: PerStage) -> Iterator[Fault]:
    for rank in range(schedule.num_ranks):
        bound = max_live[rank] if isinstance(max_live, tuple) else max_live
        for row, action, live in live_levels(schedule, rank, sizes):
            if live > bound:
                what = f"{action} makes {live} live activations, more than {bound}"
                yield Fault("memory", rank, row, str(action), what)
                break
