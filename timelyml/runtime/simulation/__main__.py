"""Replay of a seed: `python -m timelyml.runtime.simulation SEED [--log]`."""

from __future__ import annotations

import argparse
import sys

from timelyml.runtime.simulation.scenario import random_scenario
from timelyml.runtime.simulation.seeds import SeedFailed, simulate


def main() -> int:
    """Simulate one seed, and say what it is and how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--log", action="store_true", help="print every action")
    options = parser.parse_args()
    scenario = random_scenario(options.seed)
    _say(f"{scenario.num_workers} workers; fault: {scenario.fault.value}")
    for run in scenario.runs:
        _say(f"{run.config}\n{run.plan.graph.describe()}")
    try:
        outcome = simulate(options.seed, log=_say if options.log else None)
    except SeedFailed as failed:
        _say(str(failed))
        return 1
    _say(str(outcome))
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
