"""Progress tracking: timestamps, frontiers, capabilities and the protocol."""

from timelyml.progress.antichain import Antichain, MutableAntichain
from timelyml.progress.batch import ProgressBatch, new_tuple
from timelyml.progress.capability import Capability, CapabilityTable, Holding
from timelyml.progress.capability_set import CapabilitySet
from timelyml.progress.change_batch import ChangeBatch
from timelyml.progress.frontier import Frontier
from timelyml.progress.protocol import (
    ProgressAccumulator,
    ProgressInbox,
    ProgressLog,
)
from timelyml.progress.reachability import ReachabilityGraph
from timelyml.progress.summary import Summary
from timelyml.progress.timestamp import (
    TIME_LIMIT,
    Timestamp,
    UserTime,
    check_time,
    depth_of,
    epoch_of,
    join,
    less_equal,
    less_than,
    meet,
    minimum,
)
from timelyml.progress.tracker import Change, Tracker

__all__ = [
    "TIME_LIMIT",
    "Antichain",
    "Capability",
    "CapabilitySet",
    "CapabilityTable",
    "Change",
    "ChangeBatch",
    "Frontier",
    "Holding",
    "MutableAntichain",
    "ProgressAccumulator",
    "ProgressBatch",
    "ProgressInbox",
    "ProgressLog",
    "ReachabilityGraph",
    "Summary",
    "Timestamp",
    "Tracker",
    "UserTime",
    "check_time",
    "depth_of",
    "epoch_of",
    "join",
    "less_equal",
    "less_than",
    "meet",
    "minimum",
    "new_tuple",
]
