"""What tests of dataflows need: a tester with a clock, scripted sources, run modes."""

from timelyml.testing.flow_tester import FlowTester, run_in_orders
from timelyml.testing.leftovers import Leftovers, eventually
from timelyml.testing.places import MODES, Place
from timelyml.testing.scheduler import StuckError
from timelyml.testing.script import ABORT, EOF, PAUSE, AbortedError, scripted

__all__ = [
    "ABORT",
    "EOF",
    "MODES",
    "PAUSE",
    "AbortedError",
    "FlowTester",
    "Leftovers",
    "Place",
    "StuckError",
    "eventually",
    "run_in_orders",
    "scripted",
]
