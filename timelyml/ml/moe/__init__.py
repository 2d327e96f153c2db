"""Mixture-of-experts mathematics: pure functions that the dataflow places."""

from timelyml.ml.moe.capacity import Capacity
from timelyml.ml.moe.dense import moe_dense
from timelyml.ml.moe.dispatch import DispatchPlan, combine, place_slots, plan_dispatch
from timelyml.ml.moe.drops import Dropping, drop_beyond, places
from timelyml.ml.moe.experts import (
    expert_backward,
    expert_forward,
    pull_of,
    relu_expert_forward,
    run_experts,
    run_experts_backward,
    shared_forward,
)
from timelyml.ml.moe.layer import MoE, Routing
from timelyml.ml.moe.losses import (
    RouterSums,
    add_sums,
    balance,
    grouped_sums,
    router_sums,
    share_of,
    updated_bias,
    z_loss,
)
from timelyml.ml.moe.noise import Noise, jittered, thinned, with_gaussian
from timelyml.ml.moe.replicas import ExpertPlacement, replicas_by_load
from timelyml.ml.moe.router import Routed, Router
from timelyml.ml.moe.rules import Choice, ExpertChoice, Groups, TokenChoice

__all__ = [
    "Capacity",
    "Choice",
    "DispatchPlan",
    "Dropping",
    "ExpertChoice",
    "ExpertPlacement",
    "Groups",
    "MoE",
    "Noise",
    "Routed",
    "Router",
    "RouterSums",
    "Routing",
    "TokenChoice",
    "add_sums",
    "balance",
    "combine",
    "drop_beyond",
    "expert_backward",
    "expert_forward",
    "grouped_sums",
    "jittered",
    "moe_dense",
    "place_slots",
    "places",
    "plan_dispatch",
    "pull_of",
    "relu_expert_forward",
    "replicas_by_load",
    "router_sums",
    "run_experts",
    "run_experts_backward",
    "share_of",
    "shared_forward",
    "thinned",
    "updated_bias",
    "with_gaussian",
    "z_loss",
]
