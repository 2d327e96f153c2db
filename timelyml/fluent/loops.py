"""Methods of `Stream` that go into scopes, out of them and round loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from timelyml import operators
from timelyml.fluent.base import StreamBase, ref_of
from timelyml.graph import ScopeRef
from timelyml.operators import StreamLike


class LoopMethods(StreamBase):
    """Loops and scopes: a coordinate of time more, or one less."""

    def iterate(
        self,
        body: Callable[[Self], Self | tuple[Self, Self]],
        *,
        max_iterations: int | None = None,
        limit: int | None = None,
        name: str | None = None,
    ) -> Self:
        """Run `body` over and over: on this stream, then on what it sends back.

        Args:
            body: From the stream inside the loop to `(again, out)`: what goes into the
                next round, and what leaves. Or, with `max_iterations`, to one stream,
                which goes round that many times and then leaves.
            max_iterations: Most rounds that a record can take part in; of a pair, what
                is left to go round then is dropped.
            limit: Most rounds that a record may need; one more fails the run, with an
                error that names the loop.
            name: Of the scope and the loop, for traces and errors.

        Raises:
            GraphError: `body` returns something else.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> def halve(numbers):
        ...     return numbers.map(lambda n: n // 2).branch(lambda n: n > 1)
        >>> _ = flow.source([9, 4]).iterate(halve).collect()
        >>> flow.run()["out"]
        [1, 1]

        >>> flow = Dataflow()
        >>> twice = flow.source([5]).iterate(
        ...     lambda s: s.map(lambda n: 2 * n), max_iterations=3
        ... )
        >>> _ = twice.collect()
        >>> flow.run()["out"]
        [40]
        """

        def on_refs(ref: StreamLike) -> Any:
            ends = body(self._with(ref))
            if isinstance(ends, tuple):
                return tuple(ref_of(end) for end in ends)
            return ref_of(ends)

        return self._with(
            operators.iterate(
                self.ref,
                on_refs,
                max_iterations=max_iterations,
                limit=limit,
                name=name,
            )
        )

    def enter(self, scope: ScopeRef) -> Self:
        """Return the stream inside `scope`, in its round 0.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> inside = flow.source([1]).enter(flow.scope("rounds"))
        >>> _ = inside.inspect_batch(print)
        >>> _ = flow.run()
        (0, 0) [1]
        """
        return self._with(operators.enter(self.ref, scope))

    def leave(self) -> Self:
        """Return the stream one scope further out.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> inside = flow.source([1]).enter(flow.scope("rounds"))
        >>> _ = inside.map(lambda n: n + 1).leave().collect()
        >>> flow.run().batches("out")
        [(0, [2])]
        """
        return self._with(operators.leave(self.ref))
