"""Pipelines: schedules as data, made, proved, timed and drawn; stages that run them."""

from timelyml.ml.pipeline.actions import Action, Op, Schedule
from timelyml.ml.pipeline.building import Pipeline, pipeline
from timelyml.ml.pipeline.channels import Channels, Execution, Span, Wait, execute
from timelyml.ml.pipeline.lowering import with_early_receives, with_late_receives
from timelyml.ml.pipeline.observing import PipelineRecord
from timelyml.ml.pipeline.ordering import issue_order
from timelyml.ml.pipeline.partition import (
    Chain,
    Partition,
    estimated_costs,
    measured_costs,
    partition,
)
from timelyml.ml.pipeline.placement import loop_placement, v_placement
from timelyml.ml.pipeline.render import bars, draw, text_chart
from timelyml.ml.pipeline.schedules import (
    SCHEDULES,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
    zbv,
)
from timelyml.ml.pipeline.simulate import (
    Costs,
    Timeline,
    peak_by_rank,
    peak_by_stage,
    simulate,
)
from timelyml.ml.pipeline.state import ReplicaState, TrainState
from timelyml.ml.pipeline.training import TrainStep
from timelyml.ml.pipeline.validate import Fault, find_faults, needed_depth, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Chain",
    "Channels",
    "Costs",
    "Execution",
    "Fault",
    "Op",
    "Partition",
    "Pipeline",
    "PipelineRecord",
    "ReplicaState",
    "Schedule",
    "Span",
    "Timeline",
    "TrainState",
    "TrainStep",
    "Wait",
    "bars",
    "draw",
    "estimated_costs",
    "execute",
    "find_faults",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "issue_order",
    "loop_placement",
    "measured_costs",
    "needed_depth",
    "one_f_one_b",
    "partition",
    "peak_by_rank",
    "peak_by_stage",
    "pipeline",
    "simulate",
    "text_chart",
    "v_placement",
    "validate",
    "with_early_receives",
    "with_late_receives",
    "zb_h1",
    "zbv",
]
