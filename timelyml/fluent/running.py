"""Methods of `Dataflow` that show it and run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from timelyml.errors import ConfigError
from timelyml.fluent.base import FlowBase, StreamT
from timelyml.graph import Graph
from timelyml.runtime.cluster import Cluster, run_graph, start_graph
from timelyml.runtime.options import refusal
from timelyml.runtime.record import OnMessage
from timelyml.runtime.result import Result
from timelyml.runtime.run import Run

Mode = Literal["inline", "threads", "processes"]
Wire = Literal["ipc", "tcp"]


class RunMethods(FlowBase[StreamT]):
    """A dataflow as a graph, and its runs."""

    def build(self) -> Graph:
        """Return the graph of everything added so far.

        Raises:
            GraphError: It cannot run; names the operators and the path.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source([1]).map(str).collect()
        >>> [operator.name for operator in flow.build().operators]
        ['source', 'map', 'out']
        """
        return self.builder.build()

    def describe(self) -> str:
        """Return the graph as text, one line an operator.

        >>> from timelyml import Dataflow
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

        >>> from timelyml import Dataflow
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
        workers: int | Sequence[int] | None = None,
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
                With `cluster`: which of its `workers`; default: all.
            cluster: A cluster to run on instead.
            mode: `inline`, `threads` or `processes`, for a cluster of this run's own.
            transport: Between processes, `ipc` or `tcp`.
            on_message: Called with (operator, shard, tag, body) for what operators
                send to the driver with `shard.emit`.
            config: Options of `RunConfig`, e.g. `timeout_s`.

        Raises:
            TimelyError: The graph, an option or captured code was refused; or the run
                failed.

        >>> from timelyml import Dataflow
        >>> flow = Dataflow()
        >>> _ = flow.source([1, 2]).map(lambda n: n + 1).collect()
        >>> flow.run()["out"]
        [2, 3]
        """
        graph = self.build()
        own = _own_cluster(workers, cluster, mode, transport)
        if cluster is not None:
            some = workers if isinstance(workers, Sequence) else None
            return cluster.run(graph, on_message=on_message, workers=some, **config)
        count = None if isinstance(workers, Sequence) else workers
        return run_graph(
            graph, workers=count, on_message=on_message, cluster=own, **config
        )

    def start(
        self,
        workers: int | Sequence[int] | None = None,
        *,
        cluster: Cluster | None = None,
        mode: Mode | None = None,
        transport: Wire | None = None,
        on_message: OnMessage | None = None,
        **config: Any,
    ) -> Run:
        """Start and return at once, with a handle to feed, watch and end the run.

        Args:
            workers: How many worker processes; default: a thread of this process. With
                `cluster`: which of its `workers`; default: all.
            cluster: A cluster to run on instead.
            mode: See `run`.
            transport: See `run`.
            on_message: See `run`; called from another thread.
            config: Options of `RunConfig`.

        Raises:
            TimelyError: The graph, an option or captured code was refused.

        >>> from timelyml import Dataflow
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
            some = workers if isinstance(workers, Sequence) else None
            return cluster.start(graph, on_message=on_message, workers=some, **config)
        count = None if isinstance(workers, Sequence) else workers
        return start_graph(
            graph, workers=count, on_message=on_message, cluster=own, **config
        )


def _own_cluster(
    workers: int | Sequence[int] | None,
    cluster: Cluster | None,
    mode: Mode | None,
    transport: Wire | None,
) -> dict[str, Any]:
    """Return the options of a cluster of the run's own.

    Raises:
        ConfigError: There is a cluster already, or workers are named of none.
    """
    if cluster is not None and not isinstance(cluster, Cluster):
        raise ConfigError(
            f"option 'cluster' cannot work; got {cluster!r}; expected a Cluster; pass "
            f"one, or leave it out",
            option="cluster",
        )
    is_choice = isinstance(workers, Sequence)
    if cluster is None and is_choice:
        raise refusal("workers", workers, "a count, or a cluster of which to have some")
    own = {"mode": mode, "transport": transport}
    chosen = {option: value for option, value in own.items() if value is not None}
    if cluster is not None and (chosen or not (is_choice or workers is None)):
        given = sorted(chosen) or ["workers"]
        raise ConfigError(
            f"a run on a cluster has its workers already; got {', '.join(given)} too; "
            f"expected cluster= alone; make the cluster with these options",
            options=given,
        )
    return chosen
