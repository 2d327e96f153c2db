"""Joining two streams by key: within each time, or across times.

This file has the operator, and the join of records; `join_columns.py` joins arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

from timelyml.errors import ConfigError
from timelyml.exchange import records_of
from timelyml.graph import Exchange, StreamRef
from timelyml.operators.checks import check_optional_count
from timelyml.operators.edges import StreamLike, check_stream
from timelyml.operators.join_across import joined_across
from timelyml.operators.join_columns import ColumnJoin
from timelyml.operators.keys import (
    Key,
    check_key,
    key_function,
    route_by,
    value_function,
)
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.ordered import keep, take_kept
from timelyml.operators.schema import require, schema_of
from timelyml.operators.steps import in_steps, send_in_steps
from timelyml.progress import Timestamp
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard

How: TypeAlias = Literal["inner", "left", "outer"]


def join(
    left: StreamLike,
    right: StreamLike,
    *,
    key: Key | None = None,
    right_key: Key | None = None,
    how: How = "inner",
    across_times: bool = False,
    ttl_epochs: int | None = None,
    suffix: str = "_right",
    fill: Mapping[str, Any] | None = None,
    num_shards: int | None = None,
    name: str | None = None,
) -> StreamRef:
    """Send `(key, left, right)` for each two records of equal keys.

    It exchanges both streams by key itself. Results of one time come in the order of
    the left stream, by producer shard; across times, in another that timing has no part
    in.

    Where `key` names a column and both payloads are columns, results are columns too:
    the key, the others of the left, the others of the right.

    Args:
        left: One stream.
        right: The other; in the same scope.
        key: From one record to its key, or the name of a field or column; what is
            joined are the records. Default: records are pairs `(key, value)`, and
            what is joined are the values.
        right_key: For the right stream, if it differs.
        how: "inner": only what has a partner. "left": also each left record without
            one, with None in its place. "outer": also each such right record.
        across_times: Join records of all times, each two at the later of their times, where
            otherwise only those of one time meet.
        ttl_epochs: With `across_times`: only records whose epochs are at most so far apart
            meet, and older ones are forgotten. With "left" or "outer" it is needed:
            what then has no partner is sent at the last epoch that could have brought
            one. Default: all records are kept for ever.
        suffix: For columns of the right whose name the left has too.
        fill: By column, what stands for values that are missing with "left" and
            "outer". Default: NaN; a column of another kind than floats needs a value.
        num_shards: Shards that share the keys; default: as many as `left` has.
        name: Shown in traces and errors; the key of its state.

    Raises:
        GraphError: A key is neither a function nor a name.
        ConfigError: The options do not fit each other.
    """
    who = name or "join"
    check_stream(who, left)
    check_stream(who, right)
    right_key = key if right_key is None else right_key
    for up, argument, given in ((left, "key", key), (right, "right_key", right_key)):
        if given is not None:
            check_key(who, given, argument)
            require(who, up, [given] if isinstance(given, str) else [])
    _check_options(who, how, across_times=across_times, ttl_epochs=ttl_epochs)
    columns = None
    if isinstance(key, str) and isinstance(right_key, str):
        columns = ColumnJoin(
            who, (key, right_key), how, suffix=suffix, fill=dict(fill or {})
        )
        columns.expect(schema_of(left), schema_of(right))
    if across_times:
        logic = joined_across((key, right_key), how, ttl_epochs, columns)
    else:
        logic = _per_time(_RecordJoin(key, right_key, how), columns)
    (out,) = add_operator(
        "join",
        [left, right],
        logic,
        name=name,
        pacts=[_by(key), _by(right_key)],
        states=("state", "left", "right", "touched", "columns"),
        num_shards=num_shards,
    )
    return out


def _by(key: Key | None) -> Exchange:
    if isinstance(key, str):
        return Exchange(route_by([key]))
    return Exchange.by_key(key_function(key))


def _check_options(
    who: str, how: Any, *, across_times: bool, ttl_epochs: int | None
) -> None:
    check_optional_count(who, "ttl_epochs", ttl_epochs, least=0)
    problem = None
    if how not in ("inner", "left", "outer"):
        problem = f"how={how!r}; expected 'inner', 'left' or 'outer'"
    elif ttl_epochs is not None and not across_times:
        problem = "ttl_epochs without across_times; expected both, or neither"
    elif how != "inner" and across_times and ttl_epochs is None:
        problem = (
            f"how={how!r} across times without end; expected ttl_epochs, after which a "
            f"record has no partner"
        )
    if problem is not None:
        raise ConfigError(
            f"operator {who!r} cannot join like this; got {problem}; change the options",
            operator=who,
        )


def _per_time(records: _RecordJoin, columns: ColumnJoin | None) -> Logic:
    def on_batch(shard: Shard, delivery: Delivery) -> None:
        shard.notify_at(delivery.time)
        keep(shard.state, delivery)

    def on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
        blocks = shard.state.get(time, [])
        is_list = any(isinstance(payload, list) for _, _, payload in blocks)
        lefts = take_kept(shard.state, time, 0)
        rights = take_kept(shard.state, time, 1)
        if columns is not None and not is_list:
            known = shard.state_of("columns")
            for payload in columns.results(lefts, rights, known):
                shard.output().send(time, payload)
                yield
            return
        yield from records.send_results(shard, time, lefts, rights)

    return Logic(on_batch=on_batch, on_notify=on_notify)


class _RecordJoin:
    """Joins the records of one time."""

    def __init__(self, key: Key | None, right_key: Key | None, how: How) -> None:
        self._keys = key_function(key), key_function(right_key)
        self._values = value_function(key), value_function(right_key)
        self._how = how

    def send_results(
        self, shard: Shard, time: Timestamp, lefts: list[Any], rights: list[Any]
    ) -> Iterator[None]:
        """Send what the payloads of both sides give."""
        partners: dict[Any, list[Any]] = {}
        for payload in rights:
            yield from in_steps(
                shard,
                records_of(payload),
                lambda record: partners.setdefault(self._keys[1](record), []).append(
                    self._value(1, record)
                ),
            )
        met: set[Any] = set()

        def match(records: list[Any]) -> Iterator[Any]:
            for record in records:
                its_key, value = self._keys[0](record), self._value(0, record)
                found = partners.get(its_key)
                if found is not None:
                    met.add(its_key)
                    yield from ((its_key, value, other) for other in found)
                elif self._how != "inner":
                    yield its_key, value, None

        for payload in lefts:
            yield from send_in_steps(shard, time, records_of(payload), match)
        if self._how == "outer":
            alone = (item for item in partners.items() if item[0] not in met)
            yield from send_in_steps(shard, time, alone, _without_left)

    def _value(self, side: int, record: Any) -> Any:
        value_of = self._values[side]
        return record if value_of is None else value_of(record)


def _without_left(items: list[tuple[Any, list[Any]]]) -> Iterable[Any]:
    return ((key, None, value) for key, values in items for value in values)
