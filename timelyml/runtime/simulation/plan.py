"""A random graph with what its operators do, and what its sources are to send."""

from __future__ import annotations

from dataclasses import dataclass

from timelyml.graph import Graph
from timelyml.runtime.simulation.behaviour import Behaviour
from timelyml.runtime.simulation.rules import source_batches
from timelyml.runtime.simulation.sources import Source
from timelyml.runtime.simulation.trace import Sent


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """A graph whose operators are known, so that the reference can evaluate it."""

    graph: Graph
    operators: tuple[Behaviour | Source, ...]

    def planned(self) -> list[Sent]:
        """Return what the sources send if nobody stops them."""
        sent = []
        for source in self.operators:
            if not isinstance(source, Source):
                continue
            num_shards = self.graph.operators[source.operator].num_shards or 0
            for shard in range(num_shards):
                for epoch in range(source.rule.num_epochs):
                    sent += _epoch_of(source, shard, epoch)
        return sent


def _epoch_of(source: Source, shard: int, epoch: int) -> list[Sent]:
    sent = []
    for output, batches in enumerate(source_batches(source.rule, shard, epoch)):
        blocks = batches or ([[]] if source.is_regular else [])
        for number, records in enumerate(blocks):
            is_last = source.is_fed or number + 1 == len(blocks)
            sent.append(
                Sent(
                    source.operator,
                    shard,
                    output,
                    (epoch,),
                    tuple(records),
                    is_last,
                    None,
                )
            )
    return sent
