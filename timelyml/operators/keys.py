"""Keys: of single records by a function or a field, of whole blocks by columns.

Keyed operators take a function, the name of a field or column, or nothing: then
records are pairs `(key, value)`, as `key_by` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from timelyml.errors import GraphError
from timelyml.exchange import destinations_by_key, records_of
from timelyml.graph import Exchange
from timelyml.operators.columns import columns_of
from timelyml.operators.edges import Routed, StreamLike, settle
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.schema import require
from timelyml.operators.steps import send_results
from timelyml.runtime.operator import Delivery, Logic, Steps
from timelyml.runtime.shard import Shard

Key: TypeAlias = Callable[[Any], Hashable] | str
"""A function from a record to its key, or the name of a field or column."""

first: Callable[[Any], Any] = itemgetter(0)
second: Callable[[Any], Any] = itemgetter(1)

_MANY_SHARDS = 2**31 - 1  # a prime, so that mixing by multiplication spreads well
_MIX = 0x9E3779B1


def check_key(operator: str, key: Any, argument: str = "key") -> None:
    """Refuse what is neither a function nor a name.

    Raises:
        GraphError: It is neither.
    """
    if not callable(key) and not (isinstance(key, str) and key):
        raise GraphError(
            f"operator {operator!r} needs a key; got {key!r} for {argument!r}; expected "
            f"a function of a record, or the name of a field or column; pass one",
            operator=operator,
            argument=argument,
        )


def key_function(key: Key | None) -> Callable[[Any], Any]:
    """Return the function from a record to its key."""
    if key is None:
        return first
    return field_getter(key) if isinstance(key, str) else key


def value_function(key: Key | None) -> Callable[[Any], Any] | None:
    """Return the function from a record to its value; None: the record itself."""
    return second if key is None else None


def field_getter(name: str) -> Callable[[Any], Any]:
    """Return a function from a record to its item or attribute of that name.

    >>> field_getter("x")({"x": 1}), field_getter("real")(2.5)
    (1, 2.5)
    """

    def get(record: Any) -> Any:
        if isinstance(record, Mapping):
            return record[name]
        return getattr(record, name)

    return get


def key_by(up: StreamLike, key: Key, *, num_shards: int | None = None) -> Routed:
    """Send each record to the shard of its key, as `(key, record)`; columns stay columns.

    Args:
        up: Stream to route.
        key: From one record to its key. Or the name of a column, by whose values rows
            are routed as they are.
        num_shards: Shards of the reader; default: as many as `up` has.

    Raises:
        GraphError: `key` is neither a function nor a name.
    """
    check_key("key_by", key)
    if isinstance(key, str):
        require("key_by", up, [key])
        return Routed(settle(up), Exchange(route_by([key])), num_shards)

    def pair(records: list[Any]) -> list[Any]:
        return [(key(record), record) for record in records]

    def on_batch(shard: Shard, delivery: Delivery) -> Steps:
        return send_results(shard, delivery.time, records_of(delivery.payload), pair)

    (pairs,) = add_operator("key_by", [up], Logic(on_batch=on_batch))
    return Routed(pairs, Exchange.by_key(first), num_shards)


def route_by(names: list[str]) -> Callable[[Any, int], Any]:
    """Return a route on which rows of equal values in these columns meet.

    Records in a list are routed by their fields of these names.
    """

    def route(payload: Any, num_shards: int) -> Any:
        if isinstance(payload, list):
            getters = [field_getter(name) for name in names]
            if len(getters) == 1:
                return destinations_by_key(map(getters[0], payload), num_shards)
            keys = (tuple(get(record) for get in getters) for record in payload)
            return destinations_by_key(keys, num_shards)
        columns = columns_of(payload)
        return destinations_of([columns[name] for name in names], num_shards)

    return route


def destinations_of(
    keys: list[npt.NDArray[Any]], num_shards: int
) -> npt.NDArray[np.intp]:
    """Return the shard of each row by one or several key columns."""
    if len(keys) == 1:
        return destinations_by_key(keys[0], num_shards)
    mixed = np.zeros(len(keys[0]), np.uint64)
    for column in keys:
        codes = destinations_by_key(column, _MANY_SHARDS).astype(np.uint64)
        mixed = (mixed * np.uint64(_MIX) + codes) % np.uint64(_MANY_SHARDS)
    return (mixed % np.uint64(num_shards)).astype(np.intp)


def check_hashable(keys: Iterable[Any]) -> None:
    """Refuse the first key that cannot be one, once an error says that there may be.

    Raises:
        RoutingError: Names the key, as where it is routed.
    """
    destinations_by_key(keys, 1)


def column_keys(column: npt.NDArray[Any]) -> list[Any]:
    """Return the values of a column as keys of records, equal where the values are.

    Moments are datetimes, whatever unit the column counts in. What a datetime cannot
    tell is a `datetime64` of the coarsest unit that can.
    """
    if column.dtype.kind != "M":
        keys: list[Any] = column.tolist()
        return keys
    micros = column.astype("M8[us]")
    keys = micros.tolist()
    for row in np.flatnonzero((micros != column) & ~np.isnat(column)).tolist():
        keys[row] = _coarsest(column[row])
    return [
        _coarsest(column[row]) if isinstance(key, int) else key
        for row, key in enumerate(keys)
    ]


def _coarsest(moment: Any) -> Any:
    units = (moment.astype(f"M8[{unit}]") for unit in ("s", "ms", "us", "ns", "ps"))
    return next((found for found in units if found == moment), moment)
