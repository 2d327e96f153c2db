"""Compiled functions: traced where no device is, shipped as values, loaded on devices."""

from timelyml.ml.functions.blame import run_failure
from timelyml.ml.functions.calls import (
    Operand,
    Runner,
    SliceLike,
    TracedCall,
    recorder,
    recording,
)
from timelyml.ml.functions.computation import (
    ArrayType,
    CheckGroup,
    CheckMessage,
    Checks,
    Computation,
    LogicalMesh,
    Settings,
    Spec,
)
from timelyml.ml.functions.executables import Executables
from timelyml.ml.functions.flat import FlatFunction
from timelyml.ml.functions.jit import JitFunction, jit
from timelyml.ml.functions.loading import (
    Executable,
    MemoryNeeds,
    load,
    put,
    to_host,
)
from timelyml.ml.functions.options import Options
from timelyml.ml.functions.ragged import Ragged
from timelyml.ml.functions.settings import applied, current_settings
from timelyml.ml.functions.specs import (
    abstract_mesh,
    logical_mesh,
    named_sharding,
    partition_spec,
    spec_of,
)
from timelyml.ml.functions.tracing import Traced, trace
from timelyml.ml.functions.types import type_of

__all__ = [
    "ArrayType",
    "CheckGroup",
    "CheckMessage",
    "Checks",
    "Computation",
    "Executable",
    "Executables",
    "FlatFunction",
    "JitFunction",
    "LogicalMesh",
    "MemoryNeeds",
    "Operand",
    "Options",
    "Ragged",
    "Runner",
    "Settings",
    "SliceLike",
    "Spec",
    "Traced",
    "TracedCall",
    "abstract_mesh",
    "applied",
    "current_settings",
    "jit",
    "load",
    "logical_mesh",
    "named_sharding",
    "partition_spec",
    "put",
    "recorder",
    "recording",
    "run_failure",
    "spec_of",
    "to_host",
    "trace",
    "type_of",
]
