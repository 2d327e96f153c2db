"""Programs of compiled functions: traced into a graph, and lowered for its workers."""

from timelyml.ml.programs.control import cond, switch, while_loop
from timelyml.ml.programs.flows import Flow, WholeFlow
from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.layout import Layout, Move, Piece
from timelyml.ml.programs.lowered import (
    Instruction,
    Launch,
    LoweredProgram,
    MoveNode,
    Put,
    Receive,
    Release,
    Send,
    Slot,
)
from timelyml.ml.programs.lowering import lower
from timelyml.ml.programs.lowerings import Lowerings
from timelyml.ml.programs.memory import scratch_bytes
from timelyml.ml.programs.nodes import (
    Arg,
    Branch,
    Call,
    Constant,
    Loop,
    Node,
    Recalled,
    Ref,
    Region,
    Route,
    Transfer,
    Value,
)
from timelyml.ml.programs.offline import OfflineClient, OfflineSlice
from timelyml.ml.programs.placeholders import Placeholder
from timelyml.ml.programs.places import Place, SliceNode
from timelyml.ml.programs.recorder import Recorder
from timelyml.ml.programs.routing import route, unroute
from timelyml.ml.programs.splitter import split
from timelyml.ml.programs.tracing import (
    ProgramCall,
    ProgramFunction,
    ProgramRunner,
    program,
)

__all__ = [
    "Arg",
    "Branch",
    "Call",
    "Constant",
    "Flow",
    "Instruction",
    "Launch",
    "Layout",
    "Loop",
    "LoweredProgram",
    "Lowerings",
    "Move",
    "MoveNode",
    "Node",
    "OfflineClient",
    "OfflineSlice",
    "Piece",
    "Place",
    "Placeholder",
    "Program",
    "ProgramCall",
    "ProgramFunction",
    "ProgramRunner",
    "Put",
    "Recalled",
    "Receive",
    "Recorder",
    "Ref",
    "Region",
    "Release",
    "Route",
    "Send",
    "SliceNode",
    "Slot",
    "Transfer",
    "Value",
    "WholeFlow",
    "cond",
    "lower",
    "program",
    "route",
    "scratch_bytes",
    "split",
    "switch",
    "unroute",
    "while_loop",
]
