"""Methods of `Dataflow` that begin streams; connectors are loaded when called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from timelyml import operators
from timelyml.fluent.base import FlowBase, StreamT
from timelyml.graph import Placement
from timelyml.operators.addresses import Place
from timelyml.operators.schema import SchemaLike
from timelyml.runtime.recording import Recording


class SourceMethods(FlowBase[StreamT]):
    """Where streams begin: in the driver, in data, on tape, in other systems."""

    def input(
        self,
        name: str | None = None,
        *,
        num_shards: int | None = None,
        placement: Placement | None = None,
        schema: SchemaLike | None = None,
    ) -> StreamT:
        """Return a stream that the driver sends to, by `run.input(name)`.

        Args:
            name: Default: "input".
            num_shards: Default: the dataflow's.
            placement: Which worker holds which shard.
            schema: Its columns, as in `{"user": "int64", "x": ("float32", (8,))}`;
                default: what it is sent first fixes them.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.input("numbers").map(lambda x: 2 * x).collect()
        >>> with flow.start() as run:
        ...     run.input("numbers").send([1, 2])
        >>> run.result()["out"]
        [2, 4]
        """
        return self._stream(
            operators.input(
                self.builder,
                num_shards=num_shards,
                placement=placement,
                schema=schema,
                name=name,
            )
        )

    def source(
        self,
        data: Iterable[Any] | Callable[[int, int], Iterable[Any]] | Any,
        *,
        batch_size: int | None = None,
        epoch_every: int | None = None,
        regular: bool = False,
        num_shards: int | None = None,
        placement: Placement | None = None,
        schema: SchemaLike | None = None,
        name: str | None = None,
    ) -> StreamT:
        """Return a stream of an iterable, arrays, or a function that gives payloads.

        - An iterable of records, or an async one: shard 0 reads it.
        - Arrays: each shard sends a contiguous range of rows.
        - A function of (shard_index, num_shards): each shard sends what it returns or
          yields, one payload per epoch, or `(epoch, payload)`; None: nothing yet. It
          may be an async generator function.

        Args:
            data: See above.
            batch_size: Most records in one block.
            epoch_every: Batches per epoch. Default: all of an iterable or of arrays is
                epoch 0.
            regular: Every shard sends exactly once per epoch, so a dense edge may
                follow.
            num_shards: Default: the dataflow's.
            placement: Which worker holds which shard.
            schema: Its columns; default: those of the arrays, or of the first block.
            name: Shown in traces and errors.

        Raises:
            GraphError: `data` is none of the above.
            ConfigError: The options do not fit each other or `data`.
            PayloadError: Arrays do not fit together.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source(range(5), batch_size=2, epoch_every=1).count().collect()
        >>> flow.run().batches("out")
        [(0, [2]), (1, [2]), (2, [1])]
        """
        return self._stream(
            operators.source(
                self.builder,
                data,
                batch_size=batch_size,
                epoch_every=epoch_every,
                regular=regular,
                num_shards=num_shards,
                placement=placement,
                schema=schema,
                name=name,
            )
        )

    def replay(
        self,
        source: Recording | Place,
        *,
        allow_pickle: bool = False,
        num_shards: int | None = None,
        placement: Placement | None = None,
        name: str | None = None,
    ) -> StreamT:
        """Return a stream of what `Stream.capture` wrote, with its epochs.

        Args:
            source: What `result.recording` returned; or a directory; or the addresses
                at which to listen, the same as those of the capture.
            allow_pickle: Whether to read records that only pickle can express, which
                runs code of whoever wrote the tape.
            num_shards: Default: the dataflow's; the tapes are shared between them.
            placement: Which worker holds which shard.
            name: Shown in traces and errors.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow(num_shards=3)
        >>> flow.source(range(4), batch_size=2, epoch_every=1).rebalance().capture()
        >>> tape = flow.run().recording("capture")
        >>> again = Dataflow(num_shards=1)
        >>> _ = again.replay(tape).count().collect()
        >>> again.run().batches("out")
        [(0, [2]), (1, [2])]
        """
        return self._stream(
            operators.replay(
                self.builder,
                source,
                allow_pickle=allow_pickle,
                num_shards=num_shards,
                placement=placement,
                name=name,
            )
        )

    def read(
        self,
        source: Any,
        *,
        epoch_every: int | None = None,
        epoch_interval_s: float | None = None,
        num_shards: int | None = None,
        placement: Placement | None = None,
        schema: SchemaLike | None = None,
        name: str | None = None,
    ) -> StreamT:
        """Return a stream of what a source of Bytewax reads, or one of that shape.

        Its partitions are shared between the shards; where they stand is state.

        Args:
            source: With the methods of `FixedPartitionedSource` or `DynamicSource`.
            epoch_every: Batches of a shard per epoch.
            epoch_interval_s: Seconds per epoch; default: 10, unless `epoch_every` is
                given.
            num_shards: Default: the dataflow's.
            placement: Which worker holds which shard.
            schema: Its columns; default: the first block of a shard fixes them.
            name: Shown in traces and errors; the key of its positions.

        Raises:
            GraphError: `source` has not the shape of a source.
            ConfigError: An option is out of range.

        >>> from timelyml import Dataflow
        >>> class Numbers:
        ...     def build(self, step_id, worker_index, worker_count):
        ...         batches = iter([[1, 2], [3]])
        ...         self.next_batch = lambda: next(batches)
        ...         return self
        >>> flow = Dataflow()
        >>> _ = flow.read(Numbers()).map(lambda n: 10 * n).collect()
        >>> flow.run()["out"]
        [10, 20, 30]
        """
        from timelyml import io  # noqa: PLC0415  not everybody has connectors

        return self._stream(
            io.read(
                self.builder,
                source,
                epoch_every=epoch_every,
                epoch_interval_s=epoch_interval_s,
                num_shards=num_shards,
                placement=placement,
                schema=schema,
                name=name,
            )
        )

    def bytewax(
        self,
        build: Callable[[Callable[[Any], None]], Any],
        *,
        processes: int = 1,
        columns: bool = False,
        epoch_interval_s: float = 10.0,
        regular: bool = False,
        credit_bytes: int = 8 << 20,
        placement: Placement | None = None,
        schema: SchemaLike | None = None,
        name: str | None = None,
    ) -> StreamT:
        """Return a stream of what a Bytewax dataflow sends from processes of its own.

        A record's time is its epoch in Bytewax. What waits stays within
        `credit_bytes`; beyond it the Bytewax process blocks, and so do its sources.

        Args:
            build: Called in each Bytewax process with a function `send`: makes a
                Bytewax dataflow, calls `send(stream)` once, and returns the dataflow.
            processes: Of the Bytewax cluster; also the shards of the stream.
            columns: Each item is a block of columns; default: each is a record.
            epoch_interval_s: Seconds per epoch of Bytewax.
            regular: Each item is an epoch of its own, counted from 0, so that a dense
                edge may follow; only with one process.
            credit_bytes: Bytes that may wait between each process and its shard.
            placement: Which worker holds which shard, and so starts which process.
            schema: Its columns; default: the first block of a shard fixes them.
            name: Shown in traces and errors.

        Raises:
            ConfigError: Bytewax is not installed, or an option is out of range.
            GraphError: `build` cannot be called.
            ShippingError: `build` cannot be pickled.

        >>> from timelyml import Dataflow
        >>> def tokens(send):
        ...     import bytewax.operators as op
        ...     from bytewax.dataflow import Dataflow
        ...     from bytewax.testing import TestingSource
        ...     flow = Dataflow("tokens")
        ...     lines = op.input("lines", flow, TestingSource(["to be", "or not"]))
        ...     send(op.map("tokenise", lines, str.split))
        ...     return flow
        >>> flow = Dataflow()
        >>> _ = flow.bytewax(tokens).collect()
        >>> flow.run()["out"]
        [['to', 'be'], ['or', 'not']]
        """
        from timelyml import io  # noqa: PLC0415  as in `read`

        return self._stream(
            io.bytewax(
                self.builder,
                build,
                processes=processes,
                columns=columns,
                epoch_interval_s=epoch_interval_s,
                regular=regular,
                credit_bytes=credit_bytes,
                placement=placement,
                schema=schema,
                name=name,
            )
        )
