"""A run that is broken off, and another that begins with the state that it left."""

from __future__ import annotations

import time

from tests.runtime.world import World
from timelyml.runtime.config import RunConfig, ShippedRun
from timelyml.runtime.run_plan import RunPlan
from timelyml.runtime.shipping import dumps, loads, ship

TIMEOUT_S = 30


class Interrupted(World):
    """Steps a run until the test has seen enough; its state can be taken along."""

    def begin(self, flow, states=None, **options):
        """Deploy, put in what `states` holds by operator and shard, and start."""
        graph, config = flow.build(), RunConfig(**options)
        plan = RunPlan(
            1,
            graph.resolve(self.num_workers),
            config,
            ship(ShippedRun(graph, config)),
            self.num_workers,
        )
        self.controller.start_run(plan, self.effects.append)
        while not all(worker._dataflows for worker in self.workers):
            self.step()  # they start one step later, when the controller knows
        for (name, shard), exported in (states or {}).items():
            for dataflow in self._dataflows():
                operator = dataflow.graph.operator_named(name).index
                if shard in dataflow.instances[operator].shards:
                    dataflow.state.install_shard(operator, shard, exported, loads)

    def step(self, times=1):
        """Step everybody in turn."""
        for _ in range(times):
            self.controller.step()
            for worker in self.workers:
                worker.step()

    def step_until(self, condition):
        """Step until the test has seen what it wants."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "what the test waits for did not come"
            self.step()

    def stop(self):
        """Let sources close what they have open."""
        for dataflow in self._dataflows():
            dataflow.stop_sources(None)
        self.step(20)

    def export(self, *names):
        """Return the state of all shards of some operators, as bytes."""
        return {
            (name, shard): dataflow.state.export_shard(
                dataflow.graph.operator_named(name).index, shard, dumps
            )
            for name in names
            for dataflow in self._dataflows()
            for shard in dataflow.instances[
                dataflow.graph.operator_named(name).index
            ].shards
        }

    def _dataflows(self):
        return [flow for worker in self.workers for flow in worker._dataflows.values()]
