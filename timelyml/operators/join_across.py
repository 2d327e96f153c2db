"""The join of records of all times: what came is kept, by key, until it is too old.

A time is worked off once both streams have all of it, in order of time. Each side's
state maps a key to its records as `(time, value, met)`, where `met` is a list that is
not empty once the record had a partner. As long as there are columns only, they are
joined as in `join_across_columns.py`; records among them make records of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from timelyml.errors import GraphError
from timelyml.exchange import records_of
from timelyml.operators.expiry import take_expired
from timelyml.operators.join_across_columns import SIDES, ColumnsAcross
from timelyml.operators.join_columns import ColumnJoin
from timelyml.operators.keys import Key, first, key_function, value_function
from timelyml.operators.ordered import keep, take_kept
from timelyml.operators.steps import RECORDS_PER_BLOCK, in_steps
from timelyml.progress import Timestamp, epoch_of, join
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard

RECORDS = "records"
"""Key of the state "columns" that is there once anything but columns has come."""

MAX_EPOCH = 2**63 - 1

Kept = tuple[Timestamp, Any, list[bool]]


def joined_across(
    by: tuple[Key | None, Key | None],
    how: str,
    ttl_epochs: int | None,
    columns: ColumnJoin | None,
) -> Logic:
    """Return the callbacks of a join across times.

    Args:
        by: The keys of both sides.
        how: See `join`.
        ttl_epochs: See `join`.
        columns: Joins columns to columns; None if keys are no columns.
    """
    keys = key_function(by[0]), key_function(by[1])
    values = value_function(by[0]), value_function(by[1])
    sends = (how in ("left", "outer"), how == "outer")
    blocks = None if columns is None else ColumnsAcross(columns, ttl_epochs, sends)

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        shard.notify_at(delivery.time)
        keep(shard.state, delivery)
        if ttl_epochs is None:
            return
        if isinstance(delivery.time, tuple):
            raise GraphError(
                f"operator {shard.operator!r} has a time to live inside a scope; got "
                f"time {delivery.time}; expected epochs; join outside of the scope",
                operator=shard.operator,
            )
        if delivery.time + ttl_epochs < MAX_EPOCH:  # to forget what is too old then
            shard.notify_at(delivery.time + ttl_epochs)

    def on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
        both = [take_kept(shard.state, time, port) for port in (0, 1)]
        if blocks is not None and _are_columns(
            shard, blocks, both, has_ttl=ttl_epochs is not None
        ):
            for port, payloads in enumerate(both):
                yield from blocks.meet(shard, time, port, payloads)
            if ttl_epochs is not None:
                yield from blocks.expire(shard, epoch_of(time))
            return
        for port, payloads in enumerate(both):
            meeting = _Meeting(shard, time, port, ttl_epochs)
            for payload in payloads:
                yield from in_steps(
                    shard,
                    records_of(payload),
                    _visitor(meeting, keys[port], values[port]),
                )
            yield from meeting.send_rest()
        if ttl_epochs is not None:
            yield from _expire(shard, epoch_of(time), ttl_epochs, sends)

    return Logic(on_batch=on_batch, on_notify=on_notify, in_order=True)


def _are_columns(
    shard: Shard, blocks: ColumnsAcross, both: list[list[Any]], *, has_ttl: bool
) -> bool:
    """Whether nothing but columns has come; else what is kept becomes records."""
    known = shard.state_of("columns")
    if RECORDS in known:
        return False
    if not any(isinstance(payload, list) for payloads in both for payload in payloads):
        return True
    known[RECORDS] = True
    touched = shard.state_of("touched")
    for port, side in enumerate(SIDES):
        cell = shard.state_of(side)
        rows = sorted(blocks.take_records(shard, port), key=first)
        for time, key, record, has_met in rows:
            met = [True] if has_met else []
            cell.setdefault(key, []).append((time, record, met))
            if has_ttl:
                touched.setdefault(epoch_of(time), {})[port, key] = None
    return False


def _visitor(
    meeting: _Meeting,
    key_of: Callable[[Any], Any],
    value_of: Callable[[Any], Any] | None,
) -> Callable[[Any], None]:
    def visit(record: Any) -> None:
        meeting.add(key_of(record), record if value_of is None else value_of(record))

    return visit


class _Meeting:
    """The new records of one side, at one time, with all of the other side."""

    def __init__(
        self, shard: Shard, time: Timestamp, port: int, ttl_epochs: int | None
    ) -> None:
        self._shard = shard
        self._time = time
        self._port = port
        self._epoch = epoch_of(time)
        self._ttl_epochs = ttl_epochs
        self._own = shard.state_of(SIDES[port])
        self._others = shard.state_of(SIDES[1 - port])
        self._touched = shard.state_of("touched")
        self._results: dict[Timestamp, list[Any]] = {}

    def add(self, key: Any, value: Any) -> None:
        """Let one record meet the others, and keep it."""
        met: list[bool] = []
        for time, other, has_met in self._others.get(key, ()):
            if self._is_too_far(time):
                continue
            met[:] = has_met[:] = [True]
            pair = (value, other) if self._port == 0 else (other, value)
            self._send(join(self._time, time), (key, *pair))
        self._own.setdefault(key, []).append((self._time, value, met))
        if self._ttl_epochs is not None:
            self._touched.setdefault(self._epoch, {})[self._port, key] = None

    def send_rest(self) -> Iterator[None]:
        """Send the results that are left."""
        for time, results in self._results.items():
            self._shard.output().send(time, results)
            yield
        self._results = {}

    def _send(self, time: Timestamp, result: Any) -> None:
        results = self._results.setdefault(time, [])
        results.append(result)
        if len(results) >= RECORDS_PER_BLOCK:
            self._shard.output().send(time, self._results.pop(time))

    def _is_too_far(self, time: Timestamp) -> bool:
        return (
            self._ttl_epochs is not None
            and epoch_of(time) + self._ttl_epochs < self._epoch
        )


def _expire(
    shard: Shard, epoch: int, ttl_epochs: int, sends: tuple[bool, bool]
) -> Iterator[None]:
    """Forget what no later record can meet; send what never had a partner."""
    alone: list[Any] = []
    expired = take_expired(shard.state_of("touched"), epoch + 1, ttl_epochs)

    def visit(owner: tuple[int, Any]) -> None:
        port, key = owner
        side = shard.state_of(SIDES[port])
        old: list[Kept] = []
        kept: list[Kept] = []
        for item in side[key]:
            is_old = epoch_of(item[0]) + ttl_epochs <= epoch
            (old if is_old else kept).append(item)
        if kept:
            side[key] = kept
        else:
            del side[key]
        if sends[port]:
            alone.extend(
                (key, value, None) if port == 0 else (key, None, value)
                for _, value, met in old
                if not met
            )

    yield from in_steps(shard, expired, visit)
    for start in range(0, len(alone), RECORDS_PER_BLOCK):
        shard.output().send(epoch, alone[start : start + RECORDS_PER_BLOCK])
        yield
