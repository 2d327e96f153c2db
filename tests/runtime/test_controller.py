"""The controller, against workers that say what the test tells them to."""

from __future__ import annotations

import pytest

from tests.runtime.fakes import (
    END_IN,
    INITIAL,
    MAP_IN,
    SOURCE_OUT,
    Keeper,
    Scene,
    chain_graph,
)
from timelyml.errors import (
    DeadlineError,
    InvariantError,
    OperatorError,
    PeerError,
    RunStoppedError,
)
from timelyml.exchange import CONTROLLER, LinkFailure
from timelyml.progress import ProgressBatch
from timelyml.runtime.effects import FrontierMoved, Inspected, Released, Started
from timelyml.runtime.failure import operator_failure, pack_error
from timelyml.runtime.messages import (
    Connect,
    Deploy,
    Drop,
    Dropped,
    Emitted,
    Failed,
    Heartbeat,
    Inspect,
    LinkLost,
    OperatorMessage,
    Report,
    Shutdown,
    Start,
    Stopping,
    StopSources,
)
from timelyml.runtime.run_state import RunState


def failure(text="boom", worker=1):
    error = operator_failure(
        KeyError(text), operator="map", worker=worker, shard=3, time=7
    )
    return pack_error(error)


def test_peers_are_told_of_each_other_once_all_have_come():
    scene = Scene()
    scene.workers[0].hello()
    scene.settle()
    assert not scene.workers[0].listen()
    scene.workers[1].hello()
    scene.settle()
    assert [w.last(Connect).endpoints for w in scene.workers] == [(None, None)] * 2


def test_a_run_submitted_early_is_deployed_once_the_workers_are_there():
    scene = Scene()
    scene.submit()
    assert not scene.workers[0].listen()
    scene.gather()
    assert [w.last(Deploy).generation for w in scene.workers] == [1, 1]


def test_workers_that_never_come_are_named_at_the_deadline():
    scene = Scene(3, startup_timeout_s=5.0, keeper=Keeper("ImportError: no numpy"))
    scene.workers[1].hello()
    scene.submit()
    scene.pass_(4.9)
    assert scene.ended is None
    scene.pass_(0.2)
    error = scene.ended.error
    assert isinstance(error, PeerError)
    assert "workers 0, 2" in str(error)
    assert "no numpy" in error.__notes__[0]


def test_a_worker_that_only_never_connects_is_named_too():
    scene = Scene(startup_timeout_s=5.0)
    for worker in scene.workers:
        worker.hello()
    scene.submit()
    scene.pass_(6.0)
    assert "never connected" in str(scene.ended.error)


def test_a_worker_of_another_version_is_refused():
    scene = Scene()
    scene.submit()
    scene.workers[0].hello(version="timelyml wire 0, python 2.7")
    scene.settle()
    assert "python 2.7" in str(scene.ended.error)


def test_a_silent_worker_is_given_up_and_killed_but_a_beating_one_is_not():
    keeper = Keeper()
    scene = Scene(heartbeat_timeout_s=10.0, keeper=keeper)
    scene.start()
    for _ in range(6):
        scene.workers[0].say(Heartbeat(0, "operator 'map', shard 1", 9.0))
        scene.pass_(2.0)
    assert keeper.killed == [1]
    assert "worker 1 (pid 1001) stopped answering" in str(scene.controller.error)


def test_who_falls_silent_after_the_loss_of_another_is_given_up_too():
    keeper = Keeper()
    scene = Scene(heartbeat_timeout_s=10.0, keeper=keeper)
    scene.start()
    scene.controller.lose_worker(0, "was killed by SIGKILL")
    for _ in range(6):
        scene.pass_(2.0)
    assert keeper.killed == [0, 1]
    assert "worker 1 (pid 1001) stopped answering" in str(
        scene.controller.membership.members[1].error
    )


def test_a_pause_of_the_driver_itself_is_nobodys_silence():
    scene = Scene(heartbeat_timeout_s=10.0)
    scene.start()
    scene.pass_(3600.0)
    assert scene.controller.error is None
    for _ in range(6):
        scene.pass_(2.0)
    assert scene.controller.error is not None


