"""What a run reports of itself on one worker: figures, and who holds what.

Plain dictionaries of numbers, so that they travel and merge without knowledge of
the classes they came from.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from timelyml.exchange import SpillingQueue
from timelyml.graph import ChannelSpec, Graph
from timelyml.progress import CapabilityTable, Timestamp
from timelyml.runtime.channels import ChannelMetrics, Outbox, OutChannel
from timelyml.runtime.instance import METRIC_NAMES, OperatorInstance
from timelyml.runtime.progress_link import ProgressLink
from timelyml.runtime.state import StateStore

Holding = tuple[int, Timestamp, int, tuple[str, ...]]

HELD = ("queued_blocks", "pending_notifications", "state_bytes", "state_entries")
PROGRESS = ("batches", "changes", "messages", "bytes", "riders")


class Metered(Protocol):
    """The parts of a dataflow that are measured."""

    graph: Graph
    instances: list[OperatorInstance]
    channels: list[OutChannel]
    outbox: Outbox
    progress: ProgressLink
    state: StateStore
    table: CapabilityTable
    spills: dict[int, SpillingQueue]


def metrics_of(flow: Metered) -> dict[str, Any]:
    """Figures of one run on one worker.

    `operators` by name: records and batches in, notifications, activations, busy
    seconds, queued blocks, pending notifications, state in bytes and entries.
    `channels` by "producer -> consumer": records, parts and bytes, local and
    remote. `progress`: batches and changes made, messages of their own and the bytes
    of these, and batches that rode along with data.
    """
    return {
        "operators": {
            instance.name: {
                **instance.metrics,
                "queued_blocks": len(instance.queue),
                "pending_notifications": instance.num_pending,
                "state_bytes": flow.state.size_bytes(instance.index),
                "state_entries": flow.state.num_entries(instance.index),
            }
            for instance in flow.instances
        },
        "channels": {
            channel_name(flow.graph, channel.spec): asdict(channel.metrics)
            for channel in flow.channels
        },
        "progress": {name: getattr(flow.progress, f"num_{name}") for name in PROGRESS},
        "bytes_waiting_for_credit": flow.outbox.waiting_bytes(),
        "queued_bytes_peak": max(flow.outbox.peaks_bytes(), default=0),
        "spilled_blocks": sum(queue.spilled_blocks for queue in flow.spills.values()),
    }


def metrics_before(graph: Graph) -> dict[str, Any]:
    """The figures of a run that no worker has begun: zeros, under the same names."""
    return {
        "operators": {
            spec.name: dict.fromkeys((*METRIC_NAMES, *HELD), 0)
            for spec in graph.operators
        },
        "channels": {
            channel_name(graph, spec): asdict(ChannelMetrics())
            for spec in graph.channels
        },
        "progress": dict.fromkeys(PROGRESS, 0),
        "bytes_waiting_for_credit": 0,
        "queued_bytes_peak": 0,
        "spilled_blocks": 0,
    }


def holdings_of(flow: Metered) -> list[Holding]:
    """Capabilities that this worker holds: location, time, count, created at."""
    return [
        (holding.location, holding.time, holding.count, tuple(holding.sites))
        for holding in flow.table.holdings()
    ]


def channel_name(graph: Graph, spec: ChannelSpec) -> str:
    """Return a channel as it is called in figures: `producer -> consumer`."""
    source = graph.operators[spec.source.operator].name
    target = graph.operators[spec.target.operator].name
    return (
        f"{source} -> {target}"
        if spec.target.port == 0
        else (f"{source} -> {target}[{spec.target.port}]")
    )
