"""Methods of `Stream` that wait until a time is complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from timelyml import operators
from timelyml.fluent.base import StreamBase
from timelyml.operators import Key
from timelyml.operators.aggregates import Spec


class TimeMethods(StreamBase):
    """By time: results leave when their time is complete."""

    def fold(
        self,
        initial: Any,
        combine: Callable[[Any, Any], Any],
        *,
        name: str | None = None,
    ) -> Self:
        """Reduce each time's records to one value per shard, once complete.

        Args:
            initial: Accumulator before the first record; copied for each time.
            combine: From accumulator and record to the next accumulator.
            name: See the class.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source([1, 2, 3]).fold(0, lambda total, x: total + x).collect()
        >>> flow.run()["out"]
        [6]
        """
        return self._with(operators.fold(self.ref, initial, combine, name=name))

    def accumulate(
        self,
        initial: Any,
        combine: Callable[[Any, Any], Any],
        *,
        finish: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> Self:
        """Reduce each time's payloads to one value per shard, once complete.

        Args:
            initial: Accumulator before the first payload; copied for each time.
            combine: From accumulator and payload to the next accumulator.
            finish: From the accumulator to a payload; default: a list of it alone.
            name: See the class.

        >>> import numpy as np
        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> sums = flow.source(np.arange(4)).accumulate(0, lambda a, x: a + int(x.sum()))
        >>> _ = sums.collect()
        >>> flow.run()["out"]
        [6]
        """
        return self._with(
            operators.accumulate(self.ref, initial, combine, finish=finish, name=name)
        )

    def count(
        self,
        key: Key | None = None,
        *,
        num_shards: int | None = None,
        name: str | None = None,
    ) -> Self:
        """Send the number of records of each time: of each shard, or of each key.

        Args:
            key: From one record to its key, or the name of a field: sends `(key,
                number)`. Default: each shard counts all that it holds.
            num_shards: Shards that share the keys; default: as many as this stream has.
            name: See the class.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source("to be or to go".split()).count(lambda word: word).collect()
        >>> flow.run()["out"]
        [('to', 2), ('be', 1), ('or', 1), ('go', 1)]
        """
        return self._with(
            operators.count(self.ref, key, num_shards=num_shards, name=name)
        )

    def reduce(
        self,
        key: Key,
        combine: Callable[[Any, Any], Any],
        *,
        value: Callable[[Any], Any] | None = None,
        num_shards: int | None = None,
        name: str | None = None,
    ) -> Self:
        """Reduce each time's records to one `(key, value)` per key, once complete.

        It exchanges by key itself, after each shard has combined its own records.

        Args:
            key: From one record to its key, or the name of a field.
            combine: From two values to one; associative.
            value: From one record to its value; default: the record.
            num_shards: Shards that share the keys; default: as many as this stream has.
            name: See the class.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source([1, 2, 3, 4]).reduce(lambda x: x % 2, max).collect()
        >>> flow.run()["out"]
        [(1, 3), (0, 4)]
        """
        return self._with(
            operators.reduce(
                self.ref, key, combine, value=value, num_shards=num_shards, name=name
            )
        )

    def aggregate(
        self,
        by: str | Sequence[str],
        aggregates: Mapping[str, Spec],
        *,
        num_shards: int | None = None,
        name: str | None = None,
    ) -> Self:
        """Aggregate each time's rows to one row per key, once complete, as columns.

        It exchanges by key itself, after each shard has combined its own rows.

        Args:
            by: Name of the key column, or of several; none of them for one row in all.
            aggregates: By name of a column to make: "count", or a pair of "sum",
                "mean", "min" or "max" and the column that it takes.
            num_shards: Shards that share the keys; default: as many as this stream has.
            name: See the class.

        >>> import numpy as np
        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> rows = flow.source({"k": np.array([2, 1, 2]), "x": np.array([5, 6, 7])})
        >>> _ = rows.aggregate("k", {"total": ("sum", "x"), "n": "count"}).collect()
        >>> flow.run().batches("out")
        [(0, {'k': array([1, 2]), 'total': array([ 6, 12]), 'n': array([1, 2])})]
        """
        return self._with(
            operators.aggregate(
                self.ref, by, aggregates, num_shards=num_shards, name=name
            )
        )

    def delay(
        self,
        until: Callable[[Any, Any], Any],
        *,
        by_batch: bool = False,
        name: str | None = None,
    ) -> Self:
        """Send each record at the time `until(record, time)`, once that is complete.

        Args:
            until: From record and time to the time to send it at, the same or later.
            by_batch: `until(payload, time)` gives one time for a whole payload, or an
                array with one epoch per row.
            name: See the class.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source([1, 5, 3]).delay(lambda n, time: n).collect()
        >>> flow.run().batches("out")
        [(1, [1]), (3, [3]), (5, [5])]
        """
        return self._with(
            operators.delay(self.ref, until, by_batch=by_batch, name=name)
        )
