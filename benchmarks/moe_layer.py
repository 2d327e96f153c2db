"""A mixture-of-experts layer, forward and backward, beside what bounds it.

The layer runs as a dataflow, an epoch for each pass, on one worker and on two. In turn
with it, on the same parameters and tokens: every expert on every token in one jitted
function; the experts alone, jitted, on rows that were routed before; and a pair of
matmuls on as many rows as all experts have. A pass of the dataflow lasts from one epoch
to the next, of which only one may be open; all gradients are there when it closes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import Report
from timelyml import Cluster, Dataflow, ml
from timelyml.ml import sharded
from timelyml.ml.buckets import bucket_size, pad_rows
from timelyml.ml.moe import plan_dispatch, relu_expert_forward
from timelyml.operators import collect

AIM_DENSE = 12.0
AIM_GROWTH = 1.3
AIM_PLAIN = 0.6
TOP_K = 2
PASSES = 2  # timed, of each kind in each round
UNTIMED = 3  # one to warm up, and a source has read two epochs beyond what has closed
LOSS_TOLERANCE = 1e-4  # sums of a million squares, in another order


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured.

    Attributes:
        tokens: In each pass.
        width: Of a token.
        hidden: Width inside an expert.
        experts: Numbers of experts, ascending.
        workers: Numbers of workers.
    """

    tokens: int = 4096
    width: int = 512
    hidden: int = 1024
    experts: tuple[int, ...] = (8, 16, 64)
    workers: tuple[int, ...] = (1, 2)


SMALL = Size(tokens=256, width=32, hidden=64, experts=(2, 4))


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks moe_layer", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--small", action="store_true", help="few and small tokens")
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument("--seconds", type=float, default=100, help="to begin rounds in")
    options = parser.parse_args(argv)
    size = SMALL if options.small else Size()
    rounds = measure(size, options.rounds, options.seconds)
    report(size, rounds).show(as_json=options.json)
    return 0


def measure(
    size: Size, num_rounds: int, seconds: float
) -> dict[int, list[dict[str, float]]]:
    """Give, by number of experts, the seconds of a pass of each kind in each round.

    All experts densely take long: they have a turn in the first round only.

    Raises:
        ValueError: The dataflow and the dense function come to different losses.
    """
    end = time.perf_counter() + seconds
    rounds: dict[int, list[dict[str, float]]] = {count: [] for count in size.experts}
    with ExitStack() as stack:
        clusters = [
            stack.enter_context(
                Cluster(workers, mode="inline" if workers == 1 else "processes")
            )
            for workers in size.workers
        ]
        layers = [Layer.of(size, count, clusters) for count in size.experts]
        for number in range(num_rounds):
            began = time.perf_counter()
            for layer in layers:
                rounds[layer.moe.num_experts].append(layer.round(is_first=number == 0))
            now = time.perf_counter()
            if now + (now - began) > end:
                break
    return rounds


def draw(size: Size, num_experts: int, seed: int = 0) -> tuple[dict[str, Any], Any]:
    """Draw parameters and tokens."""
    rng = np.random.default_rng([seed, num_experts])

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32) * shape[-2] ** -0.5

    params = {
        "router": normal(size.width, num_experts),
        "experts": {
            "up": normal(num_experts, size.width, size.hidden),
            "down": normal(num_experts, size.hidden, size.width),
        },
    }
    return params, rng.standard_normal((size.tokens, size.width), np.float32)


