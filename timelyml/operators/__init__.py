"""The vocabulary of dataflows: functions from streams to streams, by family."""

from __future__ import annotations

from timelyml.operators.aggregation import count, fold, reduce
from timelyml.operators.edges import Routed, StreamLike, as_input, settle
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
from timelyml.operators.loops import connect, enter, iterate, leave
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
    inspect,
    inspect_batch,
    map,  # noqa: A004  users call them by module
    map_batch,
)
from timelyml.operators.routing import (
    Branches,
    branch,
    broadcast,
    concat,
    exchange,
    gather,
    partition,
)
from timelyml.operators.sources import source

__all__ = [
    "Branches",
    "OperatorBuilder",
    "OperatorOptions",
    "Routed",
    "StreamLike",
    "add_operator",
    "as_input",
    "binary",
    "binary_frontier",
    "binary_notify",
    "branch",
    "broadcast",
    "collect",
    "concat",
    "connect",
    "count",
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
    "keep",
    "leave",
    "map",
    "map_batch",
    "partition",
    "probe",
    "reduce",
    "settle",
    "sink",
    "source",
    "take_kept",
    "unary",
    "unary_frontier",
    "unary_notify",
]