def test_a_lost_worker_ends_every_run_at_once_and_the_next_start_says_why():
    scene = Scene(keeper=Keeper())
    scene.start()
    scene.submit(generation=2)
    scene.controller.lose_worker(1, "was killed by SIGKILL")
    scene.settle()
    assert scene.workers[0].last(Drop).reason == "failed"
    for generation in (1, 2):
        scene.workers[0].say(Dropped(generation, 0, {}))
    scene.settle()
    errors = [effect.error for effect in scene.effects if hasattr(effect, "error")]
    assert [str(e) for e in errors] == [str(errors[0])] * 2
    assert errors[0].process_id == 1001
    assert "SIGKILL" in str(errors[0])
    scene.effects.clear()
    scene.submit(generation=3)
    assert "SIGKILL" in str(scene.ended.error)


def test_a_broken_link_waits_a_moment_for_the_cause_of_death():
    scene = Scene(keeper=Keeper())
    scene.start()
    scene.workers[1].say(LinkFailure("the connection broke"))
    lost = PeerError("worker 0 lost its link from worker 1", worker=1)
    scene.workers[0].say(Failed(1, 0, pack_error(lost)))
    scene.settle()
    assert scene.workers[0].last(Start)
    assert scene.controller.error is None
    scene.controller.lose_worker(1, "was killed by SIGSEGV")
    scene.pass_(2.0)
    assert "SIGSEGV" in str(scene.ended.error)


def test_a_broken_link_without_a_cause_of_death_ends_the_run_all_the_same():
    scene = Scene(keeper=Keeper())
    scene.start()
    scene.workers[1].say(LinkFailure("a gap on the bulk lane"))
    scene.settle()
    scene.pass_(1.5)
    scene.pass_(1.5)
    assert "a gap on the bulk lane" in str(scene.ended.error)


def test_a_link_lost_between_workers_ends_every_run_and_the_session():
    scene = Scene(keeper=Keeper())
    scene.start()
    scene.submit(generation=2)
    scene.workers[1].say(LinkLost(1, 0, "a gap"))
    scene.settle()
    assert scene.controller.error is None  # one of them may have died
    scene.pass_(1.5)
    scene.drop(1)
    scene.drop(2)
    errors = [effect.error for effect in scene.effects if hasattr(effect, "error")]
    match = "worker 1 (pid 1001) lost its link from worker 0 (pid 1000); got a gap"
    assert [match in str(error) for error in errors] == [True, True]
    assert scene.controller.error is errors[0]


def test_nothing_starts_before_every_worker_has_built_the_graph():
    scene = Scene()
    scene.gather()
    scene.submit()
    scene.say_ready(scene.workers[0])
    scene.settle()
    assert not any(isinstance(m, Start) for m in scene.workers[0].listen())
    scene.say_ready(scene.workers[1])
    scene.settle()
    assert [w.last(Start).generation for w in scene.workers] == [1, 1]
    assert scene.of(Started)


def test_a_worker_that_built_another_graph_is_named_with_the_first_difference():
    scene = Scene()
    scene.gather()
    scene.submit()
    other = chain_graph("sink").resolve(2)
    scene.say_ready(
        scene.workers[1], fingerprint=other.fingerprint(), description=other.describe()
    )
    scene.settle()
    scene.drop()
    error = scene.ended.error
    assert isinstance(error, InvariantError)
    assert error.worker == 1
    assert "end: sink" in error.difference


def test_a_graph_that_is_never_built_ends_at_the_deadline_naming_who_is_late():
    scene = Scene()
    scene.gather()
    scene.submit()
    scene.say_ready(scene.workers[0])
    scene.settle()
    scene.pass_(61.0)
    scene.drop()
    assert scene.ended.error.workers == (1,)
    assert "waiting for workers to build the graph" in scene.ended.error.explanation
    assert "no answer from worker 1" in scene.ended.error.explanation


