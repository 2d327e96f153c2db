"""Differentiable dataflows: functions of values on shards, and their gradients."""

from timelyml.ml.sharded.api import (
    Rows,
    Trained,
    flow,
    grad,
    rows,
    train_step,
    value_and_grad,
)
from timelyml.ml.sharded.columns import Column, Parameter, split
from timelyml.ml.sharded.loops import Looped, repeat_while
from timelyml.ml.sharded.naming import restored
from timelyml.ml.sharded.updates import assemble
from timelyml.ml.sharded.vocabulary import (
    Exchanged,
    assign,
    branch,
    broadcast,
    by_group,
    call,
    concat,
    exchange,
    gather,
    give_back,
    merge,
    repeat,
    total,
)

__all__ = [
    "Column",
    "Exchanged",
    "Looped",
    "Parameter",
    "Rows",
    "Trained",
    "assemble",
    "assign",
    "branch",
    "broadcast",
    "by_group",
    "call",
    "concat",
    "exchange",
    "flow",
    "gather",
    "give_back",
    "grad",
    "merge",
    "repeat",
    "repeat_while",
    "restored",
    "rows",
    "split",
    "total",
    "train_step",
    "value_and_grad",
]
