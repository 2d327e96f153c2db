"""Reducing records by key, each time on its own, with combining before the exchange.

Two operators do it. The first combines what its shard has of a time, so that a hot
key costs one pair per shard and not one per record; the few first records of a time
pass it as they are, so that small epochs need not wait for it. The second merges, by
producer shard. What is combined is decided by counting, so results do not depend on
timing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from timelyml.exchange import num_records, records_of
from timelyml.graph import Exchange, StreamRef
from timelyml.operators.checks import check_callable, check_optional_callable
from timelyml.operators.columns import column, columns_of
from timelyml.operators.edges import StreamLike
from timelyml.operators.keys import (
    Key,
    check_hashable,
    check_key,
    column_keys,
    first,
    key_function,
)
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.schema import require
from timelyml.operators.steps import RECORDS_PER_BLOCK, in_chunks, send_in_steps
from timelyml.progress import Timestamp
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard

DIRECT_RECORDS = 1024
"""As many first records of a time are sent on at once; combining waits for its end."""

MOST_KEYS = 1 << 16
"""Combined pairs that wait for the end of their time; then they are sent."""

Pairs = dict[Hashable, Any]
Absorb = Callable[[Pairs, list[Any]], object]
"""Adds a few records, or pairs, to what there is by key."""


class _Ways(NamedTuple):
    """From records to pairs, into what there is; and from pairs; and what is first."""

    pairs_of: Callable[[list[Any]], list[Any]]
    absorb: Absorb
    merge: Absorb
    empty: Callable[[], Pairs] = dict
    of_columns: Callable[[Any], list[Any]] | None = None  # combined pairs of a block


@dataclass(slots=True)
class Partial:
    """What one shard has of one time before the exchange."""

    pairs: Pairs
    num_direct: int = 0


def reduce(
    up: StreamLike,
    key: Key,
    combine: Callable[[Any, Any], Any],
    *,
    value: Callable[[Any], Any] | None = None,
    num_shards: int | None = None,
    name: str | None = None,
) -> StreamRef:
    """Reduce the records of each key and time to one `(key, value)`, once complete.

    It exchanges by key itself, after each shard has combined its own records. A shard
    sends its keys in the order in which it first met them, by producer shard.

    Args:
        up: Stream to reduce.
        key: From one record to its key, or the name of a field.
        combine: From two values to one; associative.
        value: From one record to its value; default: the record.
        num_shards: Shards that share the keys; default: as many as `up` has.
        name: Shown in traces and errors; the key of its state.

    Raises:
        GraphError: A function cannot be called.
    """
    who = name or "reduce"
    check_key(who, key)
    require(who, up, [key] if isinstance(key, str) else [])
    check_callable(who, "combine", combine)
    check_optional_callable(who, "value", value)
    key_of = key_function(key)

    def pairs_of(records: list[Any]) -> list[Any]:
        if value is None:
            return [(key_of(record), record) for record in records]
        return [(key_of(record), value(record)) for record in records]

    def absorb(pairs: Pairs, records: list[Any]) -> None:
        merge(pairs, pairs_of(records))

    def merge(pairs: Pairs, more: list[Any]) -> None:
        for its_key, its_value in more:
            if its_key in pairs:
                pairs[its_key] = combine(pairs[its_key], its_value)
            else:
                pairs[its_key] = its_value

    ways = _Ways(pairs_of, absorb, merge)
    return _reduced(up, ways, kind="reduce", num_shards=num_shards, name=name)


def count_by(
    up: StreamLike,
    key: Key,
    *,
    num_shards: int | None = None,
    name: str | None = None,
) -> StreamRef:
    """Send `(key, number of records)` for each key and time, once it is complete.

    As `reduce` with ones for values, and faster.
    """
    who = name or "count"
    check_key(who, key)
    require(who, up, [key] if isinstance(key, str) else [])
    key_of = key_function(key)

    def pairs_of(records: list[Any]) -> list[Any]:
        return [(key_of(record), 1) for record in records]

    def absorb(pairs: Pairs, records: list[Any]) -> None:
        # Of a Counter: adds up, in C. `map` would end where a key raises StopIteration.
        pairs.update([key_of(record) for record in records])

    def merge(pairs: Pairs, more: list[Any]) -> None:
        for its_key, number in more:
            pairs[its_key] = pairs.get(its_key, 0) + number

    def of_columns(payload: Any) -> list[Any]:
        keys = column(who, columns_of(payload), str(key))
        found, numbers = np.unique(keys, return_counts=True)
        return list(zip(column_keys(found), numbers.tolist(), strict=True))

    by_column = of_columns if isinstance(key, str) else None
    ways = _Ways(pairs_of, absorb, merge, Counter, by_column)
    return _reduced(up, ways, kind="count", num_shards=num_shards, name=name)


def _reduced(
    up: StreamLike,
    ways: _Ways,
    *,
    kind: str,
    num_shards: int | None,
    name: str | None,
) -> StreamRef:
    """Combine on each shard, exchange by key, and merge."""
    (pairs,) = add_operator(
        f"{kind}-combine",
        [up],
        _combining(ways),
        name=None if name is None else f"{name}-combine",
        states=("state",),
    )
    (out,) = add_operator(
        kind,
        [pairs],
        _merging(ways.merge),
        name=name,
        pacts=[Exchange.by_key(first)],
        states=("state",),
        num_shards=num_shards,
    )
    return out


def _combining(ways: _Ways) -> Logic:
    pairs_of, absorb = ways.pairs_of, ways.absorb

    def take_in(pairs: Pairs, records: list[Any]) -> None:
        try:
            absorb(pairs, records)
        except TypeError:
            check_hashable(key for key, _ in pairs_of(records))
            raise

    def on_batch(shard: Shard, delivery: Delivery) -> Iterator[None]:
        time, payload = delivery.time, delivery.payload
        partial = shard.state.get(time)
        if partial is None:
            partial = shard.state[time] = Partial(ways.empty())
            shard.notify_at(time, outputs=())  # to forget it; holds nothing back
        partial.num_direct += num_records(payload)
        is_direct = partial.num_direct <= DIRECT_RECORDS
        if not is_direct:
            shard.notify_at(time)
        pairs = partial.pairs
        if ways.of_columns is not None and not isinstance(payload, list):
            found = ways.of_columns(payload)
            if is_direct:
                shard.output().send(time, found)
            else:
                ways.merge(pairs, found)
        elif is_direct:
            yield from send_in_steps(shard, time, records_of(payload), pairs_of)
        else:
            yield from in_chunks(
                shard, records_of(payload), lambda chunk: take_in(pairs, chunk)
            )
        if len(pairs) >= MOST_KEYS:
            partial.pairs = ways.empty()
            yield from send_pairs(shard, time, pairs)

    def on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
        return send_pairs(shard, time, shard.state.pop(time).pairs)

    return Logic(on_batch=on_batch, on_notify=on_notify)


def _merging(merge: Absorb) -> Logic:
    def on_batch(shard: Shard, delivery: Delivery) -> Iterator[None]:
        shard.notify_at(delivery.time)
        producers = shard.state.setdefault(delivery.time, {})
        mine = producers.setdefault(delivery.source_shard, {})
        return in_chunks(shard, delivery.payload, lambda chunk: merge(mine, chunk))

    def on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
        producers = shard.state.pop(time)
        lowest, *others = sorted(producers)
        total = producers[lowest]
        for producer in others:
            more = producers.pop(producer).items()
            yield from in_chunks(shard, more, lambda chunk: merge(total, chunk))
        yield from send_pairs(shard, time, total)

    return Logic(on_batch=on_batch, on_notify=on_notify)


def send_pairs(shard: Shard, time: Timestamp, pairs: Pairs) -> Iterator[None]:
    """Send all pairs, a block at a time."""
    found = list(pairs.items())
    for start in range(0, len(found), RECORDS_PER_BLOCK):
        shard.output().send(time, found[start : start + RECORDS_PER_BLOCK])
        yield
