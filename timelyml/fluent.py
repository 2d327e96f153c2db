"""The fluent API: `Dataflow` and `Stream`, thin methods over the operators.

A method adds to the graph and returns at once; nothing runs before `run` or `start`.
What the operators do is documented with them, in `timelyml.operators`.

>>> flow = Dataflow("words")
>>> words = flow.source(["to be or", "not to be"]).flat_map(str.split)
>>> _ = words.reduce(lambda w: w, lambda a, b: a + b, value=lambda w: 1).collect()
>>> sorted(flow.run()["out"])
[('be', 2), ('not', 1), ('or', 1), ('to', 2)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from timelyml import operators
from timelyml.errors import ConfigError, GraphError
from timelyml.graph import (
    Graph,
    GraphBuilder,
    LoopRef,
    Pact,
    Placement,
    ScopeRef,
    StreamRef,
)
from timelyml.operators import (
    Branches,
    Diverted,
    Key,
    OnError,
    OperatorBuilder,
    OperatorOptions,
    StreamLike,
    Windowed,
)
from timelyml.operators.addresses import Place
from timelyml.operators.aggregates import Spec
from timelyml.operators.generic import OnBatch, OnFrontier, OnNotify
from timelyml.operators.join import How
from timelyml.operators.operator_builder import Effects
from timelyml.operators.records import Sure
from timelyml.operators.schema import SchemaLike
from timelyml.operators.state_machine import Step
from timelyml.operators.windows import Windows
from timelyml.progress import Summary, Timestamp
from timelyml.runtime.cluster import Cluster, run_graph, start_graph
from timelyml.runtime.operator import Logic
from timelyml.runtime.record import OnMessage
from timelyml.runtime.recording import Recording
from timelyml.runtime.result import Result
from timelyml.runtime.run import Run
from timelyml.runtime.signals import HeldSignals

Mode = Literal["inline", "threads", "processes"]
Wire = Literal["ipc", "tcp"]
Paths = str | Path | Iterable[str | Path]
Made = StreamLike | Diverted[StreamRef]


class Dataflow:
    """A dataflow to be built, then run any number of times.

    Args:
        name: For traces and errors.
        num_shards: Shards of sources and inputs that do not say; operators have as
            many as what they read. Default: one per worker.
    """

    def __init__(
        self, name: str = "dataflow", *, num_shards: int | None = None
    ) -> None:
        self.builder = GraphBuilder(name, num_shards)

    @property
    def name(self) -> str:
        """The name for traces and errors."""
        return self.builder.name

    def input(
        self,
        name: str | None = None,
        *,
        num_shards: int | None = None,
        placement: Placement | None = None,
        schema: SchemaLike | None = None,
    ) -> Stream:
        """Return a stream that the driver sends to, by `run.input(name)`.

        Args:
            name: Default: "input".
            num_shards: Default: the dataflow's.
            placement: Which worker holds which shard.
            schema: Its columns, as in `{"user": "int64", "x": ("float32", (8,))}`;
                default: what it is sent first fixes them.

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
    ) -> Stream:
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
    ) -> Stream:
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
    ) -> Stream:
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

    def read_text(
        self,
        paths: Paths,
        *,
        encoding: str = "utf-8",
        batch_size: int | None = None,
        epoch_every: int | None = None,
        num_shards: int | None = None,
        placement: Placement | None = None,
        name: str | None = None,
    ) -> Stream:
        r"""Return a stream of the lines of files; each shard reads a range of the bytes.

        Args:
            paths: One path, a pattern with wildcards, or several.
            encoding: Of the text.
            batch_size: Most lines in one block; default: those of about 256 KiB.
            epoch_every: Blocks per epoch, on each shard. Default: one epoch holds all.
            num_shards: Default: the dataflow's.
            placement: Which worker holds which shard.
            name: Shown in traces and errors.

        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        ...     _ = file.write("to be\nor not\n"), file.flush()
        ...     flow = Dataflow()
        ...     _ = flow.read_text(file.name).collect()
        ...     flow.run()["out"]
        ['to be', 'or not']
        """
        from timelyml import io  # noqa: PLC0415  as in `read`

        return self._stream(
            io.read_text(
                self.builder,
                paths,
                encoding=encoding,
                batch_size=batch_size,
                epoch_every=epoch_every,
                num_shards=num_shards,
                placement=placement,
                name=name,
            )
        )

    def read_csv(
        self,
        paths: Paths,
        *,
        schema: SchemaLike | None = None,
        columns: Sequence[str] | None = None,
        delimiter: str = ",",
        has_newlines: bool = False,
        encoding: str = "utf-8",
        batch_size: int | None = None,
        epoch_every: int | None = None,
        num_shards: int | None = None,
        placement: Placement | None = None,
        name: str | None = None,
    ) -> Stream:
        r"""Return a stream of rows: columns if a schema says how, else dicts of text.

        Args:
            paths: One path, a pattern with wildcards, or several.
            schema: Dtypes of the columns to read, by name; default: rows are dicts.
            columns: Names of all columns, for files without a header.
            delimiter: Between fields.
            has_newlines: Whether quoted fields hold ends of lines; files are then read
                whole, each by one shard.
            encoding: Of the text.
            batch_size: Most rows in one block; default: those of about 256 KiB.
            epoch_every: Blocks per epoch, on each shard. Default: one epoch holds all.
            num_shards: Default: the dataflow's.
            placement: Which worker holds which shard.
            name: Shown in traces and errors.

        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write("user,n\nann,1\nbo,2\n"), file.flush()
        ...     flow = Dataflow()
        ...     rows = flow.read_csv(file.name, schema={"n": "int64"})
        ...     _ = rows.map(lambda row: int(row["n"])).collect()
        ...     flow.run()["out"]
        [1, 2]
        """
        from timelyml import io  # noqa: PLC0415  as in `read`

        return self._stream(
            io.read_csv(
                self.builder,
                paths,
                schema=schema,
                columns=columns,
                delimiter=delimiter,
                has_newlines=has_newlines,
                encoding=encoding,
                batch_size=batch_size,
                epoch_every=epoch_every,
                num_shards=num_shards,
                placement=placement,
                name=name,
            )
        )

    def read_parquet(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        fill: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        epoch_every: int | None = None,
        num_shards: int | None = None,
        placement: Placement | None = None,
        name: str | None = None,
    ) -> Stream:
        """Return a stream of columns; each shard reads some of the row groups.

        It needs pyarrow, the extra `arrow`.

        Args:
            paths: One path, a pattern with wildcards, or several.
            columns: Names of those to read; default: all.
            fill: By column, what stands for missing values; default: NaN.
            batch_size: Most rows in one block; default: a row group.
            epoch_every: Blocks per epoch, on each shard. Default: one epoch holds all.
            num_shards: Default: the dataflow's.
            placement: Which worker holds which shard.
            name: Shown in traces and errors.

        >>> import tempfile, pyarrow, pyarrow.parquet
        >>> with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        ...     pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2]}), file.name)
        ...     flow = Dataflow()
        ...     _ = flow.read_parquet(file.name).map(lambda row: int(row["n"])).collect()
        ...     flow.run()["out"]
        [1, 2]
        """
        from timelyml import io  # noqa: PLC0415  as in `read`

        return self._stream(
            io.read_parquet(
                self.builder,
                paths,
                columns=columns,
                fill=fill,
                batch_size=batch_size,
                epoch_every=epoch_every,
                num_shards=num_shards,
                placement=placement,
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
    ) -> Stream:
        """Return a stream of what `Stream.capture` wrote, with its epochs.

        Args:
            source: What `result.recording` returned; or a directory; or the addresses
                at which to listen, the same as those of the capture.
            allow_pickle: Whether to read records that only pickle can express, which
                runs code of whoever wrote the tape.
            num_shards: Default: the dataflow's; the tapes are shared between them.
            placement: Which worker holds which shard.
            name: Shown in traces and errors.

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

    def operator(
        self,
        logic: Logic,
        *,
        inputs: Sequence[Stream] = (),
        outputs: int | Sequence[Mapping[int, Effects] | None] = 1,
        pacts: Sequence[Pact | None] = (),
        kind: str = "operator",
        name: str | None = None,
        is_source: bool = False,
        scope: ScopeRef | None = None,
        **options: Unpack[OperatorOptions],
    ) -> tuple[Stream, ...]:
        """Add an operator with any number of ports; returns its outputs.

        Args:
            logic: Its callbacks.
            inputs: The streams that it reads, by port.
            outputs: How many; or for each, by input port, what the way from there does
                to time, with ports left out that never cause output there. Default:
                each input may cause output at its own time.
            pacts: How records of each input find their shard; default: as it is routed.
            kind: What it does, in a word.
            name: For traces, errors and its state; default: chosen from `kind`.
            is_source: Whether it produces records that no input caused.
            scope: Of an operator without inputs.
            options: See `OperatorOptions`.

        >>> def part(shard, delivery):
        ...     for number in delivery.payload:
        ...         shard.output(number % 2).send(delivery.time, [number])
        >>> flow = Dataflow()
        >>> logic = Logic(on_batch=part)
        >>> even, odd = flow.operator(logic, inputs=[flow.source(range(5))], outputs=2)
        >>> _, _ = even.collect("even"), odd.collect("odd")
        >>> dict(flow.run())
        {'even': [0, 2, 4], 'odd': [1, 3]}
        """
        builder = OperatorBuilder(
            self.builder,
            kind,
            name=name,
            is_source=is_source,
            scope=scope,
            **options,
        )
        if pacts and len(pacts) != len(inputs):
            raise GraphError(
                f"operator {name or kind!r} has pacts for other inputs; got "
                f"{len(pacts)}; expected {len(inputs)}; give one each, or none at all"
            )
        for port, stream in enumerate(inputs):
            builder.add_input(_ref(stream), pacts[port] if pacts else None)
        each = [None] * outputs if isinstance(outputs, int) else outputs
        for effects in each:
            builder.add_output(effects)
        return tuple(self._stream(ref) for ref in builder.build(logic))

    def scope(
        self, name: str | None = None, *, parent: ScopeRef | None = None
    ) -> ScopeRef:
        """Open a nested scope, for `Stream.enter` and `feedback`.

        Args:
            name: For traces and errors.
            parent: The scope around it; default: the top level.

        >>> flow = Dataflow()
        >>> scope = flow.scope("rounds")
        >>> _ = flow.source([1]).enter(scope).leave().collect()
        >>> flow.run()["out"]
        [1]
        """
        return self.builder.scope(name, parent=parent)

    def feedback(
        self,
        scope: ScopeRef | None = None,
        *,
        by: int = 1,
        summary: Summary | None = None,
        num_shards: int | None = None,
        name: str | None = None,
    ) -> Loop:
        """Open a loop: use its `stream` first, `connect` its end later.

        Args:
            scope: Where it runs; default: at the top level, where a round is an epoch.
            by: How far a round advances the innermost coordinate.
            summary: Instead of `by`, any effect on time.
            num_shards: Of the stream to be connected; default: the dataflow's.
            name: For errors.

        >>> flow = Dataflow()
        >>> scope = flow.scope("rounds")
        >>> loop = flow.feedback(scope)
        >>> numbers = flow.source([3]).enter(scope).concat(loop.stream)
        >>> loop.connect(numbers.map(lambda n: n - 1).filter(lambda n: n > 0))
        >>> _ = numbers.leave().collect()
        >>> flow.run()["out"]
        [3, 2, 1]
        """
        return Loop(
            self,
            self.builder.feedback(
                scope, by=by, summary=summary, name=name, num_shards=num_shards
            ),
        )

    def build(self) -> Graph:
        """Return the graph of everything added so far.

        Raises:
            GraphError: It cannot run; names the operators and the path.

        >>> flow = Dataflow()
        >>> _ = flow.source([1]).map(str).collect()
        >>> [operator.name for operator in flow.build().operators]
        ['source', 'map', 'out']
        """
        return self.builder.build()

    def describe(self) -> str:
        """Return the graph as text, one line an operator.

        >>> flow = Dataflow("numbers")
        >>> _ = flow.source([1], num_shards=1).map(str)
        >>> print(flow.describe())
        dataflow numbers
        0 source: source; 1 shard; 0 in, 1 out; source; states state schema
        1 map: map; 1 shard; 1 in, 1 out; in0 <- source.out0 by pipeline
        """
        return self.build().describe()

    def to_mermaid(self) -> str:
        """Return the source of a Mermaid flowchart of the graph.

        >>> flow = Dataflow("numbers")
        >>> _ = flow.source([1], num_shards=1).map(str)
        >>> print(flow.to_mermaid())
        flowchart LR
          op0(["source<br/>1 shard"])
          op1["map<br/>1 shard"]
          op0 -->|"pipeline"| op1
        """
        return self.build().to_mermaid()

    def run(
        self,
        workers: int | None = None,
        *,
        cluster: Cluster | None = None,
        mode: Mode | None = None,
        transport: Wire | None = None,
        on_message: OnMessage | None = None,
        **config: Any,
    ) -> Result:
        """Run to the end and return what was collected; inputs are closed at once.

        Args:
            workers: How many worker processes; default: none, the calling thread works.
            cluster: A cluster to run on instead.
            mode: `inline`, `threads` or `processes`, for a cluster of this run's own.
            transport: Between processes, `ipc` or `tcp`.
            on_message: Called with (operator, shard, tag, body) for what operators
                send to the driver with `shard.emit`.
            config: Options of `RunConfig`, e.g. `timeout_s`.

        Raises:
            TimelyError: The graph, an option or captured code was refused; or the run
                failed.

        >>> flow = Dataflow()
        >>> _ = flow.source([1, 2]).map(lambda n: n + 1).collect()
        >>> flow.run()["out"]
        [2, 3]
        """
        graph = self.build()
        own = _own_cluster(workers, cluster, mode, transport)
        if cluster is not None:
            return cluster.run(graph, on_message=on_message, **config)
        return run_graph(
            graph, workers=workers, on_message=on_message, cluster=own, **config
        )

    def start(
        self,
        workers: int | None = None,
        *,
        cluster: Cluster | None = None,
        mode: Mode | None = None,
        transport: Wire | None = None,
        on_message: OnMessage | None = None,
        **config: Any,
    ) -> Run:
        """Start and return at once, with a handle to feed, watch and end the run.

        Args:
            workers: How many worker processes; default: a thread of this process.
            cluster: A cluster to run on instead.
            mode: See `run`.
            transport: See `run`.
            on_message: See `run`; called from another thread.
            config: Options of `RunConfig`.

        Raises:
            TimelyError: The graph, an option or captured code was refused.

        >>> flow = Dataflow()
        >>> _ = flow.input("numbers").collect()
        >>> with flow.start() as run:
        ...     run.input("numbers").send([1, 2])
        >>> run.result()["out"]
        [1, 2]
        """
        graph = self.build()
        own = _own_cluster(workers, cluster, mode, transport)
        if cluster is not None:
            return cluster.start(graph, on_message=on_message, **config)
        return start_graph(
            graph, workers=workers, on_message=on_message, cluster=own, **config
        )

    def __repr__(self) -> str:
        return f"<Dataflow {self.name!r}>"

    def _stream(self, ref: StreamLike) -> Stream:
        return Stream(self, ref)


class Loop:
    """A feedback loop of a dataflow; made by `Dataflow.feedback`."""

    def __init__(self, flow: Dataflow, ref: LoopRef) -> None:
        self._ref = ref
        self.stream = Stream(flow, ref.stream)

    def connect(self, end: Stream) -> None:
        """Feed `end` back into `stream`, once.

        Raises:
            GraphError: It is connected already, or `end` is in another scope.
        """
        operators.connect(self._ref, _ref(end))


class Stream:
    """A stream of timestamped records; made by `Dataflow` and by its own methods.

    Functions that work on records get one item of a list, or one row of columns.
    `name=` names the operator in traces and errors, and the key of its state; the
    default is chosen from what it does.
    """

    def __init__(self, flow: Dataflow, ref: StreamLike) -> None:
        self.flow = flow
        self.ref = ref

    def __repr__(self) -> str:
        return f"<Stream of {self.flow.name!r}: {self.ref!r}>"

    @overload
    def map(
        self,
        fn: Callable[[Any], Any],
        *,
        on_error: Sure = ...,
        name: str | None = ...,
    ) -> Stream: ...
    @overload
    def map(
        self,
        fn: Callable[[Any], Any],
        *,
        on_error: Literal["divert"],
        name: str | None = ...,
    ) -> Diverted[Stream]: ...
    def map(
        self,
        fn: Callable[[Any], Any],
        *,
        on_error: OnError = "fail",
        name: str | None = None,
    ) -> Stream | Diverted[Stream]:
        """Send `fn(record)` for each record, as a list of results.

        Args:
            fn: From one record to one.
            on_error: Where `fn` raises: "fail" the run, "skip" the record, or "divert"
                it: there are then two streams, the results and `FailedRecord`s.
            name: See the class.

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
    ) -> Stream: ...
    @overload
    def map_batch(
        self,
        fn: Callable[[Any], Any],
        *,
        schema: SchemaLike | None = ...,
        on_error: Literal["divert"],
        name: str | None = ...,
    ) -> Diverted[Stream]: ...
    def map_batch(
        self,
        fn: Callable[[Any], Any],
        *,
        schema: SchemaLike | None = None,
        on_error: OnError = "fail",
        name: str | None = None,
    ) -> Stream | Diverted[Stream]:
        """Send `fn(payload)` for each block: a list, or arrays of equal leading axes.

        Args:
            fn: From one payload to one, of any length.
            schema: Columns of what `fn` returns; default: the first block fixes them.
            on_error: See `map`; what fails is the whole payload.
            name: See the class.

        >>> import numpy as np
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
    ) -> Stream: ...
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
    ) -> Diverted[Stream]: ...
    def map_async(
        self,
        fn: Callable[[Any], Any],
        *,
        limit: int = 64,
        ordered: bool = True,
        timeout_s: float | None = None,
        on_error: OnError = "fail",
        name: str | None = None,
    ) -> Stream | Diverted[Stream]:
        """Send `fn(record)` for each record, where `fn` waits for something elsewhere.

        Args:
            fn: A coroutine function, or a plain one, which runs on threads.
            limit: Most calls out at once, on each worker.
            ordered: Send results in the order of the records, on each shard.
            timeout_s: A call that takes longer fails with a `TimeoutError`.
            on_error: See `map`.
            name: See the class.

        >>> import asyncio
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
    ) -> Stream: ...
    @overload
    def flat_map(
        self,
        fn: Callable[[Any], Iterable[Any]],
        *,
        on_error: Literal["divert"],
        name: str | None = ...,
    ) -> Diverted[Stream]: ...
    def flat_map(
        self,
        fn: Callable[[Any], Iterable[Any]],
        *,
        on_error: OnError = "fail",
        name: str | None = None,
    ) -> Stream | Diverted[Stream]:
        """Send all that `fn(record)` yields, while it goes on.

        Args:
            fn: From one record to any number of them.
            on_error: See `map`; what was yielded before is sent.
            name: See the class.

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
    ) -> Stream: ...
    @overload
    def filter(
        self,
        predicate: Callable[[Any], Any],
        *,
        by_batch: bool = ...,
        on_error: Literal["divert"],
        name: str | None = ...,
    ) -> Diverted[Stream]: ...
    def filter(
        self,
        predicate: Callable[[Any], Any],
        *,
        by_batch: bool = False,
        on_error: OnError = "fail",
        name: str | None = None,
    ) -> Stream | Diverted[Stream]:
        """Send on the records for which `predicate(record)` is true.

        Args:
            predicate: From one record to a boolean.
            by_batch: `predicate` gives one boolean per row of a whole payload.
            on_error: See `map`.
            name: See the class.

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
    ) -> Stream:
        """Call `fn(record)` in the worker, by default print; records pass unchanged.

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
    ) -> Stream:
        """Call `fn(time, payload)` in the worker; blocks pass unchanged.

        >>> flow = Dataflow()
        >>> numbers = flow.source(range(3), batch_size=2, epoch_every=1)
        >>> _ = numbers.inspect_batch(print)
        >>> _ = flow.run()
        0 [0, 1]
        1 [2]
        """
        return self._with(operators.inspect_batch(self.ref, fn, name=name))

    def exchange(
        self,
        key: Callable[[Any], Any],
        *,
        by_batch: bool = False,
        num_shards: int | None = None,
        dense: bool = False,
    ) -> Stream:
        """Send each record to the shard that its key names, on the way to each reader.

        Args:
            key: From one record to its key: integers modulo the shards, others by a
                stable hash.
            by_batch: `key` gives one destination shard per row of a whole payload.
            num_shards: Shards of the reader; default: as many as this stream has.
            dense: The reader counts blocks instead of waiting for a frontier.

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

    def broadcast(
        self, *, num_shards: int | None = None, dense: bool = False
    ) -> Stream:
        """Send every record to every shard of each reader.

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
    ) -> Stream:
        """Send every record to one shard of each reader.

        >>> import numpy as np
        >>> flow = Dataflow(num_shards=4)
        >>> total = flow.source(np.arange(10)).gather().fold(0, lambda a, b: a + b)
        >>> _ = total.map(int).collect()
        >>> flow.run()["out"]
        [45]
        """
        return self._with(
            operators.gather(self.ref, shard=shard, num_shards=num_shards, dense=dense)
        )

    def direct(self, *, num_shards: int | None = None, dense: bool = False) -> Stream:
        """Let the operator that makes this stream name the shard of each block or row.

        It sends with `send_to` or `send_rows`; see docs/custom_operators.md.

        Args:
            num_shards: Shards of the reader; default: as many as this stream has.
            dense: See `exchange`.

        >>> import numpy as np
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

    def rebalance(self, *, num_shards: int | None = None) -> Stream:
        """Spread the records of each shard evenly over the shards of each reader.

        >>> flow = Dataflow(num_shards=3)
        >>> _ = flow.source(range(9)).rebalance().count().collect()
        >>> flow.run()["out"]
        [3, 3, 3]
        """
        return self._with(operators.rebalance(self.ref, num_shards=num_shards))

    def key_by(self, key: Key, *, num_shards: int | None = None) -> Stream:
        """Send `(key, record)` for each record to the shard of its key.

        Args:
            key: From one record to its key. Or the name of a column, by whose values
                rows are routed as they are.
            num_shards: Shards of the reader; default: as many as this stream has.

        >>> flow = Dataflow()
        >>> _ = flow.source(["fig", "kiwi"]).key_by(len).collect()
        >>> flow.run()["out"]
        [(3, 'fig'), (4, 'kiwi')]
        """
        return self._with(operators.key_by(self.ref, key, num_shards=num_shards))

    def concat(self, *others: Stream, name: str | None = None) -> Stream:
        """Join this stream and others of the same scope into one.

        >>> flow = Dataflow()
        >>> both = flow.source([1, 2]).concat(flow.source([3]))
        >>> _ = both.collect()
        >>> sorted(flow.run()["out"])
        [1, 2, 3]
        """
        refs = [_ref(other) for other in others]
        return self._with(operators.concat(self.ref, *refs, name=name))

    def branch(
        self,
        predicate: Callable[[Any], Any],
        *,
        by_batch: bool = False,
        name: str | None = None,
    ) -> Branches[Stream]:
        """Part in two: records for which `predicate` is true, and the others.

        Args:
            predicate: From one record to a boolean.
            by_batch: `predicate` gives one boolean per row of a whole payload.
            name: See the class.

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
    ) -> tuple[Stream, ...]:
        """Part in `num_parts`: each record goes to part `choose(record)`.

        Args:
            num_parts: At least 1.
            choose: From one record to the index of its part.
            by_batch: `choose` gives one part per row of a whole payload.
            name: See the class.

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

    def delay(
        self,
        until: Callable[[Any, Any], Any],
        *,
        by_batch: bool = False,
        name: str | None = None,
    ) -> Stream:
        """Send each record at the time `until(record, time)`, once that is complete.

        Args:
            until: From record and time to the time to send it at, the same or later.
            by_batch: `until(payload, time)` gives one time for a whole payload, or an
                array with one epoch per row.
            name: See the class.

        >>> flow = Dataflow()
        >>> _ = flow.source([1, 5, 3]).delay(lambda n, time: n).collect()
        >>> flow.run().batches("out")
        [(1, [1]), (3, [3]), (5, [5])]
        """
        return self._with(
            operators.delay(self.ref, until, by_batch=by_batch, name=name)
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
        num_shards: int | None = None,
        name: str | None = None,
    ) -> Windowed[Stream]:
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
            num_shards: Shards that share the keys; default: as many as this stream has.
            name: See the class.

        >>> from timelyml import Tumbling
        >>> flow = Dataflow()
        >>> events = flow.source([("a", 3), ("a", 8), ("b", 12), ("a", 14)])
        >>> results, late = events.window(Tumbling(10), lambda pair: pair[1])
        >>> _ = results.collect()
        >>> flow.run()["out"]
        [('a', (0, 10), [3, 8]), ('b', (10, 20), [12]), ('a', (10, 20), [14])]
        """
        results, late = operators.window(
            self.ref,
            windows,
            event_time,
            key=key,
            value=value,
            combine=combine,
            aggregates=aggregates,
            allowed_lateness=allowed_lateness,
            num_shards=num_shards,
            name=name,
        )
        return Windowed(self._with(results), self._with(late))

    def fold(
        self,
        initial: Any,
        combine: Callable[[Any, Any], Any],
        *,
        name: str | None = None,
    ) -> Stream:
        """Reduce each time's records to one value per shard, once complete.

        Args:
            initial: Accumulator before the first record; copied for each time.
            combine: From accumulator and record to the next accumulator.
            name: See the class.

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
    ) -> Stream:
        """Reduce each time's payloads to one value per shard, once complete.

        Args:
            initial: Accumulator before the first payload; copied for each time.
            combine: From accumulator and payload to the next accumulator.
            finish: From the accumulator to a payload; default: a list of it alone.
            name: See the class.

        >>> import numpy as np
        >>> flow = Dataflow()
        >>> sums = flow.source(np.arange(4)).accumulate(0, lambda a, x: a + int(x.sum()))
        >>> _ = sums.collect()
        >>> flow.run()["out"]
        [6]
        """
        return self._with(
            operators.accumulate(self.ref, initial, combine, finish=finish, name=name)
        )

    def reduce(
        self,
        key: Key,
        combine: Callable[[Any, Any], Any],
        *,
        value: Callable[[Any], Any] | None = None,
        num_shards: int | None = None,
        name: str | None = None,
    ) -> Stream:
        """Reduce each time's records to one `(key, value)` per key, once complete.

        It exchanges by key itself, after each shard has combined its own records.

        Args:
            key: From one record to its key, or the name of a field.
            combine: From two values to one; associative.
            value: From one record to its value; default: the record.
            num_shards: Shards that share the keys; default: as many as this stream has.
            name: See the class.

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

    def count(
        self,
        key: Key | None = None,
        *,
        num_shards: int | None = None,
        name: str | None = None,
    ) -> Stream:
        """Send the number of records of each time: of each shard, or of each key.

        Args:
            key: From one record to its key, or the name of a field: sends `(key,
                number)`. Default: each shard counts all that it holds.
            num_shards: Shards that share the keys; default: as many as this stream has.
            name: See the class.

        >>> flow = Dataflow()
        >>> _ = flow.source("to be or to go".split()).count(lambda word: word).collect()
        >>> flow.run()["out"]
        [('to', 2), ('be', 1), ('or', 1), ('go', 1)]
        """
        return self._with(
            operators.count(self.ref, key, num_shards=num_shards, name=name)
        )

    def aggregate(
        self,
        by: str | Sequence[str],
        aggregates: Mapping[str, Spec],
        *,
        num_shards: int | None = None,
        name: str | None = None,
    ) -> Stream:
        """Aggregate each time's rows to one row per key, once complete, as columns.

        It exchanges by key itself, after each shard has combined its own rows.

        Args:
            by: Name of the key column, or of several; none of them for one row in all.
            aggregates: By name of a column to make: "count", or a pair of "sum",
                "mean", "min" or "max" and the column that it takes.
            num_shards: Shards that share the keys; default: as many as this stream has.
            name: See the class.

        >>> import numpy as np
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

    def distinct(
        self,
        key: Key | None = None,
        *,
        across_times: bool = False,
        ttl_epochs: int | None = None,
        num_shards: int | None = None,
        name: str | None = None,
    ) -> Stream:
        """Send the first record of each key, of each time or of all times.

        Args:
            key: From one record to its key, or the name of a field or column. Default:
                the whole record.
            across_times: Send a key once for all times, not once for each.
            ttl_epochs: Forget a key that was not seen for more than so many epochs.
            num_shards: Shards that share the keys; default: as many as this stream has.
            name: See the class.

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
        right: Stream,
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
    ) -> Stream:
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
                _ref(right),
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
    ) -> Stream:
        """Step each key's own state through its values, in order of time.

        Args:
            step: `step(key, value, state)` returns `(state, results)`; the state is
                None at first, and returning None for it forgets the key.
            key: From one record to its key, or the name of a field; the value is the
                record. Default: records are pairs `(key, value)`.
            ttl_epochs: Forget a state that was not stepped for more than so many epochs.
            num_shards: Shards that share the keys; default: as many as this stream has.
            name: See the class.

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

    def compute(
        self,
        fn: Callable[..., Any],
        *others: Stream,
        init: Callable[[int], Any] | None = None,
        pact: Pact | Sequence[Pact] | None = None,
        pad: bool = False,
        name: str = "compute",
        num_shards: int | None = None,
        placement: Placement | None = None,
    ) -> Stream:
        """Apply a JAX function to all rows of each time, once they are complete.

        Args:
            fn: From columns of this stream and of `others` to columns; with `init`,
                from state and columns to state and columns. Jitted once per worker.
            others: Further arguments of `fn`, from streams of the same scope.
            init: From the index of a shard to its initial state.
            pact: How rows find their shard; default: as the streams are routed.
            pad: Pad rows with zeros to a bucket, so that XLA compiles few shapes.
            name: Shown in traces and errors; the key of its state.
            num_shards: Default: that of this stream.
            placement: Which worker holds which shard.

        >>> import numpy as np
        >>> def scale(rows):
        ...     return {"x": 2 * rows["x"]}
        >>> flow = Dataflow()
        >>> _ = flow.source({"x": np.arange(3)}).compute(scale).collect()
        >>> [(time, rows["x"].tolist()) for time, rows in flow.run().batches("out")]
        [(0, [0, 2, 4])]
        """
        with (
            HeldSignals()
        ):  # an interrupt breaks JAX while it loads, or gets lost in it
            from timelyml.ml import compute  # noqa: PLC0415  it loads JAX

        return self._with(
            compute(
                [self.ref, *map(_ref, others)],
                fn,
                init=init,
                pact=pact,
                pad=pad,
                name=name,
                num_shards=num_shards,
                placement=placement,
            )
        )

    def moe(self, layer: Any, params: Any, *, name: str = "moe") -> Stream:
        """Apply a mixture-of-experts layer to tokens, its experts spread over shards.

        Args:
            layer: An `ml.MoE`.
            params: Of `layer.init`; each expert's stay with its shard.
            name: Prefix of the operators.

        >>> import jax
        >>> import numpy as np
        >>> from timelyml import ml
        >>> layer, x = ml.MoE(num_experts=4, d_ff=8), np.ones((3, 2), np.float32)
        >>> params = layer.init(jax.random.key(0), x)
        >>> flow = Dataflow(num_shards=1)
        >>> _ = flow.source(x).moe(layer, params).collect()
        >>> ((_, rows),) = flow.run().batches("out")
        >>> bool(np.allclose(rows, layer.dense(params, x)[0], atol=1e-6))
        True
        """
        return self._with(layer.on(self.ref, params, name=name))

    def enter(self, scope: ScopeRef) -> Stream:
        """Return the stream inside `scope`, in its round 0.

        >>> flow = Dataflow()
        >>> inside = flow.source([1]).enter(flow.scope("rounds"))
        >>> _ = inside.inspect_batch(print)
        >>> _ = flow.run()
        (0, 0) [1]
        """
        return self._with(operators.enter(self.ref, scope))

    def leave(self) -> Stream:
        """Return the stream one scope further out.

        >>> flow = Dataflow()
        >>> inside = flow.source([1]).enter(flow.scope("rounds"))
        >>> _ = inside.map(lambda n: n + 1).leave().collect()
        >>> flow.run().batches("out")
        [(0, [2])]
        """
        return self._with(operators.leave(self.ref))

    def iterate(
        self,
        body: Callable[[Stream], Stream | tuple[Stream, Stream]],
        *,
        max_iterations: int | None = None,
        limit: int | None = None,
        name: str | None = None,
    ) -> Stream:
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
                return tuple(_ref(end) for end in ends)
            return _ref(ends)

        return self._with(
            operators.iterate(
                self.ref,
                on_refs,
                max_iterations=max_iterations,
                limit=limit,
                name=name,
            )
        )

    def unary(
        self,
        on_batch: OnBatch,
        *,
        pact: Pact | None = None,
        name: str | None = None,
        **options: Unpack[OperatorOptions],
    ) -> Stream:
        """Call `on_batch(shard, delivery)` for each block; see `operators.unary`.

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
    ) -> Stream:
        """As `unary`, with `on_frontier(shard)` whenever the input's frontier moved.

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
    ) -> Stream:
        """As `unary`, with `on_notify(shard, time)` for complete times asked for.

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
        right: Stream,
        on_batch: OnBatch,
        *,
        pacts: tuple[Pact | None, Pact | None] = (None, None),
        name: str | None = None,
        **options: Unpack[OperatorOptions],
    ) -> Stream:
        """Call `on_batch(shard, delivery)` for blocks of both streams.

        This one is port 0, `right` is port 1; see `operators.binary`.

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
                self.ref, _ref(right), on_batch, pacts=pacts, name=name, **options
            )
        )

    def binary_frontier(
        self,
        right: Stream,
        on_batch: OnBatch,
        on_frontier: OnFrontier,
        *,
        pacts: tuple[Pact | None, Pact | None] = (None, None),
        name: str | None = None,
        **options: Unpack[OperatorOptions],
    ) -> Stream:
        """As `binary`, with `on_frontier(shard)` whenever a frontier moved.

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
                _ref(right),
                on_batch,
                on_frontier,
                pacts=pacts,
                name=name,
                **options,
            )
        )

    def binary_notify(
        self,
        right: Stream,
        on_batch: OnBatch,
        on_notify: OnNotify,
        *,
        in_order: bool = False,
        pacts: tuple[Pact | None, Pact | None] = (None, None),
        name: str | None = None,
        **options: Unpack[OperatorOptions],
    ) -> Stream:
        """As `binary`, with `on_notify(shard, time)` for complete times asked for.

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
                _ref(right),
                on_batch,
                on_notify,
                in_order=in_order,
                pacts=pacts,
                name=name,
                **options,
            )
        )

    def sink(
        self,
        on_batch: OnBatch,
        *,
        on_notify: OnNotify | None = None,
        in_order: bool = True,
        pact: Pact | None = None,
        name: str | None = None,
        **options: Unpack[OperatorOptions],
    ) -> None:
        """Call `on_batch(shard, delivery)` for each block, and send nothing on.

        >>> def show(shard, delivery):
        ...     print(delivery.time, delivery.payload)
        >>> flow = Dataflow()
        >>> flow.source([1, 2]).sink(show)
        >>> _ = flow.run()
        0 [1, 2]
        """
        operators.sink(
            self.ref,
            on_batch,
            on_notify=on_notify,
            in_order=in_order,
            pact=pact,
            name=name,
            **options,
        )

    def write(
        self,
        sink: Any,
        *,
        whole_epochs: bool = False,
        num_shards: int | None = None,
        placement: Placement | None = None,
        name: str | None = None,
    ) -> None:
        """Write the records into a sink of Bytewax, or one of that shape.

        Args:
            sink: With the methods of `FixedPartitionedSink`, which takes pairs of a
                string and a value, or of `DynamicSink`.
            whole_epochs: Write each epoch when it is complete, in order; default: at
                once.
            num_shards: Default: that of this stream.
            placement: Which worker holds which shard.
            name: Shown in traces and errors; the key of its positions.

        Raises:
            GraphError: `sink` has not the shape of a sink, or lists no partitions.

        >>> class Printer:
        ...     def build(self, step_id, worker_index, worker_count):
        ...         return self
        ...     def write_batch(self, items):
        ...         print(items)
        >>> flow = Dataflow()
        >>> flow.source([1, 2]).write(Printer())
        >>> _ = flow.run()
        [1, 2]
        """
        from timelyml import io  # noqa: PLC0415  as in `Dataflow.read`

        io.write(
            self.ref,
            sink,
            whole_epochs=whole_epochs,
            num_shards=num_shards,
            placement=placement,
            name=name,
        )

    def probe(self, name: str | None = None) -> Stream:
        """Let the driver see how far this stream is; returns the stream.

        Args:
            name: For `run.probe(name)`; default: "probe".

        >>> flow = Dataflow()
        >>> _ = flow.input("numbers").probe("seen")
        >>> with flow.start() as run:
        ...     run.input("numbers").advance_to(3)
        ...     run.probe("seen").wait_until(2, timeout_s=10)
        """
        return self._with(operators.probe(self.ref, name=name))

    def collect(self, name: str = "out") -> Stream:
        """Send all records to the driver, as `result[name]`; returns the stream.

        >>> flow = Dataflow()
        >>> _ = flow.source([1, 2]).collect("numbers")
        >>> flow.run()["numbers"]
        [1, 2]
        """
        operators.collect(self.ref, name=name)
        return self

    def capture(
        self,
        to: Place | None = None,
        *,
        overwrite: bool = False,
        name: str | None = None,
    ) -> None:
        """Write the stream, with its progress, so that `Dataflow.replay` brings it back.

        Args:
            to: A directory; or an address where a replay listens, `tcp://127.0.0.1:port`
                or `unix:/path`, or several. Default: memory, as
                `result.recording(name)`.
            overwrite: Replace tapes that are in the directory already.
            name: Key of the recording; default: "capture".

        >>> flow = Dataflow(num_shards=2)
        >>> flow.source([1, 2]).capture()
        >>> len(flow.run().recording("capture").tapes)
        2
        """
        operators.capture(self.ref, to, overwrite=overwrite, name=name)

    def _with(self, ref: StreamLike) -> Stream:
        return Stream(self.flow, ref)

    def _each(self, made: Made) -> Stream | Diverted[Stream]:
        if isinstance(made, Diverted):
            return Diverted(self._with(made.results), self._with(made.failed))
        return self._with(made)


def _ref(stream: Stream) -> StreamLike:
    """Return what the operators work on; refuses what is no stream."""
    if not isinstance(stream, Stream):
        raise GraphError(
            f"an operator needs a stream to read; got {stream!r}; expected a Stream; "
            f"pass what a method of a stream or dataflow returned"
        )
    return stream.ref


def _own_cluster(
    workers: int | None,
    cluster: Cluster | None,
    mode: Mode | None,
    transport: Wire | None,
) -> dict[str, Any]:
    """Return the options of a cluster of the run's own.

    Raises:
        ConfigError: There is a cluster already.
    """
    if cluster is not None and not isinstance(cluster, Cluster):
        raise ConfigError(
            f"option 'cluster' cannot work; got {cluster!r}; expected a Cluster; pass "
            f"one, or leave it out",
            option="cluster",
        )
    own = {"mode": mode, "transport": transport}
    chosen = {option: value for option, value in own.items() if value is not None}
    if cluster is not None and (chosen or workers is not None):
        given = sorted(chosen) or ["workers"]
        raise ConfigError(
            f"a run on a cluster has its workers already; got {', '.join(given)} too; "
            f"expected cluster= alone; make the cluster with these options",
            options=given,
        )
    return chosen
