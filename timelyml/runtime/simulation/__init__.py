"""A seeded simulator of whole clusters, with an oracle that sees everything."""

from timelyml.runtime.simulation.scenario import Fault, Scenario, random_scenario
from timelyml.runtime.simulation.seeds import SeedFailed, first_failure, simulate
from timelyml.runtime.simulation.simulation import Outcome, Simulation
from timelyml.runtime.simulation.violation import Violation

__all__ = [
    "Fault",
    "Outcome",
    "Scenario",
    "SeedFailed",
    "Simulation",
    "Violation",
    "first_failure",
    "random_scenario",
    "simulate",
]