@pytest.mark.parametrize("mode", ["broadcast", "accumulator"])
def test_a_run_is_complete_when_no_pointstamp_is_left_and_all_workers_are_done(mode):
    scene = Scene()
    scene.start(progress_mode=mode)
    scene.release_all(scene.workers[0])
    scene.settle()
    assert not any(isinstance(m, Drop) for m in scene.workers[0].listen())
    scene.release_all(scene.workers[1])
    scene.settle()
    assert scene.workers[0].last(Drop).reason == "complete"
    assert scene.ended is None
    scene.drop()
    assert scene.ended.error is None
    assert set(scene.ended.metrics) == {0, 1}


def test_the_accumulator_sends_whole_batches_to_every_worker_in_its_own_sequence():
    scene = Scene()
    scene.start(progress_mode="accumulator")
    scene.release_all(scene.workers[0])
    scene.release_all(scene.workers[1])
    scene.settle()
    for worker in scene.workers:
        batches = [m for m in worker.listen() if isinstance(m, ProgressBatch)]
        assert [batch.sequence for batch in batches] == list(range(len(batches)))
        assert {batch.sender for batch in batches} == {CONTROLLER}
        total = {}
        for batch in batches:
            for location, time, delta in batch.changes:
                total[location, time] = total.get((location, time), 0) + delta
        assert total == {(location, 0): -2 for location in INITIAL}


def test_a_consumption_that_overtakes_its_production_does_not_end_the_run():
    scene = Scene()
    scene.start()
    scene.release_all(scene.workers[0])
    scene.workers[0].progress(1, (MAP_IN, 0, -5))  # what worker 1 has yet to tell of
    scene.settle()
    assert not any(isinstance(m, Drop) for m in scene.workers[0].listen())
    scene.workers[1].progress(0, (MAP_IN, 0, 5))
    scene.release_all(scene.workers[1], sequence=1)
    scene.settle()
    assert scene.workers[0].last(Drop).reason == "complete"


def test_collected_batches_are_released_whole_and_in_order_once_their_time_passed():
    scene = Scene()
    scene.start()
    end = scene.graph.operator_named("end").index
    one, two = scene.workers
    one.progress(0, (END_IN, 0, 2), (END_IN, 1, 1))
    two.say(Emitted(1, end, 1, "collect", (0, ["b"])))
    one.say(Emitted(1, end, 0, "collect", (1, ["later"])))
    one.say(Emitted(1, end, 0, "collect", (0, ["a"])))
    scene.release_all(one, sequence=1)
    scene.release_all(two, sequence=0)
    scene.settle()
    assert not scene.of(Released)
    two.progress(1, (END_IN, 0, -2))
    scene.settle()
    assert scene.of(Released) == [Released("end", 0, ((0, ["a"]), (1, ["b"])))]
    scene.controller.ask(1, RunState.cancel)
    scene.settle()
    scene.drop()
    assert len(scene.of(Released)) == 1  # of time 1 nothing, for it was not complete


def test_the_frontier_of_a_probe_is_told_as_it_moves():
    scene = Scene(1)
    scene.start(chain_graph("probe"))
    worker = scene.workers[0]
    worker.progress(0, (SOURCE_OUT, 4, 1))
    scene.release_all(worker, sequence=1)
    scene.settle()
    worker.progress(2, (SOURCE_OUT, 4, -1))
    scene.settle()
    moves = [move.elements for move in scene.of(FrontierMoved)]
    assert moves == [(4,), ()]


def test_messages_of_a_run_that_is_over_are_counted_and_change_nothing():
    scene = Scene(1)
    scene.start()
    scene.release_all(scene.workers[0])
    scene.settle()
    scene.drop()
    told = list(scene.effects)
    scene.workers[0].progress(1, (SOURCE_OUT, 0, 1))
    scene.workers[0].say(Failed(1, 0, failure()))
    scene.workers[0].say(Dropped(99, 0, {}))
    scene.settle()
    assert scene.effects == told
    assert scene.controller.num_stale == 3


