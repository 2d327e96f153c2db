"""Aggregating columns by key: sums, means, extremes and counts, without a loop over rows.

As `reduction.py` does for records, each shard combines its own rows before the
exchange, once a time has more than a few, and the second operator merges by producer
shard. What travels are partial aggregates, a row for each key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from timelyml.errors import ConfigError, PayloadError, RoutingError
from timelyml.exchange import concat, num_records
from timelyml.graph import Exchange, StreamRef
from timelyml.operators.columns import Columns, column, columns_of
from timelyml.operators.edges import StreamLike
from timelyml.operators.grouping import Array, Groups, sum_dtype
from timelyml.operators.keys import destinations_of
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.schema import require
from timelyml.progress import Timestamp
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard

DIRECT_ROWS = 4096
"""As many first rows of a time are sent on at once; combining waits for its end."""

ROWS_PER_GROUPING = 4096
"""Rows of small blocks that wait to be grouped together."""

MOST_ROWS = 1 << 16
"""Partial aggregates that are kept before they are merged, or sent on."""

Function: TypeAlias = Literal["sum", "mean", "min", "max", "count"]
Spec: TypeAlias = str | tuple[str, str]
"""`"count"`, or a function and the column that it takes: `("sum", "price")`."""

ROWS = "rows"
KINDS = {"sum": "biuf", "mean": "biuf", "min": "biufmM", "max": "biufmM"}


class Aggregate(NamedTuple):
    """One column to make: its name, how, and from which one."""

    output: str
    function: str
    column: str


def aggregate(
    up: StreamLike,
    by: str | Sequence[str],
    aggregates: Mapping[str, Spec],
    *,
    num_shards: int | None = None,
    name: str | None = None,
) -> StreamRef:
    """Aggregate the rows of each key and time to one row, once the time is complete.

    It exchanges by key itself, after each shard has combined its own rows. Each shard
    sends one block of columns for each time: the keys, ascending, and the aggregates.

    Args:
        up: Stream of columns: a flat dict, tuple or dataclass of arrays.
        by: Name of the key column, or of several; none of them for one row in all.
        aggregates: By name of a column to make: "count", or a pair of "sum", "mean",
            "min" or "max" and the column that it takes. Rows of arrays are aggregated
            by element. Sums are of 64 bits, means of floats.
        num_shards: Shards that share the keys; default: as many as `up` has.
        name: Shown in traces and errors; the key of its state.

    Raises:
        ConfigError: An aggregate is none of these, or two columns have one name.
    """
    who = name or "aggregate"
    keys = [by] if isinstance(by, str) else list(by)
    plan = Plan(who, keys, parsed_aggregates(who, keys, aggregates))
    require(who, up, plan.columns)
    (partials,) = add_operator(
        "aggregate-combine",
        [up],
        _combining(plan),
        name=None if name is None else f"{name}-combine",
        states=("state",),
    )
    (out,) = add_operator(
        "aggregate",
        [partials],
        _merging(plan),
        name=name,
        pacts=[Exchange(plan.route)],
        states=("state",),
        num_shards=num_shards,
    )
    return out


class Plan:
    """What is aggregated by what: from rows to partial aggregates to the result."""

    def __init__(self, who: str, keys: list[str], aggregates: list[Aggregate]) -> None:
        self.who = who
        self._keys = keys
        self._aggregates = aggregates
        self._has_rows = any(each.function in ("count", "mean") for each in aggregates)
        # Each partial once, by name: its function and column.
        self._parts: dict[str, tuple[str, str]] = {}
        for each in aggregates:
            if each.function != "count":
                function = "sum" if each.function == "mean" else each.function
                self._parts[f"{function} {each.column}"] = function, each.column

    @property
    def columns(self) -> list[str]:
        """The columns that it reads."""
        return [*self._keys, *(source for _, source in self._parts.values())]

    def as_partials(self, payload: Any) -> Columns:
        """Return rows as partial aggregates of one row each."""
        columns, partials = self._open(payload)
        if self._has_rows:
            partials[ROWS] = np.ones(num_records(payload), np.int64)
        for part, (function, source) in self._parts.items():
            values = columns[source]
            is_sum = function == "sum"
            dtype = sum_dtype(values.dtype) if is_sum else values.dtype
            partials[part] = values.astype(dtype, copy=False)
        return partials

    def grouped(self, payload: Any) -> Columns:
        """Return rows as partial aggregates, one for each key."""
        columns, keys = self._open(payload)
        groups = Groups(list(keys.values()), num_records(payload))
        partials = dict(zip(keys, groups.keys, strict=True))
        if self._has_rows:
            partials[ROWS] = groups.counts
        for part, (function, source) in self._parts.items():
            partials[part] = _reduced(groups, function, columns[source])
        return partials

    def merged(self, partials: list[Columns]) -> Columns:
        """Return partial aggregates with one row for each key."""
        joined: Columns = concat(partials)
        names = [f"key {key}" for key in self._keys]
        groups = Groups([joined[name] for name in names], num_records(joined))
        result = dict(zip(names, groups.keys, strict=True))
        if self._has_rows:
            result[ROWS] = groups.sums(joined[ROWS])
        for part, (function, _) in self._parts.items():
            result[part] = _reduced(groups, function, joined[part])
        return result

    def finished(self, partials: Columns) -> Columns:
        """Return what is sent for merged partial aggregates."""
        result = {key: partials[f"key {key}"] for key in self._keys}
        rows = partials.get(ROWS, np.empty(0))
        for output, function, source in self._aggregates:
            if function == "count":
                result[output] = rows
            elif function == "mean":
                sums = partials[f"sum {source}"]
                result[output] = sums / rows.reshape(-1, *[1] * (sums.ndim - 1))
            else:
                result[output] = partials[f"{function} {source}"]
        return result

    def route(self, partials: Columns, num_shards: int) -> Any:
        """Send partial aggregates of one key to one shard."""
        if not self._keys:
            return np.zeros(num_records(partials), np.intp)
        keys = [partials[f"key {key}"] for key in self._keys]
        return destinations_of(keys, num_shards)

    def _open(self, payload: Any) -> tuple[Columns, Columns]:
        """Return the columns of a payload, checked, and those of the keys."""
        columns = columns_of(payload)
        keys = {}
        for key in self._keys:
            keys[f"key {key}"] = self._key(key, column(self.who, columns, key))
        for function, source in self._parts.values():
            values = column(self.who, columns, source)
            if values.dtype.kind not in KINDS[function]:
                raise PayloadError(
                    f"operator {self.who!r} has no {function} of column {source!r}; got "
                    f"{values.dtype}; expected numbers; convert it, or leave it out",
                    operator=self.who,
                    column=source,
                )
        return columns, keys

    def _key(self, name: str, values: Array) -> Array:
        problem = None
        if values.ndim != 1:
            problem = f"rows of shape {list(values.shape[1:])}; expected single values"
        elif values.dtype.kind == "f" and (missing := np.isnan(values)).any():
            row = int(missing.argmax())
            problem = f"nan at row {row}, which equals nothing; expected a number"
        elif values.dtype.kind in "mM" and (missing := np.isnat(values)).any():
            row = int(missing.argmax())
            problem = f"NaT at row {row}, which equals nothing; expected a moment"
        if problem is not None:
            raise RoutingError(
                f"operator {self.who!r} cannot group by column {name!r}; got {problem}; "
                f"filter or replace it before",
                operator=self.who,
                column=name,
            )
        return values


def _reduced(groups: Groups, function: str, values: Array) -> Array:
    if function == "sum":
        return groups.sums(values)
    return groups.least(values) if function == "min" else groups.greatest(values)


def parsed_aggregates(
    who: str, keys: list[str], aggregates: Mapping[str, Spec]
) -> list[Aggregate]:
    """Check what is to be made beside the keys.

    Raises:
        ConfigError: An aggregate is none, or two columns have one name.
    """
    parsed = []
    for output, spec in aggregates.items():
        function, source = ("count", "") if spec == "count" else (*spec, None)[:2]
        is_known = function == "count" or (function in KINDS and source is not None)
        if isinstance(spec, str) and spec != "count":
            is_known = False
        if not is_known:
            raise ConfigError(
                f"operator {who!r} cannot make column {output!r}; got {spec!r}; expected "
                f"'count', or one of {sorted(KINDS)} with a column; as in "
                f"('sum', 'price')",
                operator=who,
                column=output,
            )
        parsed.append(Aggregate(output, str(function), str(source)))
    names = [*keys, *(each.output for each in parsed)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not parsed:
        problem = f"two columns of one name: {twice}" if twice else "none"
        raise ConfigError(
            f"operator {who!r} needs aggregates with names of their own; got {problem}; "
            f"expected at least one, and unique names; rename or add some",
            operator=who,
        )
    return parsed


@dataclass(slots=True)
class PartialAggregates:
    """Partial aggregates of one time, merged when they have become many."""

    num_direct: int = 0
    rows: list[Any] = field(default_factory=list)  # not grouped yet
    num_ungrouped: int = 0
    parts: list[Columns] = field(default_factory=list)
    num_rows: int = 0
    merge_at: int = MOST_ROWS

    def group(self, plan: Plan) -> None:
        """Group the rows that wait for it."""
        if self.rows:
            self.add(plan.grouped(concat(self.rows)))
            self.rows, self.num_ungrouped = [], 0

    def add(self, part: Columns) -> None:
        """Add some; `is_high` tells when to merge."""
        self.parts.append(part)
        self.num_rows += num_records(part)

    @property
    def is_high(self) -> bool:
        """Whether it is time to merge: each row is merged a few times at most."""
        return self.num_rows >= self.merge_at

    def merge(self, plan: Plan) -> None:
        """Merge all there is."""
        self.parts = [plan.merged(self.parts)]
        self.num_rows = num_records(self.parts[0])
        self.merge_at = max(MOST_ROWS, 2 * self.num_rows)


def _combining(plan: Plan) -> Logic:
    def on_batch(shard: Shard, delivery: Delivery) -> None:
        time, payload = delivery.time, delivery.payload
        rows = num_records(payload)
        if not rows:
            return
        partial = shard.state.get(time)
        if partial is None:
            partial = shard.state[time] = PartialAggregates()
            shard.notify_at(time, outputs=())  # to forget it; holds nothing back
        partial.num_direct += rows
        if partial.num_direct <= DIRECT_ROWS:
            shard.output().send(time, plan.as_partials(payload))
            return
        shard.notify_at(time)
        partial.rows.append(payload)
        partial.num_ungrouped += rows
        if partial.num_ungrouped >= ROWS_PER_GROUPING:
            partial.group(plan)
        if partial.is_high:
            partial.merge(plan)
            if partial.num_rows >= MOST_ROWS // 2:  # there is little to combine
                shard.output().send(time, partial.parts[0])
                partial.parts, partial.num_rows, partial.merge_at = [], 0, MOST_ROWS

    def on_notify(shard: Shard, time: Timestamp) -> None:
        partial = shard.state.pop(time)
        partial.group(plan)
        if partial.parts:
            shard.output().send(time, plan.merged(partial.parts))

    return Logic(on_batch=on_batch, on_notify=on_notify)


def _merging(plan: Plan) -> Logic:
    def on_batch(shard: Shard, delivery: Delivery) -> None:
        shard.notify_at(delivery.time)
        producers = shard.state.setdefault(delivery.time, {})
        partial = producers.setdefault(delivery.source_shard, PartialAggregates())
        partial.add(delivery.payload)
        if partial.is_high:
            partial.merge(plan)

    def on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
        producers = shard.state.pop(time)
        parts = []
        for producer in sorted(producers):
            partial = producers.pop(producer)
            partial.merge(plan)
            parts += partial.parts
            yield
        shard.output().send(time, plan.finished(plan.merged(parts)))

    return Logic(on_batch=on_batch, on_notify=on_notify)
