"""From a seed to a verdict, and how to see it again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from timelyml.exchange import Codec
from timelyml.runtime.shipping import worker_codec
from timelyml.runtime.simulation.scenario import random_scenario
from timelyml.runtime.simulation.simulation import Outcome, Simulation
from timelyml.runtime.simulation.violation import Violation


class SeedFailed(Exception):  # noqa: N818 - a finding, not an error of the simulator
    """A seed under which the runtime broke a promise; `violation` says which."""

    def __init__(self, seed: int, violation: Violation) -> None:
        super().__init__(
            f"seed {seed} breaks a promise: {violation}\nreplay it with: "
            f"python -m timelyml.runtime.simulation {seed}"
        )
        self.seed = seed
        self.violation = violation


def simulate(
    seed: int,
    *,
    is_encoded: bool = True,
    log: Callable[[str], None] | None = None,
) -> Outcome:
    """Run the scenario of a seed.

    Args:
        seed: Everything follows from it.
        is_encoded: Whether every message passes through the codec.
        log: Told every action.

    Raises:
        SeedFailed: The runtime broke a promise.
    """
    scenario = random_scenario(seed)
    with tempfile.TemporaryDirectory(prefix="timelyml-sim-") as directory:
        simulation = Simulation(
            scenario, Path(directory), _codec(), is_encoded=is_encoded, log=log
        )
        try:
            return simulation.run()
        except Violation as violation:
            raise SeedFailed(seed, violation) from violation
        finally:
            simulation.close()


def first_failure(seeds: Iterable[int]) -> SeedFailed | None:
    """Return the first seed's failure, or None if all keep every promise."""
    for seed in seeds:
        try:
            simulate(seed)
        except SeedFailed as failed:
            return failed
    return None


@cache
def _codec() -> Codec:
    """The codec of all simulations here: making one takes 15 ms."""
    return worker_codec()