def test_a_duplicate_progress_batch_is_the_end_of_its_run_only():
    scene = Scene(1)
    scene.start()
    scene.submit(generation=2)
    scene.workers[0].progress(0, (SOURCE_OUT, 3, 1))
    scene.workers[0].progress(0, (SOURCE_OUT, 3, 1))
    scene.settle()
    scene.drop()
    assert isinstance(scene.ended.error, InvariantError)
    scene.say_ready(scene.workers[0], generation=2)
    scene.settle()
    assert scene.workers[0].last(Start).generation == 2


def test_two_runs_side_by_side_keep_their_progress_apart():
    scene = Scene(1)
    scene.start()
    scene.submit(generation=2)
    scene.build(generation=2)
    scene.release_all(scene.workers[0], generation=2)
    scene.settle()
    assert [m.generation for m in scene.workers[0].listen() if isinstance(m, Drop)] == [
        2
    ]


def test_the_first_failure_ends_the_run_and_later_ones_are_noted_on_it():
    scene = Scene()
    scene.start()
    scene.workers[1].say(Failed(1, 1, failure("first")))
    scene.workers[0].say(Failed(1, 0, failure("second", worker=0)))
    scene.settle()
    scene.drop()
    error = scene.ended.error
    assert isinstance(error, OperatorError)
    assert isinstance(error, KeyError)
    assert (error.operator, error.worker, error.shard, error.time) == ("map", 1, 3, 7)
    assert any("second" in note for note in error.__notes__)


def test_a_worker_that_is_stuck_in_user_code_does_not_keep_a_failed_run_from_ending():
    scene = Scene()
    scene.start()
    scene.workers[1].say(Failed(1, 1, failure()))
    scene.settle()
    scene.workers[1].say(Dropped(1, 1, {}))
    scene.settle()
    assert scene.ended is None
    scene.pass_(2.0)
    assert isinstance(scene.ended.error, OperatorError)


def test_a_cancelled_run_ends_with_an_error_that_says_so():
    scene = Scene()
    scene.start()
    scene.controller.ask(1, RunState.cancel)
    scene.settle()
    assert scene.workers[0].last(Drop).reason == "cancelled"
    scene.drop()
    assert isinstance(scene.ended.error, RunStoppedError)


def test_a_run_out_of_time_says_who_holds_it_and_who_did_not_answer():
    scene = Scene()
    scene.start(timeout_s=5.0)
    scene.workers[1].say(Heartbeat(1, "operator 'map', shard 1", 4.0))
    scene.pass_(5.1)
    inspect = scene.workers[0].last(Inspect)
    holding = (SOURCE_OUT, 0, 1, ("flow.py:12 in on_start",))
    scene.workers[0].say(Report(1, 0, inspect.request, {}, (holding,)))
    scene.settle()
    scene.pass_(1.1)
    scene.drop()
    error = scene.ended.error
    assert isinstance(error, DeadlineError)
    assert (
        "time 0 at output 0 of 'source': a capability on worker 0" in error.explanation
    )
    assert "created at flow.py:12 in on_start" in error.explanation
    assert "no answer from worker 1, in operator 'map', shard 1" in error.explanation
    assert error.explanation in error.__notes__


def test_the_time_limit_holds_until_the_last_worker_is_done():
    scene = Scene()
    scene.start(timeout_s=5.0)
    for worker in scene.workers:
        scene.release_all(worker)
    scene.settle()
    scene.workers[0].say(Dropped(1, 0, {}))
    scene.settle()
    scene.pass_(6.0)
    scene.pass_(2.0)
    assert isinstance(scene.ended.error, DeadlineError)
    assert "no answer from worker 1" in scene.ended.error.explanation


