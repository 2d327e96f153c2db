"""How a worker comes to its part of a run: from what it is sent to a dataflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from timelyml.exchange import Codec
from timelyml.runtime.dataflow import Dataflow
from timelyml.runtime.event_log import EventLog, Sender
from timelyml.runtime.messages import Deploy
from timelyml.runtime.run_plan import MemberSender, numbers_of
from timelyml.runtime.shipping import unship


def deploy(
    message: Deploy,
    worker: int,
    transport: Sender,
    *,
    codec: Codec,
    clock: Callable[[], float],
    spill_directory: Path,
    memory: Any = None,
    service: Callable[[str], Any],
) -> Dataflow:
    """Build the part of a run that a worker does.

    Args:
        message: The run.
        worker: The worker's number in its cluster.
        transport: The worker's; the run sends by it.
        codec: For what spills to disk.
        clock: Monotonic seconds.
        spill_directory: Where that goes.
        memory: In which it notes where it is, see `whereabouts.py`.
        service: Returns the half of a service that the worker has.

    Raises:
        BaseException: Whatever a shipped value raises as it is unpickled.
    """
    members = message.members
    number, numbers = members.index(worker), numbers_of(members)
    shipped = unship(message.shipped)
    graph, config = shipped.graph.resolve(len(members)), shipped.config
    sender = MemberSender(transport, members) if numbers else transport
    log: EventLog | None = None
    if config.event_log is not None:
        log = EventLog(
            Path(config.event_log),
            graph,
            worker_index=number,
            num_workers=len(members),
            transport=sender,
            clock=clock,
        )
    dataflow = Dataflow(
        graph,
        config,
        generation=message.generation,
        worker_index=number,
        num_workers=len(members),
        transport=sender if log is None else log.sender,
        codec=codec,
        clock=clock,
        spill_directory=spill_directory,
        memory=memory,
        service=service,
    )
    dataflow.log, dataflow.numbers = log, numbers
    return dataflow
