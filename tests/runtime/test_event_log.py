"""The log of what workers do, read back as a stream."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from timelyml import Dataflow
from timelyml.errors import ConfigError, OperatorError, TimelyError
from timelyml.exchange import CONTROLLER
from timelyml.runtime.events import (
    Batches,
    Channels,
    Closes,
    Messages,
    Operates,
    Park,
    Schedule,
)

PAGE = Path(__file__).parents[2] / "docs/debugging.md"


def words():
    flow = Dataflow("words", num_shards=3)
    numbers = flow.source(range(500), batch_size=10).exchange(lambda n: n)
    numbers.map(lambda n: n + 1, name="work").collect()
    return flow


def events_of(directory):
    """All events by kind, replayed in the calling process."""
    flow = Dataflow()
    flow.replay(directory).collect()
    found = defaultdict(list)
    for event in flow.run()["out"]:
        found[type(event)].append(event)
    return found


@pytest.fixture
def logged(cluster, tmp_path):
    """A run's metrics, its number of workers, and the events of it."""
    run = cluster.start(words(), event_log=tmp_path / "log")
    run.result()
    return run.metrics(), cluster.num_workers, events_of(tmp_path / "log")


def test_what_was_built_and_closed_is_logged_by_each_worker(logged):
    metrics, num_workers, events = logged

    workers = range(num_workers)
    operators = {(w, name) for w in workers for name in metrics["operators"]}
    channels = {(w, name) for w in workers for name in metrics["channels"]}
    assert {(e.worker, e.operator) for e in events[Operates]} == operators
    assert {(e.worker, e.channel) for e in events[Channels]} == channels
    assert sum(e.num_shards for e in events[Operates] if e.operator == "work") == 3
    assert {(e.worker, e.operator) for e in events[Closes]} == operators


def test_logged_messages_add_up_to_the_metrics_and_none_is_lost(logged):
    metrics, _, events = logged

    sent, received = Counter(), Counter()
    for e in events[Messages]:
        ends = (e.worker, e.peer) if e.is_sent else (e.peer, e.worker)
        (sent if e.is_sent else received)[e.channel, *ends] += e.records
    assert sent == received
    by_channel = Counter()
    for (channel, *_), records in sent.items():
        by_channel[channel] += records
    figures = metrics["channels"].items()
    assert by_channel == {name: figure["records"] for name, figure in figures}


def test_logged_turns_are_those_of_the_metrics_and_do_not_overlap(logged):
    metrics, num_workers, events = logged

    turns = Counter(e.operator for e in events[Schedule])
    figures = metrics["operators"].items()
    assert turns == {name: f["activations"] for name, f in figures if f["activations"]}
    busy = [*events[Schedule], *events[Park]]
    for worker in range(num_workers):
        spans = sorted((e.time_ns, e.stop_ns) for e in busy if e.worker == worker)
        stops = [stop for _, stop in spans]
        starts = [start for start, _ in spans]
        assert all(a <= b for a, b in zip(stops, starts[1:], strict=False))
        assert all(start <= stop for start, stop in spans)


def test_logged_batches_between_workers_arrive_as_they_left(logged):
    _, num_workers, events = logged

    sent = Counter((e.worker, e.peer) for e in events[Batches] if e.is_sent)
    heard = Counter((e.peer, e.worker) for e in events[Batches] if not e.is_sent)
    # A worker has done its part only when nobody can have anything left to tell it.
    peers = [(a, b) for a in range(num_workers) for b in range(num_workers) if a != b]
    assert {pair: sent[pair] for pair in peers} == heard
    assert all(heard[pair] > 0 for pair in peers)
    assert all(sent[worker, CONTROLLER] > 0 for worker in range(num_workers))


def test_with_an_accumulator_batches_come_from_the_controller(cluster, tmp_path):
    cluster.run(words(), progress_mode="accumulator", event_log=tmp_path)

    batches = events_of(tmp_path)[Batches]
    workers = set(range(cluster.num_workers))
    assert {e.peer for e in batches} == {CONTROLLER}
    assert {e.worker for e in batches if not e.is_sent} == workers


def test_a_run_that_failed_leaves_a_whole_log(cluster, tmp_path):
    flow = Dataflow(num_shards=1)
    flow.source([1, 0]).map(lambda n: 1 // n, name="divide").collect()
    with pytest.raises(OperatorError, match="divide"):
        cluster.run(flow, event_log=str(tmp_path))

    names = {e.operator for e in events_of(tmp_path)[Operates]}
    assert names == {"source", "divide", "out"}


def test_a_log_is_never_written_over(cluster, tmp_path):
    cluster.run(words(), event_log=tmp_path)
    with pytest.raises(TimelyError, match="log of events is there already"):
        cluster.run(words(), event_log=tmp_path)


def test_a_run_without_a_log_notes_nothing(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster.run(words())
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_directory_is_refused():
    with pytest.raises(ConfigError, match=r"event_log.*expected a directory"):
        words().run(event_log=True)


def test_the_page_tells_the_time_of_each_operator(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(from coll.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code.group(1), str(PAGE), "exec"), {})

    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {"source", "work", "out"}
    assert lines[0].startswith("work")
