"""What the operators of random graphs do to records, as pure functions.

A record is one integer: a value, and two small countdowns that bound how often it
still goes round an outer and an inner loop. Rules say nothing of when something
happens: the simulated operators and the sequential reference share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from timelyml.progress import Summary
from timelyml.runtime.simulation.closure import Time

Emission = tuple[int, Time, int]
"""An output, a time and a record."""

MAX_COUNTDOWN = 3


class Kind(Enum):
    """Families of rules."""

    SOURCE = "source"
    MAP = "map"  # every record becomes another; any number of inputs
    FILTER = "filter"
    FLAT_MAP = "flat_map"
    BRANCH = "branch"  # each record to one of the outputs
    REFRESH = "refresh"  # sets a countdown, in front of a loop
    SWITCH = "switch"  # output 0 goes round again, output 1 leaves the loop
    DELAY = "delay"  # to later times
    FOLD = "fold"  # one record for all of a time, or all of them, sorted
    PAIR = "pair"  # input i to output i, in one operator
    SINK = "sink"
    PROBE = "probe"


FOLDING = frozenset({Kind.FOLD, Kind.PAIR})


@dataclass(frozen=True, slots=True)
class Rule:
    """What one operator does to records and times.

    Attributes:
        kind: The family.
        salt: Makes operators of one kind different.
        depth: Of its scope.
        num_inputs: Input ports.
        num_outputs: Output ports.
        level: Which countdown REFRESH and SWITCH work on: 1 outer, 2 inner.
        share: FILTER keeps about `share` of 4 records, FOLD with 0 keeps all.
        ahead: Added to the time at which FOLD is due, or by which DELAY delays.
        spread: FOLD counts what it receives for so many epochs, from the due one on.
        carry_until: FOLD passes its result on to the next epoch, before this one.
        is_advancing: Whether the operator declares that it advances time by one.
        num_epochs: Of a source.
        batch_records: At most so many records a batch of a source.
    """

    kind: Kind
    salt: int
    depth: int
    num_inputs: int
    num_outputs: int
    level: int = 1
    share: int = 1
    ahead: Time = (0,)
    spread: int = 1
    carry_until: int = 0
    is_advancing: bool = False
    num_epochs: int = 0
    batch_records: int = 3

    @property
    def is_folding(self) -> bool:
        """Whether it answers when a time is complete."""
        return self.kind in FOLDING

    def summaries(self) -> list[list[list[Summary]]]:
        """By input and output, what the operator declares."""
        if self.is_advancing:
            effect = Summary.advance(self.depth)
        else:
            effect = Summary.identity(self.depth)
        is_pair = self.kind is Kind.PAIR
        return [
            [
                [] if is_pair and port != output else [effect]
                for output in range(self.num_outputs)
            ]
            for port in range(self.num_inputs)
        ]

    def stamped(self, time: Time) -> Time:
        """The least time at which something received at `time` may be sent."""
        return (*time[:-1], time[-1] + 1) if self.is_advancing else time


def mix(salt: int, value: int) -> int:
    """Return a number below 4096 that looks random."""
    x = (value * 0x9E3779B1 + salt * 0x85EBCA6B + 0x165667B1) & 0xFFFFFFFF
    x ^= x >> 15
    x = (x * 0x2C1B3C6D) & 0xFFFFFFFF
    return (x ^ (x >> 13)) & 0xFFF


def make_record(value: int, outer: int, inner: int) -> int:
    """Pack a value and two countdowns."""
    return value * 16 + outer * 4 + inner


def countdown(record: int, level: int) -> int:
    """How often a record still goes round a loop of that level."""
    return (record >> 2) & 3 if level == 1 else record & 3


def with_countdown(record: int, level: int, rounds: int) -> int:
    """Return the record with another countdown."""
    shift = 2 if level == 1 else 0
    return record - (countdown(record, level) << shift) + (rounds << shift)


def with_value(record: int, value: int) -> int:
    """Return the record with another value and the same countdowns."""
    return value * 16 + record % 16


def source_batches(rule: Rule, shard: int, epoch: int) -> list[list[list[int]]]:
    """Return, by output, the batches that a shard of a source sends in an epoch."""
    outputs = []
    for output in range(rule.num_outputs):
        seed = mix(rule.salt + 31 * output, shard * 1000 + epoch)
        batches = [
            [
                make_record(mix(seed + number, index), 0, 0)
                for index in range(mix(seed, number) % (rule.batch_records + 1))
            ]
            for number in range(seed % 4)
        ]
        outputs.append(batches)
    return outputs


def react(rule: Rule, port: int, time: Time, record: int) -> list[Emission]:
    """Return what one record causes, for rules that do not wait."""
    value, at = record >> 4, rule.stamped(time)
    fresh = mix(rule.salt + port, value)
    emissions: list[Emission] = []
    match rule.kind:
        case Kind.MAP:
            emissions.append((0, at, with_value(record, fresh)))
        case Kind.FILTER if fresh % 4 < rule.share:
            emissions.append((0, at, record))
        case Kind.FLAT_MAP:
            copies = [mix(fresh, copy) for copy in range(fresh % 3)]
            emissions += [(0, at, with_value(record, copy)) for copy in copies]
        case Kind.BRANCH:
            emissions.append((fresh % rule.num_outputs, at, record))
        case Kind.REFRESH:
            rounds = fresh % (MAX_COUNTDOWN + 1)
            emissions.append((0, at, with_countdown(record, rule.level, rounds)))
        case Kind.SWITCH:
            left = countdown(record, rule.level)
            if left:
                again = with_countdown(record, rule.level, left - 1)
                emissions.append((0, at, again))
            else:
                emissions.append((1, at, record))
        case Kind.DELAY:
            steps = 1 + fresh % 2
            later = tuple(x + steps * y for x, y in zip(at, rule.ahead, strict=True))
            emissions.append((0, later, record))
    return emissions


def dues(rule: Rule, time: Time) -> list[Time]:
    """Return the times whose completion a rule that waits is to be told of."""
    if not rule.is_folding:
        return [time]
    first = tuple(x + y for x, y in zip(time, rule.ahead, strict=True))
    return [(first[0] + later, *first[1:]) for later in range(rule.spread)]


def carried(
    rule: Rule, time: Time, emissions: Sequence[Emission]
) -> tuple[Time, list[int]] | None:
    """Return the next time that a complete one adds to, and what it adds."""
    if time[0] + 1 >= rule.carry_until:
        return None
    records = [record for output, _, record in emissions if output == 0]
    return ((time[0] + 1, *time[1:]), records) if records else None


def complete(
    rule: Rule, time: Time, stash: Mapping[int, Sequence[int]]
) -> list[Emission]:
    """Return what a folding rule sends for a complete time, from records by port."""
    at = rule.stamped(time)
    if rule.kind is Kind.PAIR:
        return [
            (port, at, record)
            for port in sorted(stash)
            for record in _folded(rule, port, stash[port])
        ]
    everything = [record for port in sorted(stash) for record in stash[port]]
    return [
        (output, at, record)
        for output in range(rule.num_outputs)
        for record in _folded(rule, output, everything)
    ]


def _folded(rule: Rule, salt: int, records: Sequence[int]) -> list[int]:
    if not rule.share:
        return sorted(records)
    if not records:
        return []
    total = sum(record >> 4 for record in records)
    outer = max(countdown(record, 1) for record in records)
    inner = max(countdown(record, 2) for record in records)
    return [make_record(mix(rule.salt + salt, total + len(records)), outer, inner)]
