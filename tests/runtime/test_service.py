"""Services get turns, messages and news of losses, wherever workers live."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.echo import DELAY_S, EchoController, Question, echo
from timelyml import Cluster, Dataflow
from timelyml.errors import ConfigError, InvariantError
from timelyml.exchange import CONTROLLER
from timelyml.runtime.controller import Controller
from timelyml.runtime.messages import HANDSHAKE, Hello, ServiceMessage
from timelyml.runtime.service import ServiceSpec, import_name
from timelyml.runtime.shipping import worker_codec
from timelyml.runtime.simulation.clock import SimClock
from timelyml.runtime.simulation.network import SimNetwork
from timelyml.runtime.worker import Worker
from timelyml.testing.scheduler import Scheduler

MODES = [("inline", 1), ("threads", 3), ("processes", 2)]


def answered(service, count):
    service.wait_for(lambda: len(service.answers) >= count)
    return service.answers


@pytest.mark.parametrize(("mode", "workers"), MODES)
@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_messages_go_between_all_halves_in_every_mode(mode, workers, lane):
    payload = np.arange(5000.0)

    with Cluster(workers, mode=mode, services=(echo(workers, lane),)) as cluster:
        service = cluster.service("echo")
        for number in range(20):
            service.ask(number, payload)
        answers = answered(service, 20)

    assert list(answers) == list(range(20))
    for answer in answers.values():
        assert isinstance(answer, Question)
        assert answer.seen == tuple(f"worker {index}" for index in range(workers))
        np.testing.assert_array_equal(answer.payload, payload)
        assert not answer.payload.flags.writeable
    assert service.is_closed


@pytest.mark.parametrize(("mode", "workers"), MODES)
def test_services_and_runs_share_a_cluster(mode, workers):
    flow = Dataflow(num_shards=4)
    flow.source(range(40)).exchange(lambda n: n).map(lambda n: n + 1).collect()

    with Cluster(workers, mode=mode, services=(echo(workers),)) as cluster:
        service = cluster.service("echo")
        service.ask(0, "before")
        run = cluster.start(flow.build())
        service.ask(1, "during")
        found = sorted(run.result(timeout_s=60)["out"])
        answers = answered(service, 2)

    assert found == list(range(1, 41))
    assert [answer.payload for answer in answers.values()] == ["before", "during"]


@pytest.mark.parametrize(("payload", "how"), [("die", "code 7"), ("raise", "code 1")])
def test_a_dead_worker_is_told_to_the_service_and_a_bug_ends_its_worker(payload, how):
    with Cluster(2, services=(echo(2),)) as cluster:
        service = cluster.service("echo")
        service.ask(0, payload)
        service.wait_for(lambda: service.lost_workers)

    ((worker, error),) = service.lost_workers
    assert worker == 0
    assert how in str(error)
    if payload == "raise":
        assert "a bug of the service" in error.__notes__[0]


def test_a_bug_of_a_service_in_a_thread_ends_that_worker():
    with Cluster(2, mode="threads", services=(echo(2),)) as cluster:
        service = cluster.service("echo")
        service.ask(0, "raise")
        service.wait_for(lambda: service.lost_workers)

    ((worker, error),) = service.lost_workers
    assert worker == 0
    assert "a bug of the service" in str(error)


def simulated(seed, num_workers):
    """The very worker and controller, with network and clock that a seed drives."""
    spec = echo(num_workers)
    codec = worker_codec([spec])
    clock, network = SimClock(), SimNetwork(codec)
    controller = Controller(
        network.transport(CONTROLLER),
        num_workers,
        clock=clock,
        startup_timeout_s=float("inf"),
        services=(spec,),
    )
    workers = [
        Worker(
            index,
            network.transport(index),
            codec=codec,
            clock=clock,
            spill_directory=Path(tempfile.gettempdir()),
            services=(spec,),
        )
        for index in range(num_workers)
    ]
    for worker in workers:
        hello = Hello(worker.index, 0, None, HANDSHAKE)
        network.transport(worker.index).send(CONTROLLER, hello)
    endpoints = {CONTROLLER: controller} | {each.index: each for each in workers}
    scheduler = Scheduler(random.Random(seed), network, clock, endpoints)
    return scheduler, controller, workers, network, clock


@pytest.mark.parametrize("seed", range(20))
def test_the_simulator_drives_services_in_simulated_time(seed):
    scheduler, controller, workers, _, clock = simulated(seed, num_workers=4)
    service: EchoController = controller.services.get("echo")
    for number in range(5):
        service.ask(number, "hello")

    scheduler.run_until(lambda: len(service.answers) == 5, until_s=None)
    controller.shut_down()
    scheduler.settle()

    assert list(service.answers) == list(range(5))
    assert clock.now_s >= 4 * DELAY_S
    assert service.is_closed
    halves = [next(iter(worker._services._services.values())) for worker in workers]
    assert all(half.is_closed for half in halves)


def test_a_broken_link_is_told_to_the_services_of_both_sides():
    scheduler, controller, workers, network, _ = simulated(0, num_workers=3)
    scheduler.settle()

    network.cut(1, 0, "gone", keep=lambda count: count, is_known=True)
    network.cut(0, CONTROLLER, "gone", keep=lambda count: count, is_known=True)
    scheduler.settle()

    half = workers[0]._services.get("echo")
    assert [peer for peer, _ in half.lost_peers] == [1]
    service = controller.services.get("echo")
    assert [peer for peer, _ in service.lost_workers] == [0]


def test_a_message_for_an_unknown_service_is_a_bug_of_its_sender():
    scheduler, controller, *_ = simulated(0, num_workers=1)
    scheduler.settle()
    with pytest.raises(InvariantError, match=r"'other'; expected one of \['echo'\]"):
        controller.services.handle(0, ServiceMessage("other", None))
    with pytest.raises(ConfigError, match="there is no service 'other'"):
        controller.services.get("other")


def test_messages_that_come_before_a_half_has_joined_wait_for_it():
    _, _, (worker, _), *_ = simulated(0, num_workers=2)
    half = worker._services.get("echo")
    question = Question(1, (), "early")
    worker._services.handle(1, ServiceMessage("echo", question))
    assert not half._due
    worker._services.joined()
    assert [each for _, each in half._due] == [question]


@pytest.mark.parametrize(
    "path", ["no_such_module:x", "tests.runtime.echo:nothing", "tests.runtime.echo", ""]
)
def test_what_cannot_be_imported_is_refused_by_name(path):
    with pytest.raises(ConfigError, match="cannot be imported; got"):
        import_name(path)


def test_a_half_that_workers_cannot_import_shows_when_they_start():
    spec = ServiceSpec("echo", "nowhere:Half", "tests.runtime.echo:EchoController")
    flow = Dataflow()
    flow.source(range(2)).collect()

    with Cluster(1, services=(spec,)) as cluster:
        service = cluster.service("echo")
        service.wait_for(lambda: service.lost_workers)

    assert "nowhere:Half" in service.lost_workers[0][1].__notes__[0]
