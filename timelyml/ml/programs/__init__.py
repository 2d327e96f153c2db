"""Programs of compiled functions: traced into a graph, and lowered for its workers."""

from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.nodes import (
    Arg,
    Call,
    Constant,
    Node,
    Place,
    Ref,
    Route,
    SliceNode,
    Transfer,
    Value,
)
from timelyml.ml.programs.offline import OfflineClient, OfflineSlice
from timelyml.ml.programs.placeholders import Placeholder
from timelyml.ml.programs.recorder import Recorder
from timelyml.ml.programs.tracing import (
    ProgramCall,
    ProgramFunction,
    ProgramRunner,
    program,
)

__all__ = [
    "Arg",
    "Call",
    "Constant",
    "Node",
    "OfflineClient",
    "OfflineSlice",
    "Place",
    "Placeholder",
    "Program",
    "ProgramCall",
    "ProgramFunction",
    "ProgramRunner",
    "Recorder",
    "Ref",
    "Route",
    "SliceNode",
    "Transfer",
    "Value",
    "program",
]
