"""Methods of `Stream` for operators of one's own."""

from __future__ import annotations

from typing import Self, Unpack

from timelyml import operators
from timelyml.fluent.base import StreamBase, ref_of
from timelyml.graph import Pact
from timelyml.operators import OperatorOptions
from timelyml.operators.generic import OnBatch, OnFrontier, OnNotify


class GenericMethods(StreamBase):
    """Operators of your own: callbacks for blocks, frontiers and complete times."""

    def unary(
        self,
        on_batch: OnBatch,
        *,
        pact: Pact | None = None,
        name: str | None = None,
        **options: Unpack[OperatorOptions],
    ) -> Self:
        """Call `on_batch(shard, delivery)` for each block; see `operators.unary`.

        >>> from timelyml import Dataflow
        >>> def number(shard, delivery):
        ...     seen = shard.state["seen"] = shard.state.get("seen", 0) + 1
        ...     shard.output().send(delivery.time, [(seen, delivery.payload)])
        >>> flow = Dataflow()
        >>> _ = flow.source("abc".split()).unary(number).collect()
        >>> flow.run()["out"]
        [(1, ['abc'])]
        """
        return self._with(
            operators.unary(self.ref, on_batch, pact=pact, name=name, **options)
        )

    def unary_frontier(
        self,
        on_batch: OnBatch,
        on_frontier: OnFrontier,
        *,
        pact: Pact | None = None,
        name: str | None = None,
        **options: Unpack[OperatorOptions],
    ) -> Self:
        """As `unary`, with `on_frontier(shard)` whenever the input's frontier moved.

        >>> from timelyml import Dataflow
        >>> def keep(shard, delivery):
        ...     shard.state["right"] = shard.retain(delivery.time)
        >>> def last(shard):
        ...     if not shard.frontier():
        ...         right = shard.state.pop("right")
        ...         shard.output().send(right.time, ["over"])
        ...         right.release()
        >>> flow = Dataflow()
        >>> _ = flow.source([1, 2]).unary_frontier(keep, last).collect()
        >>> flow.run()["out"]
        ['over']
        """
        return self._with(
            operators.unary_frontier(
                self.ref, on_batch, on_frontier, pact=pact, name=name, **options
            )
        )

    def unary_notify(
        self,
        on_batch: OnBatch,
        on_notify: OnNotify,
        *,
        in_order: bool = False,
        pact: Pact | None = None,
        name: str | None = None,
        **options: Unpack[OperatorOptions],
    ) -> Self:
        """As `unary`, with `on_notify(shard, time)` for complete times asked for.

        >>> from timelyml import Dataflow
        >>> def note(shard, delivery):
        ...     seen = shard.state.get(delivery.time, 0)
        ...     shard.state[delivery.time] = seen + len(delivery.payload)
        ...     shard.notify_at(delivery.time)
        >>> def tell(shard, time):
        ...     shard.output().send(time, [shard.state.pop(time)])
        >>> flow = Dataflow()
        >>> _ = flow.source(range(3)).unary_notify(note, tell).collect()
        >>> flow.run()["out"]
        [3]
        """
        return self._with(
            operators.unary_notify(
                self.ref,
                on_batch,
                on_notify,
                in_order=in_order,
                pact=pact,
                name=name,
                **options,
            )
        )

    def binary(
        self,
        right: Self,
        on_batch: OnBatch,
        *,
        pacts: tuple[Pact | None, Pact | None] = (None, None),
        name: str | None = None,
        **options: Unpack[OperatorOptions],
    ) -> Self:
        """Call `on_batch(shard, delivery)` for blocks of both streams.

        This one is port 0, `right` is port 1; see `operators.binary`.

        >>> from timelyml import Dataflow
        >>> def label(shard, delivery):
        ...     side = ("left", "right")[delivery.port]
        ...     shard.output().send(delivery.time, [(side, delivery.payload)])
        >>> flow = Dataflow()
        >>> _ = flow.source([1]).binary(flow.source([2]), label).collect()
        >>> sorted(flow.run()["out"])
        [('left', [1]), ('right', [2])]
        """
        return self._with(
            operators.binary(
                self.ref, ref_of(right), on_batch, pacts=pacts, name=name, **options
            )
        )

    def binary_frontier(
        self,
        right: Self,
        on_batch: OnBatch,
        on_frontier: OnFrontier,
        *,
        pacts: tuple[Pact | None, Pact | None] = (None, None),
        name: str | None = None,
        **options: Unpack[OperatorOptions],
    ) -> Self:
        """As `binary`, with `on_frontier(shard)` whenever a frontier moved.

        >>> from timelyml import Dataflow
        >>> def keep(shard, delivery):
        ...     if delivery.port == 0:
        ...         kept = shard.retain(delivery.time), delivery.payload
        ...         shard.state[delivery.time] = kept
        >>> def release(shard):
        ...     for time in sorted(shard.state):
        ...         if not shard.frontier(1).less_equal(time):
        ...             right, kept = shard.state.pop(time)
        ...             shard.output().send(time, kept)
        ...             right.release()
        >>> flow = Dataflow()
        >>> clock = flow.source(lambda shard, count: [])
        >>> _ = flow.source([1]).binary_frontier(clock, keep, release).collect()
        >>> flow.run()["out"]
        [1]
        """
        return self._with(
            operators.binary_frontier(
                self.ref,
                ref_of(right),
                on_batch,
                on_frontier,
                pacts=pacts,
                name=name,
                **options,
            )
        )

    def binary_notify(
        self,
        right: Self,
        on_batch: OnBatch,
        on_notify: OnNotify,
        *,
        in_order: bool = False,
        pacts: tuple[Pact | None, Pact | None] = (None, None),
        name: str | None = None,
        **options: Unpack[OperatorOptions],
    ) -> Self:
        """As `binary`, with `on_notify(shard, time)` for complete times asked for.

        >>> from timelyml import Dataflow
        >>> def note(shard, delivery):
        ...     sides = shard.state.setdefault(delivery.time, [0, 0])
        ...     sides[delivery.port] += len(delivery.payload)
        ...     shard.notify_at(delivery.time)
        >>> def tell(shard, time):
        ...     shard.output().send(time, [tuple(shard.state.pop(time))])
        >>> flow = Dataflow()
        >>> left, right = flow.source([1, 2]), flow.source([3])
        >>> _ = left.binary_notify(right, note, tell).collect()
        >>> flow.run()["out"]
        [(2, 1)]
        """
        return self._with(
            operators.binary_notify(
                self.ref,
                ref_of(right),
                on_batch,
                on_notify,
                in_order=in_order,
                pacts=pacts,
                name=name,
                **options,
            )
        )
