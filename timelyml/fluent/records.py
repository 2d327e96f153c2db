"""Methods of `Stream` that work on records and blocks, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, Self, overload

from timelyml import operators
from timelyml.fluent.base import StreamBase
from timelyml.operators import Diverted, OnError
from timelyml.operators.records import Sure
from timelyml.operators.schema import SchemaLike
from timelyml.progress import Timestamp


class RecordMethods(StreamBase):
    """Records and blocks: each is worked on for itself, where it is."""

    @overload
    def map(
        self,
        fn: Callable[[Any], Any],
        *,
        on_error: Sure = ...,
        name: str | None = ...,
    ) -> Self: ...
    @overload
    def map(
        self,
        fn: Callable[[Any], Any],
        *,
        on_error: Literal["divert"],
        name: str | None = ...,
    ) -> Diverted[Self]: ...
    def map(
        self,
        fn: Callable[[Any], Any],
        *,
        on_error: OnError = "fail",
        name: str | None = None,
    ) -> Self | Diverted[Self]:
        """Send `fn(record)` for each record, as a list of results.

        Args:
            fn: From one record to one.
            on_error: Where `fn` raises: "fail" the run, "skip" the record, or "divert"
                it: there are then two streams, the results and `FailedRecord`s.
            name: See the class.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source([1, 2]).map(lambda x: x * x).collect()
        >>> flow.run()["out"]
        [1, 4]

        >>> flow = Dataflow()
        >>> results, failed = flow.source([2, 0]).map(lambda x: 6 / x, on_error="divert")
        >>> _ = results.collect()
        >>> _ = failed.map(lambda f: (f.record, f.error_type)).collect("failed")
        >>> dict(flow.run())
        {'out': [3.0], 'failed': [(0, 'ZeroDivisionError')]}
        """
        return self._each(operators.map(self.ref, fn, on_error=on_error, name=name))

    @overload
    def map_batch(
        self,
        fn: Callable[[Any], Any],
        *,
        schema: SchemaLike | None = ...,
        on_error: Sure = ...,
        name: str | None = ...,
    ) -> Self: ...
    @overload
    def map_batch(
        self,
        fn: Callable[[Any], Any],
        *,
        schema: SchemaLike | None = ...,
        on_error: Literal["divert"],
        name: str | None = ...,
    ) -> Diverted[Self]: ...
    def map_batch(
        self,
        fn: Callable[[Any], Any],
        *,
        schema: SchemaLike | None = None,
        on_error: OnError = "fail",
        name: str | None = None,
    ) -> Self | Diverted[Self]:
        """Send `fn(payload)` for each block: a list, or arrays of equal leading axes.

        Args:
            fn: From one payload to one, of any length.
            schema: Columns of what `fn` returns; default: the first block fixes them.
            on_error: See `map`; what fails is the whole payload.
            name: See the class.

        >>> import numpy as np
        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source(np.arange(3)).map_batch(lambda x: x * 10).collect()
        >>> flow.run().batches("out")
        [(0, array([ 0, 10, 20]))]
        """
        return self._each(
            operators.map_batch(
                self.ref, fn, schema=schema, on_error=on_error, name=name
            )
        )

    @overload
    def map_async(
        self,
        fn: Callable[[Any], Any],
        *,
        limit: int = ...,
        ordered: bool = ...,
        timeout_s: float | None = ...,
        on_error: Sure = ...,
        name: str | None = ...,
    ) -> Self: ...
    @overload
    def map_async(
        self,
        fn: Callable[[Any], Any],
        *,
        limit: int = ...,
        ordered: bool = ...,
        timeout_s: float | None = ...,
        on_error: Literal["divert"],
        name: str | None = ...,
    ) -> Diverted[Self]: ...
    def map_async(
        self,
        fn: Callable[[Any], Any],
        *,
        limit: int = 64,
        ordered: bool = True,
        timeout_s: float | None = None,
        on_error: OnError = "fail",
        name: str | None = None,
    ) -> Self | Diverted[Self]:
        """Send `fn(record)` for each record, where `fn` waits for something elsewhere.

        Args:
            fn: A coroutine function, or a plain one, which runs on threads.
            limit: Most calls out at once, on each worker.
            ordered: Send results in the order of the records, on each shard.
            timeout_s: A call that takes longer fails with a `TimeoutError`.
            on_error: See `map`.
            name: See the class.

        >>> import asyncio
        >>> from timelyml import Dataflow
        >>> async def ask(n):
        ...     await asyncio.sleep(0.001 * (3 - n))
        ...     return f"answer {n}"
        >>> flow = Dataflow()
        >>> _ = flow.source([1, 2]).map_async(ask).collect()
        >>> flow.run()["out"]
        ['answer 1', 'answer 2']
        """
        return self._each(
            operators.map_async(
                self.ref,
                fn,
                limit=limit,
                ordered=ordered,
                timeout_s=timeout_s,
                on_error=on_error,
                name=name,
            )
        )

    @overload
    def flat_map(
        self,
        fn: Callable[[Any], Iterable[Any]],
        *,
        on_error: Sure = ...,
        name: str | None = ...,
    ) -> Self: ...
    @overload
    def flat_map(
        self,
        fn: Callable[[Any], Iterable[Any]],
        *,
        on_error: Literal["divert"],
        name: str | None = ...,
    ) -> Diverted[Self]: ...
    def flat_map(
        self,
        fn: Callable[[Any], Iterable[Any]],
        *,
        on_error: OnError = "fail",
        name: str | None = None,
    ) -> Self | Diverted[Self]:
        """Send all that `fn(record)` yields, while it goes on.

        Args:
            fn: From one record to any number of them.
            on_error: See `map`; what was yielded before is sent.
            name: See the class.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source([1, 3]).flat_map(range).collect()
        >>> flow.run()["out"]
        [0, 0, 1, 2]
        """
        return self._each(
            operators.flat_map(self.ref, fn, on_error=on_error, name=name)
        )

    @overload
    def filter(
        self,
        predicate: Callable[[Any], Any],
        *,
        by_batch: bool = ...,
        on_error: Sure = ...,
        name: str | None = ...,
    ) -> Self: ...
    @overload
    def filter(
        self,
        predicate: Callable[[Any], Any],
        *,
        by_batch: bool = ...,
        on_error: Literal["divert"],
        name: str | None = ...,
    ) -> Diverted[Self]: ...
    def filter(
        self,
        predicate: Callable[[Any], Any],
        *,
        by_batch: bool = False,
        on_error: OnError = "fail",
        name: str | None = None,
    ) -> Self | Diverted[Self]:
        """Send on the records for which `predicate(record)` is true.

        Args:
            predicate: From one record to a boolean.
            by_batch: `predicate` gives one boolean per row of a whole payload.
            on_error: See `map`.
            name: See the class.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source(range(5)).filter(lambda x: x % 2).collect()
        >>> flow.run()["out"]
        [1, 3]
        """
        return self._each(
            operators.filter(
                self.ref, predicate, by_batch=by_batch, on_error=on_error, name=name
            )
        )

    def inspect(
        self, fn: Callable[[Any], object] | None = None, *, name: str | None = None
    ) -> Self:
        """Call `fn(record)` in the worker, by default print; records pass unchanged.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source(["a", "b"]).inspect().collect()
        >>> flow.run()["out"]
        inspect 0: 'a'
        inspect 0: 'b'
        ['a', 'b']
        """
        return self._with(operators.inspect(self.ref, fn, name=name))

    def inspect_batch(
        self, fn: Callable[[Timestamp, Any], object], *, name: str | None = None
    ) -> Self:
        """Call `fn(time, payload)` in the worker; blocks pass unchanged.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> numbers = flow.source(range(3), batch_size=2, epoch_every=1)
        >>> _ = numbers.inspect_batch(print)
        >>> _ = flow.run()
        0 [0, 1]
        1 [2]
        """
        return self._with(operators.inspect_batch(self.ref, fn, name=name))
