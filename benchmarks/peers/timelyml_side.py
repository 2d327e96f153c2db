"""timelyml's run: `python -m benchmarks.peers.timelyml_side JSON`, run by `runs`."""

from __future__ import annotations

import json
import operator
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import work
from benchmarks.peers.connectors import Notebook, Sink, Source, SumSink, cpu_of_tree
from benchmarks.peers.runs import Side
from benchmarks.pulse import pulse_graph
from timelyml import Cluster, Dataflow, Shard, Stream
from timelyml.graph import Graph

ONE_EPOCH_S = 3600.0


class Case:
    """Builds the flow of one case."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.flow = Dataflow(side.case)
        self.notebook = Notebook(Path(side.folder))

    def build(self) -> Graph:
        """Return the graph."""
        made = getattr(self, self.side.case)()
        return made if isinstance(made, Graph) else self.flow.build()

    def _read(self, make: work.Make | None = None, **options: Any) -> Stream:
        """Read the stored batches, or those that are made as they are asked for."""
        made = partial(work.stored, Path(self.side.data))
        if make is not None:
            made = partial(make, self.side.size)
        source = Source(
            made, self.side.num_processes, self.notebook, is_lazy=make is not None
        )
        if not options:
            options["epoch_interval_s"] = ONE_EPOCH_S
        return self.flow.read(source, **options)

    def word_count(self) -> None:
        """Count words."""
        words = self._read().flat_map(str.split)
        words.count(lambda word: word).collect()

    def keyed_sum(self) -> None:
        """Sum numbers by key."""
        first, second = operator.itemgetter(0), operator.itemgetter(1)
        self._read().reduce(first, operator.add, value=second).collect()

    def keyed_sum_arrays(self) -> None:
        """Sum columns by key."""
        rows = self._read()
        rows.aggregate("key", {"sum": ("sum", "value")}).collect()

    def csv_keyed_sum(self) -> None:
        """Sum numbers by key from a file for each process, as columns."""
        paths = work.csv_paths(Path(self.side.data), self.side.num_processes)
        rows = self.flow.read_csv(paths, schema={"key": str, "value": "int64"})
        rows.aggregate("key", {"sum": ("sum", "value")}).collect()

    def map_and_redistribute(self) -> None:
        """Two maps, with records spread evenly over all shards in between."""
        first = self._read().map(lambda n: n + 1)
        second = first.rebalance().map(lambda n: 2 * n)
        second.write(SumSink(self.notebook))

    def epochs_pipelined(self) -> None:
        """Epochs of one record that crosses, as fast as they go."""
        ticks = self._read(epoch_every=1).exchange(_target)
        ticks.sink(_ask, on_notify=_over)

    def epochs_waiting(self) -> Graph:
        """Epochs of one record that crosses, each begun when the last one is over."""
        return pulse_graph(num_epochs=self.side.size.waits, senders="all")

    def huge_epoch(self) -> None:
        """Large arrays in one epoch, for a slow sink in the last process."""
        arrays = self._read(work.arrays)
        sink = Sink(self.side.num_processes, self.notebook, work.SECONDS_PER_ITEM)
        arrays.write(sink)


def _target(record: tuple[str, int]) -> int:
    return int(record[0])


def _ask(shard: Shard, delivery: Any) -> None:
    shard.notify_at(delivery.time)


def _over(_shard: Shard, _time: Any) -> None:
    """Take note that an epoch is over, as Bytewax's sink does."""


def main() -> None:
    """Run the case, and print when it was over and what came out."""
    side = Side.from_map(json.loads(sys.argv[1])["side"])
    notebook = Notebook(Path(side.folder))
    graph = Case(side).build()
    mode = "inline" if side.num_processes == 1 else "processes"
    with Cluster(side.num_processes, mode=mode) as cluster:
        _warm_up(cluster)
        before = cpu_of_tree()
        if side.case == "csv_keyed_sum":  # its reader takes no notes
            notebook.begin("all")
        result = cluster.run(graph)
        ended, cpu = time.monotonic(), cpu_of_tree()
    if side.case == "epochs_waiting":  # reads nothing, but tells how long it took
        taken = max(sum(seconds) for _, seconds in result["seconds"])
        notebook.write("first-all", {"at": ended - taken, "process": None})
    output = {"ended": ended, "cpu": cpu, "cpu_before": before}
    print(json.dumps({**output, "items": _items(side.case, result)}))


def _warm_up(cluster: Cluster) -> None:
    """Let all workers come, and import what they need."""
    flow = Dataflow("warm-up")
    flow.source([0]).collect()
    cluster.run(flow.build())


def _items(case: str, result: Any) -> list[list[Any]]:
    if "out" not in result:
        return []
    if case not in ("keyed_sum_arrays", "csv_keyed_sum"):
        return [[str(key), value] for key, value in result["out"]]
    return [
        [str(key), value]
        for _, block in result.batches("out")
        for key, value in zip(block["key"].tolist(), block["sum"].tolist(), strict=True)
    ]


if __name__ == "__main__":
    main()
