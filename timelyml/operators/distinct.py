"""Sending equal records once: in each time, or over all times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from timelyml.exchange import (
    Payload,
    destinations_by_key,
    num_records,
    records_of,
    take,
)
from timelyml.graph import Exchange, StreamRef
from timelyml.operators.checks import check_optional_count
from timelyml.operators.columns import Columns, column, columns_of
from timelyml.operators.edges import StreamLike, pass_notes
from timelyml.operators.expiry import on_frontier, touch
from timelyml.operators.keys import Key, check_hashable, check_key, field_getter
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.ordered import keep, take_kept
from timelyml.operators.rows import destinations_of_rows, first_of_each, keys_of_rows
from timelyml.operators.schema import require
from timelyml.operators.steps import in_chunks
from timelyml.progress import Timestamp, epoch_of
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard


def distinct(
    up: StreamLike,
    key: Key | None = None,
    *,
    across_times: bool = False,
    ttl_epochs: int | None = None,
    num_shards: int | None = None,
    name: str | None = None,
) -> StreamRef:
    """Send the first record of each key, of each time or of all times.

    It exchanges by key itself, after each shard has left out what it has had in the
    same time. Columns stay columns. Of one time, records are sent as they come, so of
    equal keys from several shards any may be the first. Over all times they are sent
    once their time is complete, so that one of the earliest time is.

    Args:
        up: Stream to read.
        key: From one record to its key, or the name of a field or column. Default: the
            whole record, or the whole row.
        across_times: Send a key once for all times, not once for each.
        ttl_epochs: A key that was not seen for more than so many epochs is forgotten,
            and sent again; only with `across_times`. Default: it is kept for ever.
        num_shards: Shards that share the keys; default: as many as `up` has.
        name: Shown in traces and errors; the key of its state.
    """
    who = name or "distinct"
    if key is not None:
        check_key(who, key)
        require(who, up, [key] if isinstance(key, str) else [])
    check_optional_count(who, "ttl_epochs", ttl_epochs, least=0)
    find = _Fresh(who, key)
    once = Logic(on_batch=find.on_batch, on_notify=find.on_notify)
    (fewer,) = add_operator(
        "distinct-combine",
        [up],
        once,
        name=None if name is None else f"{name}-combine",
        states=("state",),
    )
    logic = once
    if across_times or ttl_epochs is not None:
        logic = _across_times(find, ttl_epochs)
    (out,) = add_operator(
        "distinct",
        [fewer],
        logic,
        name=name,
        pacts=[Exchange(find.route)],
        states=("state", "kept", "touched"),
        num_shards=num_shards,
    )
    return pass_notes(up, out)


class _Fresh:
    """Finds the records of a payload whose key was not seen before."""

    def __init__(self, who: str, key: Key | None) -> None:
        self._who = who
        self._key = key

    def keys_of(self, payload: Payload) -> Iterable[Any]:
        """Return a key for each record."""
        key = self._key
        if callable(key):  # `map` would end where it raises StopIteration
            return (key(record) for record in records_of(payload))
        if not isinstance(payload, list):
            return keys_of_rows(self._columns(payload))
        return payload if key is None else map(field_getter(key), payload)

    def route(self, payload: Payload, num_shards: int) -> Any:
        """Send records of equal keys to one shard."""
        if isinstance(payload, list) or callable(self._key):
            return destinations_by_key(self.keys_of(payload), num_shards)
        return destinations_of_rows(self._columns(payload), num_shards)

    def without_repeats(self, payload: Payload) -> Payload:
        """Return the payload without the repeated rows that arrays can tell."""
        if isinstance(payload, list) or callable(self._key):
            return payload
        firsts = first_of_each(self._columns(payload))
        if firsts is None or len(firsts) == num_records(payload):
            return payload
        return take(payload, firsts)

    def on_batch(self, shard: Shard, delivery: Delivery) -> Iterator[None]:
        """Send what is new in its time."""
        shard.notify_at(delivery.time, outputs=())  # to forget it; holds nothing back
        seen = shard.state.setdefault(delivery.time, set())
        payload = self.without_repeats(delivery.payload)
        fresh: list[int] = []

        def look(chunk: list[tuple[int, Any]]) -> None:
            try:
                for row, key in chunk:
                    if key not in seen:
                        seen.add(key)
                        fresh.append(row)
            except TypeError:
                check_hashable(key for _, key in chunk)
                raise

        yield from in_chunks(shard, enumerate(self.keys_of(payload)), look)
        send_rows(shard, delivery.time, payload, fresh)

    def on_notify(self, shard: Shard, time: Timestamp) -> None:
        """Forget a time."""
        del shard.state[time]

    def _columns(self, payload: Payload) -> Columns:
        columns = columns_of(payload)
        if isinstance(self._key, str):
            return {self._key: column(self._who, columns, self._key)}
        return columns


def _across_times(find: _Fresh, ttl_epochs: int | None) -> Logic:
    """Send what is new in all times; `state` maps a key to the epoch it was last in."""

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        shard.notify_at(delivery.time)
        keep(shard.state_of("kept"), delivery)

    def on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
        known, touched, epoch = shard.state, shard.state_of("touched"), epoch_of(time)
        for payload in take_kept(shard.state_of("kept"), time):
            fresh: list[int] = []

            def look(chunk: list[tuple[int, Any]], fresh: list[int] = fresh) -> None:
                for row, key in chunk:
                    before = known.get(key)
                    if before is None or is_over(before, epoch):
                        fresh.append(row)
                    if ttl_epochs is not None:
                        touch(touched, key, before, epoch)
                    known[key] = epoch

            yield from in_chunks(shard, enumerate(find.keys_of(payload)), look)
            send_rows(shard, time, payload, fresh)

    def is_over(before: int, epoch: int) -> bool:
        return ttl_epochs is not None and before + ttl_epochs < epoch

    def forget(shard: Shard, key: Any) -> None:
        shard.state.pop(key, None)

    expires = None
    if ttl_epochs is not None:
        expires = on_frontier("touched", ttl_epochs, forget)
    return Logic(
        on_batch=on_batch, on_notify=on_notify, on_frontier=expires, in_order=True
    )


def send_rows(shard: Shard, time: Timestamp, payload: Payload, rows: list[int]) -> None:
    """Send some rows of a payload, ascending; all of them without a copy."""
    if len(rows) == num_records(payload):
        shard.output().send(time, payload)
    elif rows:
        shard.output().send(time, take(payload, np.asarray(rows)))
