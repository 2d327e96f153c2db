"""The work of `dispatch` on Ray: an actor that owns the devices, and compiled graphs of it.

Needs the extra `peers`. The value stays with the actor, which is kind to Ray: nothing but
calls and their ends travel. Calls of actors run ahead, as far as `ray.get` of the last
allows; a compiled graph is run as often before its results are read as Ray lets it be.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.plain_jax import CHAIN, MAX_UNFINISHED, prepare
from timelyml.runtime.environment import worker_environment

MAX_RUNS = 8
NEEDED = "JAX_PLATFORMS", "NPROC", "XLA_FLAGS"


class Devices:
    """An actor: what it computes last is kept here."""

    def __init__(self) -> None:
        self._value, self._compiled = prepare()

    def step(self, token: int) -> int:
        """Take a step."""
        return self._run("step", token)

    def fused(self, token: int) -> int:
        """Take so many steps in one computation."""
        return self._run("fused", token)

    def _run(self, name: str, token: int) -> int:
        self._value = self._compiled[name](self._value)
        if token % MAX_UNFINISHED == MAX_UNFINISHED - 1:
            self._value.block_until_ready()
        return token + 1

    def ready(self) -> bool:
        """Wait for all that was computed."""
        self._value.block_until_ready()
        return True


@contextmanager
def start(num_devices: int) -> Iterator[dict[str, Callable[[int], float]]]:
    """Start Ray; what is yielded takes steps there and returns the seconds."""
    import ray  # noqa: PLC0415 - of the extra `peers`

    environment = worker_environment(os.environ, num_devices=num_devices)
    variables = {name: environment[name] for name in NEEDED}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    try:
        remote: Any = ray.remote(Devices).options(runtime_env={"env_vars": variables})
        actors = [remote.remote() for _ in range(4)]
        ray.get([each.ready.remote() for each in actors])
        actor, *others = actors
        # An actor that a graph is compiled for serves that graph only.
        graphs = [
            _compiled(others[0].step, 1),
            _compiled(others[1].step, CHAIN),
            _compiled(others[2].fused, 1),
        ]
        step, chain, fused = graphs
        yield {
            "ray_op_by_op": lambda steps: _calls(actor, actor.step, steps),
            "ray_fused": lambda steps: _calls(actor, actor.fused, steps // CHAIN),
            "ray_graph_op_by_op": lambda steps: _runs(step, steps),
            "ray_graph_chained": lambda steps: _runs(chain, steps // CHAIN),
            "ray_graph_fused": lambda steps: _runs(fused, steps // CHAIN),
        }
        for graph in graphs:
            graph.teardown()
    finally:
        ray.shutdown()


def _compiled(method: Any, length: int) -> Any:
    from ray.dag import InputNode  # noqa: PLC0415 - of the extra `peers`

    with InputNode() as given:
        node = given
        for _ in range(length):
            node = method.bind(node)
    return node.experimental_compile()


def _calls(actor: Any, method: Any, count: int) -> float:
    import ray  # noqa: PLC0415 - of the extra `peers`

    began = time.perf_counter()
    for number in range(count):
        method.remote(number)
    ray.get(actor.ready.remote())
    return time.perf_counter() - began


def _runs(graph: Any, count: int) -> float:
    import ray  # noqa: PLC0415 - of the extra `peers`

    began = time.perf_counter()
    under_way: list[Any] = []
    for number in range(count):
        is_last = number == count - 1
        under_way.append(graph.execute(MAX_UNFINISHED - 1 if is_last else number))
        if len(under_way) >= MAX_RUNS:
            ray.get(under_way.pop(0))
    for each in under_way:
        ray.get(each)
    return time.perf_counter() - began
