"""The vocabulary of dataflows: functions from streams to streams, by family."""

from __future__ import annotations

from timelyml.operators.aggregates import aggregate
from timelyml.operators.aggregation import accumulate, count, fold
from timelyml.operators.capture import capture
from timelyml.operators.delay import delay
from timelyml.operators.distinct import distinct
from timelyml.operators.edges import Routed, StreamLike, as_input, settle
from timelyml.operators.failed import Diverted, FailedRecord, OnError
from timelyml.operators.generic import (
    binary,
    binary_frontier,
    binary_notify,
    sink,
    unary,
    unary_frontier,
    unary_notify,
)
from timelyml.operators.inputs import input  # noqa: A004  users call them by module
from timelyml.operators.inspection import inspect, inspect_batch
from timelyml.operators.join import join
from timelyml.operators.keys import Key, key_by
from timelyml.operators.loops import connect, enter, iterate, leave
from timelyml.operators.map_async import map_async
from timelyml.operators.operator_builder import (
    OperatorBuilder,
    OperatorOptions,
    add_operator,
)
from timelyml.operators.ordered import keep, take_kept
from timelyml.operators.outputs import collect, probe
from timelyml.operators.records import (
    filter,  # noqa: A004  users call them by module
    flat_map,
    map,  # noqa: A004  users call them by module
    map_batch,
)
from timelyml.operators.reduction import reduce
from timelyml.operators.replay import replay
from timelyml.operators.routing import (
    Branches,
    branch,
    broadcast,
    concat,
    direct,
    exchange,
    gather,
    partition,
    rebalance,
)
from timelyml.operators.schema import Schema
from timelyml.operators.sources import source
from timelyml.operators.state_machine import state_machine
from timelyml.operators.window import Windowed, window
from timelyml.operators.windows import Session, Sliding, Tumbling

__all__ = [
    "Branches",
    "Diverted",
    "FailedRecord",
    "Key",
    "OnError",
    "OperatorBuilder",
    "OperatorOptions",
    "Routed",
    "Schema",
    "Session",
    "Sliding",
    "StreamLike",
    "Tumbling",
    "Windowed",
    "accumulate",
    "add_operator",
    "aggregate",
    "as_input",
    "binary",
    "binary_frontier",
    "binary_notify",
    "branch",
    "broadcast",
    "capture",
    "collect",
    "concat",
    "connect",
    "count",
    "delay",
    "direct",
    "distinct",
    "enter",
    "exchange",
    "filter",
    "flat_map",
    "fold",
    "gather",
    "input",
    "inspect",
    "inspect_batch",
    "iterate",
    "join",
    "keep",
    "key_by",
    "leave",
    "map",
    "map_async",
    "map_batch",
    "partition",
    "probe",
    "rebalance",
    "reduce",
    "replay",
    "settle",
    "sink",
    "source",
    "state_machine",
    "take_kept",
    "unary",
    "unary_frontier",
    "unary_notify",
    "window",
]
