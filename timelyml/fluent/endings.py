"""Methods of `Stream` that take records out of the dataflow."""

from __future__ import annotations

from typing import Any, Self, Unpack

from timelyml import operators
from timelyml.fluent.base import StreamBase
from timelyml.graph import Pact, Placement
from timelyml.operators import OperatorOptions
from timelyml.operators.addresses import Place
from timelyml.operators.generic import OnBatch, OnNotify


class EndMethods(StreamBase):
    """Where streams end: in the driver, on tape, in a callback or a sink."""

    def collect(self, name: str = "out") -> Self:
        """Send all records to the driver, as `result[name]`; returns the stream.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source([1, 2]).collect("numbers")
        >>> flow.run()["numbers"]
        [1, 2]
        """
        operators.collect(self.ref, name=name)
        return self

    def probe(self, name: str | None = None) -> Self:
        """Let the driver see how far this stream is; returns the stream.

        Args:
            name: For `run.probe(name)`; default: "probe".

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.input("numbers").probe("seen")
        >>> with flow.start() as run:
        ...     run.input("numbers").advance_to(3)
        ...     run.probe("seen").wait_until(2, timeout_s=10)
        """
        return self._with(operators.probe(self.ref, name=name))

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

        >>> from timelyml import Dataflow
        >>> flow = Dataflow(num_shards=2)
        >>> flow.source([1, 2]).capture()
        >>> len(flow.run().recording("capture").tapes)
        2
        """
        operators.capture(self.ref, to, overwrite=overwrite, name=name)

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

        >>> from timelyml import Dataflow
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

        >>> from timelyml import Dataflow
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
