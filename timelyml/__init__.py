"""Timely dataflow for machine learning."""

from __future__ import annotations

from timelyml.errors import TimelyError
from timelyml.fluent import Dataflow, Loop, Stream
from timelyml.graph import (
    PER_WORKER,
    Broadcast,
    Contiguous,
    Custom,
    Direct,
    Exchange,
    Gather,
    Pipeline,
    RoundRobin,
)
from timelyml.operators import (
    Diverted,
    FailedRecord,
    Schema,
    Session,
    Sliding,
    Tumbling,
)
from timelyml.progress import Summary, Timestamp
from timelyml.runtime.cluster import Cluster
from timelyml.runtime.config import RunConfig
from timelyml.runtime.inputs import InputHandle, Probe
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.result import Result
from timelyml.runtime.run import Run
from timelyml.runtime.shard import Output, Shard

__all__ = [
    "PER_WORKER",
    "Broadcast",
    "Cluster",
    "Contiguous",
    "Custom",
    "Dataflow",
    "Delivery",
    "Direct",
    "Diverted",
    "Exchange",
    "FailedRecord",
    "Gather",
    "InputHandle",
    "Logic",
    "Loop",
    "Output",
    "Pipeline",
    "Probe",
    "Result",
    "RoundRobin",
    "Run",
    "RunConfig",
    "Schema",
    "Session",
    "Shard",
    "Sliding",
    "Stream",
    "Summary",
    "TimelyError",
    "Timestamp",
    "Tumbling",
]
