"""The logical graph: operators, sharded edges, pacts, scopes, placement."""

from timelyml.graph.builder import (
    PER_WORKER,
    GraphBuilder,
    InputSpec,
    LoopRef,
    ScopeRef,
    StreamRef,
)
from timelyml.graph.model import Graph
from timelyml.graph.pact import Broadcast, Direct, Exchange, Gather, Pact, Pipeline
from timelyml.graph.placement import (
    PLACEMENT_RULE,
    Contiguous,
    Custom,
    Placement,
    RoundRobin,
    is_placement,
)
from timelyml.graph.spec import ChannelSpec, OperatorSpec, PortRef, ScopeSpec

__all__ = [
    "PER_WORKER",
    "PLACEMENT_RULE",
    "Broadcast",
    "ChannelSpec",
    "Contiguous",
    "Custom",
    "Direct",
    "Exchange",
    "Gather",
    "Graph",
    "GraphBuilder",
    "InputSpec",
    "LoopRef",
    "OperatorSpec",
    "Pact",
    "Pipeline",
    "Placement",
    "PortRef",
    "RoundRobin",
    "ScopeRef",
    "ScopeSpec",
    "StreamRef",
    "is_placement",
]
