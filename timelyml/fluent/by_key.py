"""Methods of `Stream` that remember something for each key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from timelyml import operators
from timelyml.fluent.base import StreamBase, ref_of
from timelyml.operators import Key, Windowed
from timelyml.operators.aggregates import Spec
from timelyml.operators.join import How
from timelyml.operators.state_machine import Step
from timelyml.operators.windows import Late, Windows


class KeyMethods(StreamBase):
    """By key, with a memory: state belongs to a key, on one shard."""

    def distinct(
        self,
        key: Key | None = None,
        *,
        across_times: bool = False,
        ttl_epochs: int | None = None,
        num_shards: int | None = None,
        name: str | None = None,
    ) -> Self:
        """Send the first record of each key, of each time or of all times.

        Args:
            key: From one record to its key, or the name of a field or column. Default:
                the whole record.
            across_times: Send a key once for all times, not once for each.
            ttl_epochs: Forget a key that was not seen for more than so many epochs.
            num_shards: Shards that share the keys; default: as many as this stream has.
            name: See the class.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source([3, 1, 3, 2, 1]).distinct().collect()
        >>> flow.run()["out"]
        [3, 1, 2]
        """
        return self._with(
            operators.distinct(
                self.ref,
                key,
                across_times=across_times,
                ttl_epochs=ttl_epochs,
                num_shards=num_shards,
                name=name,
            )
        )

    def join(
        self,
        right: Self,
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
    ) -> Self:
        """Send `(key, left, right)` for each two records of equal keys.

        Args:
            right: The other stream, of the same scope.
            key: From one record to its key, or the name of a field or column. Default:
                records are pairs `(key, value)`, and their values are joined.
            right_key: For the right stream, if it differs.
            how: "inner", "left" or "outer": what has no partner comes with None.
            across_times: Join records of all times, not only those of one.
            ttl_epochs: How many epochs apart records still meet, with `across_times`.
            suffix: For columns of the right whose name the left has too.
            fill: By column, what stands for values that are missing.
            num_shards: Shards that share the keys; default: as many as this stream has.
            name: See the class.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> prices = flow.source([("fig", 3), ("kiwi", 2)])
        >>> stock = flow.source([("fig", 10), ("plum", 7)])
        >>> _ = prices.join(stock, how="left").collect()
        >>> flow.run()["out"]
        [('fig', 3, 10), ('kiwi', 2, None)]
        """
        return self._with(
            operators.join(
                self.ref,
                ref_of(right),
                key=key,
                right_key=right_key,
                how=how,
                across_times=across_times,
                ttl_epochs=ttl_epochs,
                suffix=suffix,
                fill=fill,
                num_shards=num_shards,
                name=name,
            )
        )

    def state_machine(
        self,
        step: Step,
        *,
        key: Key | None = None,
        ttl_epochs: int | None = None,
        num_shards: int | None = None,
        name: str | None = None,
    ) -> Self:
        """Step each key's own state through its values, in order of time.

        Args:
            step: `step(key, value, state)` returns `(state, results)`; the state is
                None at first, and returning None for it forgets the key.
            key: From one record to its key, or the name of a field; the value is the
                record. Default: records are pairs `(key, value)`.
            ttl_epochs: Forget a state that was not stepped for more than so many epochs.
            num_shards: Shards that share the keys; default: as many as this stream has.
            name: See the class.

        >>> from timelyml import Dataflow
        >>> def running_sum(key, value, state):
        ...     total = (state or 0) + value
        ...     return total, [(key, total)]
        >>> flow = Dataflow()
        >>> pairs = flow.source([("a", 1), ("b", 5), ("a", 2)])
        >>> _ = pairs.state_machine(running_sum).collect()
        >>> flow.run()["out"]
        [('a', 1), ('b', 5), ('a', 3)]
        """
        return self._with(
            operators.state_machine(
                self.ref,
                step,
                key=key,
                ttl_epochs=ttl_epochs,
                num_shards=num_shards,
                name=name,
            )
        )

    def window(
        self,
        windows: Windows,
        event_time: Key,
        *,
        key: Key | None = None,
        value: Callable[[Any], Any] | None = None,
        combine: Callable[[Any, Any], Any] | None = None,
        aggregates: Mapping[str, Spec] | None = None,
        allowed_lateness: Any = None,
        late: Late = "all",
        num_shards: int | None = None,
        name: str | None = None,
    ) -> Windowed[Self]:
        """Send `(key, (start, end), value)` for each key and window of event time.

        Args:
            windows: `Tumbling`, `Sliding` or `Session`.
            event_time: From one record to its moment, or the name of a field: numbers,
                or datetimes.
            key: From one record to its key, or the name of a field. Default: records
                are pairs `(key, value)`.
            value: From one record to its value. Default: the record, or the pair's
                value.
            combine: From two values to one; associative. Default: a window's value is
                the list of values.
            aggregates: Makes results columns, without a loop over rows: the key,
                "start", "end" and these, as in `aggregate`. Then `event_time` and `key`
                are names of columns.
            allowed_lateness: How long to wait for records that are out of order.
            late: Which records the second stream gets: those of whose windows "all"
                were over, or "any"; such a record is in results of the others too.
            num_shards: Shards that share the keys; default: as many as this stream has.
            name: See the class.

        >>> from timelyml import Dataflow, Tumbling
        >>> flow = Dataflow()
        >>> events = flow.source([("a", 3), ("a", 8), ("b", 12), ("a", 14)])
        >>> results, late = events.window(Tumbling(10), lambda pair: pair[1])
        >>> _ = results.collect()
        >>> flow.run()["out"]
        [('a', (0, 10), [3, 8]), ('b', (10, 20), [12]), ('a', (10, 20), [14])]
        """
        results, too_late = operators.window(
            self.ref,
            windows,
            event_time,
            key=key,
            value=value,
            combine=combine,
            aggregates=aggregates,
            allowed_lateness=allowed_lateness,
            late=late,
            num_shards=num_shards,
            name=name,
        )
        return Windowed(self._with(results), self._with(too_late))