@dataclass(frozen=True, slots=True)
class Layer:
    """All kinds of passes of one layer."""

    moe: ml.MoE
    compiled: dict[str, Callable[[], Any]]
    """Those without a dataflow, each given its arguments."""
    flows: dict[str, tuple[Cluster, Any]]

    @classmethod
    def of(cls, size: Size, num_experts: int, clusters: Sequence[Cluster]) -> Layer:
        """Draw a layer, compile what is compiled ahead, and build the dataflows."""
        moe = ml.MoE(
            relu_expert_forward, num_experts=num_experts, top_k=TOP_K, keeps=True
        )
        params, x = draw(size, num_experts)
        compiled = {
            "plain": plain_pair(size),
            "bare": bare_experts(moe, params, x),
            "dense": dense_layer(moe, params, x),
        }
        flows = {
            _flow_name(cluster.num_workers): (
                cluster,
                layer_graph(moe, params, x, cluster.num_workers),
            )
            for cluster in clusters
        }
        return cls(moe, compiled, flows)

    def round(self, *, is_first: bool) -> dict[str, float]:
        """Give the seconds of a pass of each kind."""
        found = {}
        for name in ("plain", "bare"):
            _seconds(self.compiled[name])  # to warm up
            found[name] = median(_seconds(self.compiled[name]) for _ in range(PASSES))
        for name, (cluster, graph) in self.flows.items():
            result = cluster.run(graph, max_epochs_ahead=1)
            found[name] = _pass_seconds(result)
            if is_first:
                losses = [float(part[0]) for _, part in result.batches("loss")]
                self._check(name, losses)
        if is_first:
            found["dense"] = _seconds(self.compiled["dense"])
        return found

    def _check(self, name: str, losses: Sequence[float]) -> None:
        (dense, _) = self.compiled["dense"]()
        if not np.allclose(losses, float(dense), rtol=LOSS_TOLERANCE):
            raise ValueError(
                f"moe_layer: {name} is another layer; got losses {losses}; expected "
                f"{float(dense)}, as the dense function has it; compare their outputs"
            )


def squares(out: Any) -> Any:
    """Give a shard's part of the loss."""
    return jnp.sum(out**2)[None]


