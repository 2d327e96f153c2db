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
from timelyml.graph.placement import Contiguous, Custom, Placement, RoundRobin
from timelyml.graph.spec import ChannelSpec, OperatorSpec, PortRef, ScopeSpec

__all__ = [
    "PER_WORKER",
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
]
