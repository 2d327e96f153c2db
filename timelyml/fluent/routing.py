"""Methods of `Stream` that say which shard, or which stream, gets a record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from timelyml import operators
from timelyml.fluent.base import StreamBase, ref_of
from timelyml.operators import Branches, Key


class RoutingMethods(StreamBase):
    """Routing: which shard, or which stream, gets a record."""

    def exchange(
        self,
        key: Callable[[Any], Any],
        *,
        by_batch: bool = False,
        num_shards: int | None = None,
        dense: bool = False,
    ) -> Self:
        """Send each record to the shard that its key names, on the way to each reader.

        Args:
            key: From one record to its key: integers modulo the shards, others by a
                stable hash.
            by_batch: `key` gives one destination shard per row of a whole payload.
            num_shards: Shards of the reader; default: as many as this stream has.
            dense: The reader counts blocks instead of waiting for a frontier.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow(num_shards=2)
        >>> spread = flow.source([1, 2, 3, 5]).exchange(lambda n: n)
        >>> _ = spread.fold(0, lambda total, n: total + n).collect()
        >>> flow.run()["out"]
        [2, 9]
        """
        return self._with(
            operators.exchange(
                self.ref, key, by_batch=by_batch, num_shards=num_shards, dense=dense
            )
        )

    def key_by(self, key: Key, *, num_shards: int | None = None) -> Self:
        """Send `(key, record)` for each record to the shard of its key.

        Args:
            key: From one record to its key. Or the name of a column, by whose values
                rows are routed as they are.
            num_shards: Shards of the reader; default: as many as this stream has.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source(["fig", "kiwi"]).key_by(len).collect()
        >>> flow.run()["out"]
        [(3, 'fig'), (4, 'kiwi')]
        """
        return self._with(operators.key_by(self.ref, key, num_shards=num_shards))

    def broadcast(self, *, num_shards: int | None = None, dense: bool = False) -> Self:
        """Send every record to every shard of each reader.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow(num_shards=3)
        >>> _ = flow.source(["x"]).broadcast().collect()
        >>> flow.run()["out"]
        ['x', 'x', 'x']
        """
        return self._with(
            operators.broadcast(self.ref, num_shards=num_shards, dense=dense)
        )

    def gather(
        self, *, shard: int = 0, num_shards: int | None = None, dense: bool = False
    ) -> Self:
        """Send every record to one shard of each reader.

        >>> import numpy as np
        >>> from timelyml import Dataflow
        >>> flow = Dataflow(num_shards=4)
        >>> total = flow.source(np.arange(10)).gather().fold(0, lambda a, b: a + b)
        >>> _ = total.map(int).collect()
        >>> flow.run()["out"]
        [45]
        """
        return self._with(
            operators.gather(self.ref, shard=shard, num_shards=num_shards, dense=dense)
        )

    def rebalance(self, *, num_shards: int | None = None) -> Self:
        """Spread the records of each shard evenly over the shards of each reader.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow(num_shards=3)
        >>> _ = flow.source(range(9)).rebalance().count().collect()
        >>> flow.run()["out"]
        [3, 3, 3]
        """
        return self._with(operators.rebalance(self.ref, num_shards=num_shards))

    def direct(self, *, num_shards: int | None = None, dense: bool = False) -> Self:
        """Let the operator that makes this stream name the shard of each block or row.

        It sends with `send_to` or `send_rows`; see docs/custom_operators.md.

        Args:
            num_shards: Shards of the reader; default: as many as this stream has.
            dense: See `exchange`.

        >>> import numpy as np
        >>> from timelyml import Dataflow
        >>> def spread(shard, delivery):
        ...     numbers = delivery.payload
        ...     shard.output().send_rows(delivery.time, numbers, numbers // 10)
        >>> flow = Dataflow()
        >>> sent = flow.source(np.array([25, 3, 27])).unary(spread).direct(num_shards=3)
        >>> _ = sent.accumulate(0, lambda total, x: total + int(x.sum())).collect()
        >>> flow.run()["out"]
        [3, 52]
        """
        return self._with(
            operators.direct(self.ref, num_shards=num_shards, dense=dense)
        )

    def concat(self, *others: Self, name: str | None = None) -> Self:
        """Join this stream and others of the same scope into one.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> both = flow.source([1, 2]).concat(flow.source([3]))
        >>> _ = both.collect()
        >>> sorted(flow.run()["out"])
        [1, 2, 3]
        """
        refs = [ref_of(other) for other in others]
        return self._with(operators.concat(self.ref, *refs, name=name))

    def branch(
        self,
        predicate: Callable[[Any], Any],
        *,
        by_batch: bool = False,
        name: str | None = None,
    ) -> Branches[Self]:
        """Part in two: records for which `predicate` is true, and the others.

        Args:
            predicate: From one record to a boolean.
            by_batch: `predicate` gives one boolean per row of a whole payload.
            name: See the class.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> even, odd = flow.source(range(5)).branch(lambda x: x % 2 == 0)
        >>> _, _ = even.collect("even"), odd.collect("odd")
        >>> dict(flow.run())
        {'even': [0, 2, 4], 'odd': [1, 3]}
        """
        matching, rest = operators.branch(
            self.ref, predicate, by_batch=by_batch, name=name
        )
        return Branches(self._with(matching), self._with(rest))

    def partition(
        self,
        num_parts: int,
        choose: Callable[[Any], Any],
        *,
        by_batch: bool = False,
        name: str | None = None,
    ) -> tuple[Self, ...]:
        """Part in `num_parts`: each record goes to part `choose(record)`.

        Args:
            num_parts: At least 1.
            choose: From one record to the index of its part.
            by_batch: `choose` gives one part per row of a whole payload.
            name: See the class.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> parts = flow.source(range(6)).partition(3, lambda x: x % 3)
        >>> _ = parts[2].collect()
        >>> flow.run()["out"]
        [2, 5]
        """
        parts = operators.partition(
            self.ref, num_parts, choose, by_batch=by_batch, name=name
        )
        return tuple(self._with(part) for part in parts)
