"""The gang scheduler: one order of launches per island, decided without side effects."""

from timelyml.ml.scheduling.accounts import Accounts
from timelyml.ml.scheduling.gate import LaunchGate, Ticket, tickets_of
from timelyml.ml.scheduling.islands import Dispatch, Islands, PlacedGang, SpreadGraph
from timelyml.ml.scheduling.policy import (
    Candidate,
    Fifo,
    Policy,
    Priority,
    ProportionalShare,
)
from timelyml.ml.scheduling.scheduler import GangScheduler
from timelyml.ml.scheduling.values import (
    DEFAULT_ESTIMATE_NS,
    DEFAULT_WINDOW_NS,
    MAX_UNFINISHED,
    WINDOW_ALONE_NS,
    Drained,
    Effect,
    Gang,
    GangDone,
    GangGraph,
    GangKey,
    Grant,
    Outcome,
    ProgramDone,
    Report,
    Scope,
    Submission,
)

__all__ = [
    "DEFAULT_ESTIMATE_NS",
    "DEFAULT_WINDOW_NS",
    "MAX_UNFINISHED",
    "WINDOW_ALONE_NS",
    "Accounts",
    "Candidate",
    "Dispatch",
    "Drained",
    "Effect",
    "Fifo",
    "Gang",
    "GangDone",
    "GangGraph",
    "GangKey",
    "GangScheduler",
    "Grant",
    "Islands",
    "LaunchGate",
    "Outcome",
    "PlacedGang",
    "Policy",
    "Priority",
    "ProgramDone",
    "ProportionalShare",
    "Report",
    "Scope",
    "SpreadGraph",
    "Submission",
    "Ticket",
    "tickets_of",
]
