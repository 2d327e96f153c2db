"""Bytewax as an oracle: random acyclic keyed graphs give the same on both engines."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.io.plans import by_definition, in_bytewax, in_timelyml, plans

pytest.importorskip("bytewax", reason="no wheels for this Python")


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(1, 3))
def test_a_random_graph_gives_the_same_on_both_engines(plan, num_shards):
    expected = in_bytewax(plan)

    assert (
        in_timelyml(plan, lambda flow: flow.run(timeout_s=30), num_shards) == expected
    )
    assert by_definition(plan) == expected


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(plans())
def test_a_random_graph_gives_the_same_in_every_mode(cluster, plan):
    assert in_timelyml(plan, cluster.run, 3) == in_bytewax(plan)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(plans(), st.integers(1, 4))
def test_many_random_graphs_give_the_same_on_both_engines(plan, num_shards):
    in_ours = in_timelyml(plan, lambda flow: flow.run(timeout_s=30), num_shards)

    assert in_ours == in_bytewax(plan)