def layer_graph(moe: ml.MoE, params: Any, x: Any, num_shards: int) -> Any:
    """Build passes of a layer as a dataflow, their gradients asked for but not read."""

    def read(shard: int, num_shards: int) -> Iterator[Any]:
        mine = x[shard * len(x) // num_shards : (shard + 1) * len(x) // num_shards]
        for _ in range(PASSES + UNTIMED):
            yield {"x": mine, "at": np.full(len(mine), time.perf_counter())}

    flow = Dataflow("layer")
    tokens = flow.source(read, num_shards=num_shards, regular=True, name="tokens")
    loss = ml.value_and_grad(
        lambda held, batch: sharded.call(squares, moe(held, batch["x"])[0]),
        argnums=(0, 1),
    )
    value, _ = loss(params, ml.rows(tokens, {"x": x[:8], "at": np.zeros(8)}))
    collect(value, name="loss")
    tokens.map_batch(lambda batch: batch["at"][:1]).collect("at")
    return flow.build()


def plain_pair(size: Size) -> Callable[[], Any]:
    """Compile a pair of matmuls, both ways, on as many rows as all experts have."""
    rng = np.random.default_rng(0)
    pair = {
        "up": rng.standard_normal((size.width, size.hidden), np.float32),
        "down": rng.standard_normal((size.hidden, size.width), np.float32),
    }
    rows = rng.standard_normal((size.tokens * TOP_K, size.width), np.float32)
    return _on_device(_expert_both, pair, rows)


def bare_experts(moe: ml.MoE, params: Any, x: Any) -> Callable[[], Any]:
    """Compile every expert, both ways, on its rows as they were routed before."""
    routed = moe.routes({"router": params["router"]}, x)
    plan = plan_dispatch(np.asarray(routed.choice.chosen), moe.num_experts)
    ends = np.cumsum(plan.counts)
    experts = []
    for index, (end, count) in enumerate(zip(ends, plan.counts, strict=True)):
        if count:
            rows = x[plan.tokens[end - count : end]]
            one = jax.tree.map(lambda leaf, i=index: leaf[i], params["experts"])
            padded = pad_rows(rows, bucket_size(int(count)))
            experts.append(_on_device(_expert_both, one, padded))
    return lambda: [expert() for expert in experts]


def dense_layer(moe: ml.MoE, params: Any, x: Any) -> Callable[[], Any]:
    """Compile a layer whose experts all see all tokens, one expert after the other."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        routed = moe.routes({"router": params["router"]}, x)
        tokens = jnp.arange(len(x))[:, None]
        gates = jnp.zeros((len(x), moe.num_experts))
        gates = gates.at[tokens, routed.choice.chosen].set(routed.weights)

        def add(total: jax.Array, one: Any) -> tuple[jax.Array, None]:
            expert, gate = one  # gate: (tokens,)
            return total + gate[:, None] * moe.expert_fn(expert, x), None

        out, _ = jax.lax.scan(add, jnp.zeros_like(x), (params["experts"], gates.T))
        return jnp.sum(out**2)

    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return _on_device(both.lower(params, x).compile(), params, x)


def _expert_loss(expert: Any, rows: jax.Array) -> jax.Array:
    return jnp.sum(relu_expert_forward(expert, rows) ** 2)


_expert_both = jax.jit(jax.value_and_grad(_expert_loss, argnums=(0, 1)))


def _on_device(both: Callable[..., Any], params: Any, rows: Any) -> Callable[[], Any]:
    """Give a function of arguments that stay on the device."""
    params, rows = jax.tree.map(jnp.asarray, (params, rows))
    return lambda: both(params, rows)


def _flow_name(num_workers: int) -> str:
    return f"layer_{num_workers}_worker{'s' if num_workers > 1 else ''}"


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())  # type: ignore[no-untyped-call]  # JAX is typed in part
    return time.perf_counter() - began


def _pass_seconds(result: Any) -> float:
    """Give the median over epochs, each from when the last shard's source had it."""
    at: dict[int, float] = {}
    for epoch, stamps in result.batches("at"):
        at[epoch] = max(at.get(epoch, 0.0), float(stamps[0]))
    return float(median(np.diff([at[epoch] for epoch in sorted(at)])[UNTIMED - 1 :]))


def report(size: Size, rounds: dict[int, list[dict[str, float]]]) -> Report:
    """Show medians, and medians of the ratios within each round."""
    workers = [_flow_name(count) for count in size.workers]
    table = Report(f"A layer, both ways: {size.tokens} tokens, top {TOP_K}")
    for count, found in rounds.items():
        for name in ("plain", "bare", "dense", *workers):
            add_row(table, name, count, found, is_full=size == Size())
    first, last = size.experts[0], size.experts[-1]
    for name in workers:
        growth = _ratio(rounds[last], rounds[first], name)
        bare = _ratio(rounds[last], rounds[first], "bare")
        table.add(
            f"{name}_growth_{first}_to_{last}",
            growth / bare,
            "x bare",
            target=f"at most {AIM_GROWTH} x",
            is_met=growth <= AIM_GROWTH * bare,
        )
    return table


def _ratio(
    upper: Sequence[dict[str, float]], lower: Sequence[dict[str, float]], name: str
) -> float:
    pairs = zip(upper, lower, strict=True)
    return median(above[name] / below[name] for above, below in pairs)


def add_row(
    table: Report,
    name: str,
    num_experts: int,
    found: Sequence[dict[str, float]],
    *,
    is_full: bool,
) -> None:
    """Add one kind with so many experts; which aims it has depends on their number."""
    taken = [each for each in found if name in each]
    is_layer = name.startswith("layer")
    to_plain = median(each["plain"] / each[name] for each in taken)
    more = {"flop_rate_to_plain": to_plain}
    target, is_met = "", None
    if is_layer:
        more["ahead_of_dense"] = found[0]["dense"] / found[0][name]
    if is_layer and is_full and num_experts == 8:
        target, is_met = f"{AIM_PLAIN} of plain", to_plain >= AIM_PLAIN
    if is_layer and is_full and num_experts == 64:
        target = f"{AIM_DENSE:g} x ahead of dense"
        is_met = more["ahead_of_dense"] >= AIM_DENSE
    table.add(
        f"{name}_{num_experts}_experts_ms",
        median(each[name] for each in taken) * 1e3,
        "ms",
        target=target,
        is_met=is_met,
        **more,
    )
