"""An orderly stop: all regular sources end at one epoch."""

from __future__ import annotations

from timelyml.graph import GraphBuilder
from timelyml.progress import CapabilityTable, Tracker
from timelyml.runtime.build import initial_counts
from timelyml.runtime.epochs import EpochGate


def _gate():
    builder = GraphBuilder("flow", num_shards=2)
    builder.add_operator("source", "source", is_source=True, regular=True)
    graph = builder.build().resolve(1)
    tracker = Tracker(graph.reachability(), initial_counts(graph, 1))
    return EpochGate(graph, tracker, max_ahead=8)


def _table():
    return CapabilityTable(lambda location, time, delta: None)


def test_a_source_that_has_closed_still_says_how_far_it_was():
    gate = _gate()
    for epoch in range(3):
        assert gate.may_open(0, 0, epoch)

    assert gate.pause(_table()) == 3


def test_a_source_that_has_not_started_yet_opens_its_first_epoch():
    assert _gate().pause(_table()) == 1


def test_an_epoch_at_which_a_capability_stands_is_begun():
    table = _table()
    table.mint(0, 5, "here")

    assert _gate().pause(table) == 6
