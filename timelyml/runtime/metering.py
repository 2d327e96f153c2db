"""What a run reports of itself on one worker: figures, and who holds what.

Plain dictionaries of numbers, so that they travel and merge without knowledge of
the classes they came from.
"""

from __future__ import annotations

from typing import Any, Protocol

from timelyml.exchange import SpillingQueue
from timelyml.graph import Graph
from timelyml.progress import CapabilityTable, Timestamp
from timelyml.runtime.channels import Outbox, OutChannel
from timelyml.runtime.instance import OperatorInstance
from timelyml.runtime.progress_link import ProgressLink
from timelyml.runtime.state import StateStore

Holding = tuple[int, Timestamp, int, tuple[str, ...]]


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
            _channel_name(flow.graph, channel): {
                "records": channel.metrics.records,
                "parts": channel.metrics.parts,
                "bytes_local": channel.metrics.bytes_local,
                "bytes_remote": channel.metrics.bytes_remote,
                "blocks_dropped": channel.metrics.blocks_dropped,
            }
            for channel in flow.channels
        },
        "progress": {
            "batches": flow.progress.num_batches,
            "changes": flow.progress.num_changes,
            "messages": flow.progress.num_messages,
            "bytes": flow.progress.num_bytes,
            "riders": flow.progress.num_riders,
        },
        "bytes_waiting_for_credit": flow.outbox.waiting_bytes(),
        "queued_bytes_peak": flow.outbox.peak_outstanding_bytes,
        "spilled_blocks": sum(queue.spilled_blocks for queue in flow.spills.values()),
    }


def holdings_of(flow: Metered) -> list[Holding]:
    """Capabilities that this worker holds: location, time, count, created at."""
    return [
        (holding.location, holding.time, holding.count, tuple(holding.sites))
        for holding in flow.table.holdings()
    ]


def _channel_name(graph: Graph, channel: OutChannel) -> str:
    spec = channel.spec
    source = graph.operators[spec.source.operator].name
    target = graph.operators[spec.target.operator].name
    return (
        f"{source} -> {target}"
        if spec.target.port == 0
        else (f"{source} -> {target}[{spec.target.port}]")
    )
