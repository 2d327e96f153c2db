"""Services run dataflows whose sources and sinks are beside the controller."""

from __future__ import annotations

import pytest

from tests.runtime.desk import desk, orders_flow
from timelyml import Cluster, Dataflow
from timelyml.errors import ConfigError, PeerError, RunStoppedError


@pytest.mark.parametrize(("mode", "workers"), [("inline", 1), ("processes", 2)])
def test_what_a_service_orders_is_done_by_its_halves_and_epochs_close(mode, workers):
    with Cluster(workers, mode=mode, services=(desk(workers),)) as cluster:
        service = cluster.service("desk")
        for worker in range(workers):
            service.order(worker, 3, "this", "that")
            service.order(worker, 5, "more")
        service.wait_for(lambda: [*service.frontiers.values()] == [6] * workers)
        flow = Dataflow()
        flow.source([1]).collect()
        beside = cluster.start(flow.build())
        assert beside.generation == workers + 1
        assert beside.result(timeout_s=60)["out"] == [1]

    for worker in range(workers):
        who = f"worker {worker} did"
        found = [(3, [f"{who} this", f"{who} that"]), (5, [f"{who} more"])]
        assert service.done[worker] == found
        assert isinstance(service.ended[worker], RunStoppedError)


def test_the_end_of_its_run_tells_of_a_dead_worker_and_other_runs_go_on():
    with Cluster(2, services=(desk(2),)) as cluster:
        service = cluster.service("desk")
        service.order(0, 0, "this")
        service.order(1, 0, "die")
        service.wait_for(lambda: service.ended)
        service.order(1, 1, "too late")
        service.order(0, 1, "that")
        service.wait_for(lambda: service.frontiers.get(0) == 2)
        ended = dict(service.ended)

    assert isinstance(ended[1], PeerError)
    assert "worker 1" in str(ended[1])
    assert "in operator 'carry_out'" in str(ended[1])
    assert 0 not in ended
    assert len(service.done[0]) == 2


def test_a_worker_without_services_says_so_to_an_operator_that_asks_for_one():
    with Cluster(1, mode="inline") as cluster:
        run = cluster.start(orders_flow())
        run.input("orders").send(["this"])
        run.close_inputs()
        with pytest.raises(ConfigError, match="there is no service 'desk'"):
            run.result(timeout_s=60)
