from __future__ import annotations

from tests.runtime.fakes import END_IN, INITIAL, MAP_IN, SOURCE_OUT, chain_graph
from timelyml.progress import Tracker
from timelyml.runtime.build import initial_counts
from timelyml.runtime.stall import explain


def tracked(*changes):
    graph = chain_graph().resolve(2)
    tracker = Tracker(graph.reachability(), initial_counts(graph, 2))
    tracker.update_many([(location, 0, -2) for location in INITIAL] + list(changes))
    tracker.propagate()
    return graph, tracker


def test_the_holder_of_a_forgotten_capability_is_named_with_where_it_was_made():
    graph, tracker = tracked((SOURCE_OUT, 3, 1))
    held = {1: [(SOURCE_OUT, 3, 1, ("flow.py:9 in keep",)), (SOURCE_OUT, 5, 1, ("x",))]}
    report = explain(graph, tracker, held, who="run 1")
    (row,) = report.rows
    assert (row.operator, row.time, row.worker, row.count) == ("source", 3, 1, 1)
    assert row.sites == ("flow.py:9 in keep",)
    assert "input 0 of 'end' stands at [3]" in report.headline
    assert str(report).endswith(
        "time 3 at output 0 of 'source': a capability on worker 1, created at "
        "flow.py:9 in keep"
    )


def test_unread_records_are_told_apart_from_capabilities():
    graph, tracker = tracked((MAP_IN, 2, 5), (SOURCE_OUT, 4, 1))
    report = explain(graph, tracker, {}, who="run 1")
    assert [row.time for row in report.rows] == [2]
    assert "5 unread records" in str(report)


def test_what_cannot_hold_the_frontier_where_it_stands_is_left_out():
    graph, tracker = tracked((END_IN, 1, 1), (SOURCE_OUT, 6, 1))
    report = explain(graph, tracker, {}, who="run 1")
    assert [(row.operator, row.time) for row in report.rows] == [("end", 1)]


def test_a_run_without_pointstamps_is_complete_and_busy_workers_are_listed():
    graph, tracker = tracked()
    report = explain(graph, tracker, {}, who="run 1", unanswered=["worker 0"])
    assert str(report) == (
        "run 1: nothing is held; it is complete\n  no answer from worker 0"
    )
