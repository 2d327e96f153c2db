"""Machine learning on the dataflow; the only part of timelyml that imports JAX."""

from timelyml.errors import (
    AdmissionError,
    BufferLostError,
    ComputationError,
    HandleError,
    MemoryLimitError,
    SliceError,
)
from timelyml.ml.buckets import bucket_size, cut_rows, num_rows_of, on_buckets, pad_rows
from timelyml.ml.checkpoints import Checkpoint, Checkpoints, load_checkpoint
from timelyml.ml.choice import balance_loss, choose, count_choices, routing_weights
from timelyml.ml.client import (
    Client,
    DeviceTrace,
    Handle,
    IslandOptions,
    Server,
    Slice,
    SliceSharding,
    connect,
    local,
    serve,
)
from timelyml.ml.compiled import Compiled, compiled
from timelyml.ml.compute import compute
from timelyml.ml.controller import ClientUsage, LaunchSpan, ObjectInfo, TransferSpan
from timelyml.ml.firing import Blocks, Firing, Rule, add_firing_operator
from timelyml.ml.fragments import NamedStages, fragments, homes, named_stages
from timelyml.ml.functions import jit
from timelyml.ml.gradients import grad, value_and_grad
from timelyml.ml.moe import (
    DispatchPlan,
    MoE,
    combine,
    expert_backward,
    expert_forward,
    place_slots,
    plan_dispatch,
)
from timelyml.ml.pipeline import (
    Pipeline,
    PipelineRecord,
    TrainState,
    TrainStep,
    estimated_costs,
    measured_costs,
    partition,
    pipeline,
)
from timelyml.ml.programs import OfflineClient, cond, program, switch, while_loop
from timelyml.ml.sharded import rows, train_step

__all__ = [
    "AdmissionError",
    "Blocks",
    "BufferLostError",
    "Checkpoint",
    "Checkpoints",
    "Client",
    "ClientUsage",
    "Compiled",
    "ComputationError",
    "DeviceTrace",
    "DispatchPlan",
    "Firing",
    "Handle",
    "HandleError",
    "IslandOptions",
    "LaunchSpan",
    "MemoryLimitError",
    "MoE",
    "NamedStages",
    "ObjectInfo",
    "OfflineClient",
    "Pipeline",
    "PipelineRecord",
    "Rule",
    "Server",
    "Slice",
    "SliceError",
    "SliceSharding",
    "TrainState",
    "TrainStep",
    "TransferSpan",
    "add_firing_operator",
    "balance_loss",
    "bucket_size",
    "choose",
    "combine",
    "compiled",
    "compute",
    "cond",
    "connect",
    "count_choices",
    "cut_rows",
    "estimated_costs",
    "expert_backward",
    "expert_forward",
    "fragments",
    "grad",
    "homes",
    "jit",
    "load_checkpoint",
    "local",
    "measured_costs",
    "named_stages",
    "num_rows_of",
    "on_buckets",
    "pad_rows",
    "partition",
    "pipeline",
    "place_slots",
    "plan_dispatch",
    "program",
    "routing_weights",
    "rows",
    "serve",
    "switch",
    "train_step",
    "value_and_grad",
    "while_loop",
]