def test_the_time_limit_counts_from_when_the_run_was_asked_for():
    waiting = Scene()
    waiting.submit(timeout_s=5.0)
    waiting.workers[0].hello()
    waiting.settle()
    building = Scene()
    building.gather()
    building.submit(timeout_s=5.0)
    building.workers[1].say(Heartbeat(1, "operator 'other', shard 1", 4.0))
    building.say_ready(building.workers[0])
    building.settle()
    for scene in (waiting, building):
        scene.pass_(4.9)
        assert scene.ended is None
        scene.pass_(0.2)
    building.workers[0].say(Dropped(1, 0, {}))
    building.settle()

    for scene in (waiting, building):
        error = scene.ended.error
        assert isinstance(error, DeadlineError)
        assert "got 5 s of time" in str(error)
        assert "no answer from worker 0" not in error.explanation
    told = waiting.ended.error.explanation
    assert "is waiting for the workers of its cluster" in told
    assert "no answer from worker 1" in told
    told = building.ended.error.explanation
    assert "no answer from worker 1, in operator 'other', shard 1" in told


def test_a_run_out_of_time_does_not_wait_again_for_who_did_not_answer():
    scene = Scene()
    scene.start(timeout_s=5.0)
    scene.pass_(5.1)
    request = scene.workers[0].last(Inspect).request
    scene.workers[0].say(Report(1, 0, request, {}, ()))
    scene.settle()
    scene.pass_(1.1)
    assert scene.ended is None  # worker 0 may still answer, and does
    scene.workers[0].say(Dropped(1, 0, {}))
    scene.settle()
    assert isinstance(scene.ended.error, DeadlineError)


def test_a_run_that_is_asked_to_stop_many_times_stops_once():
    scene = Scene()
    scene.start()
    for _ in range(3):
        scene.controller.ask(1, lambda run, _: run.stop_sources())
    scene.settle()
    for worker, epoch in zip(scene.workers, (4, 6), strict=True):
        worker.say(Stopping(1, worker.index, epoch))
    scene.settle()
    scene.controller.ask(1, lambda run, _: run.stop_sources())
    scene.settle()

    for worker in scene.workers:
        told = [m.epoch for m in worker.listen() if isinstance(m, StopSources)]
        assert told == [None, 6]


def test_closing_the_cluster_ends_every_run_and_tells_every_worker():
    scene = Scene()
    scene.start()
    scene.controller.shut_down()
    assert isinstance(scene.ended.error, RunStoppedError)
    assert [bool(w.last(Shutdown)) for w in scene.workers] == [True, True]


def test_what_the_driver_sends_before_the_start_is_kept_and_stays_in_order():
    scene = Scene()
    scene.gather()
    scene.submit()
    scene.controller.ask(1, lambda run, _: run.send_input(0, 1, ("data", 0, [1])))
    scene.controller.ask(1, lambda run, _: run.stop_sources())
    scene.settle()
    assert not any(isinstance(m, OperatorMessage) for m in scene.workers[1].listen())
    scene.build()
    kinds = [type(message) for message in scene.workers[1].listen()]
    assert kinds.index(OperatorMessage) < kinds.index(StopSources)
    assert scene.workers[1].last(OperatorMessage).body == ("data", 0, [1])
    assert not any(isinstance(m, OperatorMessage) for m in scene.workers[0].listen())


def test_an_inspection_is_answered_by_those_that_can_within_a_second():
    scene = Scene()
    scene.start()
    scene.controller.ask(1, lambda run, now: run.inspect(7, now))
    scene.settle()
    scene.workers[1].say(Report(1, 1, 7, {"operators": {"map": {}}}, ()))
    scene.settle()
    assert not scene.of(Inspected)
    scene.pass_(1.1)
    (answer,) = scene.of(Inspected)
    assert answer.request == 7
    assert answer.metrics == {1: {"operators": {"map": {}}}}
    assert answer.explanation.unanswered == ("worker 0",)


def test_the_controller_asks_to_be_called_at_its_next_deadline():
    scene = Scene(startup_timeout_s=60.0)
    assert scene.controller.next_deadline() == scene.clock.now + 60.0
    scene.start(timeout_s=5.0)
    assert scene.controller.next_deadline() == scene.clock.now + 5.0
