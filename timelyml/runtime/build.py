"""From a graph to the operator instances of one worker.

Everything here depends on the graph and the placement alone, so that all workers
agree without a message.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from timelyml.errors import GraphError
from timelyml.exchange import Codec, SpillingQueue
from timelyml.graph import Graph, OperatorSpec, Pipeline, Placement
from timelyml.progress import CapabilityTable, Timestamp, Tracker, minimum
from timelyml.runtime.channels import Outbox, OutChannel
from timelyml.runtime.config import RunConfig
from timelyml.runtime.dense import DenseInput
from timelyml.runtime.instance import OperatorInstance
from timelyml.runtime.operator import Logic
from timelyml.runtime.progress_link import ProgressLink
from timelyml.runtime.state import StateStore
from timelyml.runtime.turn import Turn


class Site(Turn, Protocol):
    """What building needs to know of the dataflow it builds for."""

    graph: Graph
    config: RunConfig
    tracker: Tracker
    table: CapabilityTable
    progress: ProgressLink
    state: StateStore
    channels: list[OutChannel]
    instances: list[OperatorInstance]


def initial_counts(graph: Graph, num_workers: int) -> list[tuple[int, Timestamp, int]]:
    """One capability per worker, output and minimum time: how every run starts."""
    return [
        (
            graph.location_of_output(spec.index, port),
            minimum(len(spec.scope)),
            num_workers,
        )
        for spec in graph.operators
        for port in range(spec.num_outputs)
    ]


def shard_count(spec: OperatorSpec) -> int:
    """Shards of an operator of a resolved graph."""
    if spec.num_shards is None:
        msg = (
            f"operator {spec.name!r} has no number of shards; got one per worker; "
            "expected a number; resolve the graph for the workers first"
        )
        raise GraphError(msg, operator=spec.name)
    return spec.num_shards


def owners_of(
    spec: OperatorSpec, default: Placement, num_workers: int
) -> tuple[int, ...]:
    """The worker of each shard of an operator."""
    placement = spec.placement or default
    num_shards = shard_count(spec)
    return tuple(
        placement.worker_of(shard, num_shards, num_workers)
        for shard in range(num_shards)
    )


def build_instances(site: Site, outbox: Outbox) -> list[OperatorInstance]:
    """Build every operator of `site.graph`, with the channels that leave it."""
    owners = [
        owners_of(spec, site.config.placement, site.num_workers)
        for spec in site.graph.operators
    ]
    return [_build(site, spec, owners, outbox) for spec in site.graph.operators]


def build_spills(site: Site, codec: Codec, directory: Path) -> dict[int, SpillingQueue]:
    """Build the queue of each channel inside a cycle, by its index."""
    spills = {}
    for channel in site.graph.channels:
        if channel.is_cyclic:
            instance = site.instances[channel.target.operator]
            queue = SpillingQueue(
                site.config.loop_budget_bytes,
                directory,
                codec,
                f"operator {instance.name!r}",
            )
            instance.spilled.append(queue)
            spills[channel.index] = queue
    return spills


def _build(
    site: Site,
    spec: OperatorSpec,
    owners: list[tuple[int, ...]],
    outbox: Outbox,
) -> OperatorInstance:
    graph = site.graph
    local = tuple(
        shard
        for shard, worker in enumerate(owners[spec.index])
        if worker == site.worker_index
    )
    for shard in local:
        site.state.declare(spec.index, shard, spec.states)
    outputs = [
        [
            OutChannel(
                channel,
                owners=owners[channel.target.operator],
                target_location=graph.location_of_input(*channel.target),
                target_name=graph.operators[channel.target.operator].name,
                outbox=outbox,
                record=site.progress.record,
            )
            for channel in graph.channels_from(spec.index, port)
        ]
        for port in range(spec.num_outputs)
    ]
    site.channels.extend(channel for output in outputs for channel in output)
    if not isinstance(spec.logic, Logic):
        msg = (
            f"operator {spec.name!r} cannot run; got logic {spec.logic!r}; expected a "
            "Logic of callbacks; pass one to add_operator"
        )
        raise GraphError(msg, operator=spec.name)
    return OperatorInstance(
        spec,
        spec.logic,
        local_shards=local,
        num_shards=shard_count(spec),
        outputs=outputs,
        dense_inputs=_dense_inputs(graph, spec),
        input_locations=[
            graph.location_of_input(spec.index, port) for port in range(spec.num_inputs)
        ],
        output_locations=[
            graph.location_of_output(spec.index, port)
            for port in range(spec.num_outputs)
        ],
        tracker=site.tracker,
        table=site.table,
        turn=site,
    )


def _dense_inputs(graph: Graph, spec: OperatorSpec) -> list[dict[int, DenseInput]]:
    """By input port: a counter for each channel, where all of them are dense.

    A port that a sparse channel also ends in is complete by its frontier only.
    """
    counters: list[dict[int, DenseInput]] = []
    for port in range(spec.num_inputs):
        channels = graph.channels_into(spec.index, port)
        dense = channels and all(channel.pact.dense for channel in channels)
        counters.append({})
        for channel in channels if dense else ():
            producer = graph.operators[channel.source.operator]
            is_pipeline = isinstance(channel.pact, Pipeline)
            counters[-1][channel.index] = DenseInput(
                channel.index,
                producer.name,
                spec.name,
                num_expected=1 if is_pipeline else shard_count(producer),
            )
    return counters
