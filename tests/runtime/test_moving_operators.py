"""Every operator that has state declares it, so that its shards can leave and go on.

`STATE_OF` names each method that makes operators. One that is not there fails, and so
does one whose operators have state that nothing here or in `test_moving.py` moves.
"""

from __future__ import annotations

import ast
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.runtime.moved import (
    MANY,
    NUM_EPOCHS,
    NUM_SHARDS,
    STEPS_TO_REST,
    Gate,
    Site,
    asked,
    columns,
    list_all,
    opened_gate,
    records,
    share_the_work,
)
from tests.test_operators_page import OF_FLOWS_THEMSELVES, public
from timelyml import Dataflow, Logic, Session, Stream, ml
from timelyml.errors import SchemaError, TapeError
from timelyml.runtime.effects import DriverMessage
from timelyml.runtime.record import CAPTURE_TAG
from timelyml.runtime.recording import Recording


@pytest.fixture
def gate():
    yield from opened_gate()


def windows_of_columns(flow):
    rows = flow.source(columns)
    return rows.window(
        Session(2),
        "value",
        key="key",
        aggregates={"n": "count", "most": ("max", "value")},
    ).results.map(str)


def joined_columns(flow):
    rows = flow.source(columns)
    some = rows.filter(lambda c: c["value"] % 3 < 1, by_batch=True)
    return rows.join(some, key="key", how="outer", across_times=True, ttl_epochs=1).map(
        str
    )


def held(stream):
    """A stream whose epochs stay open, so that its sources run out of epochs."""
    return stream.map_async(asked, limit=MANY).map(str)


def fed_by_arrays(flow):
    return held(flow.source(np.arange(6000), batch_size=5, epoch_every=1))


def fed_by_an_iterable(flow):
    return held(flow.source(range(1500), batch_size=5, epoch_every=1))


COLUMN_FLOWS = {
    "windows of columns": windows_of_columns,
    "columns joined across times": joined_columns,
    "arrays": fed_by_arrays,
    "an iterable": fed_by_an_iterable,
}


@pytest.mark.parametrize("stop_at", [1, 3])
@pytest.mark.parametrize("make", COLUMN_FLOWS.values(), ids=COLUMN_FLOWS)
def test_columns_are_shared_between_runs_too(make, stop_at, gate):
    flow = Dataflow(num_shards=NUM_SHARDS)
    list_all(make(flow))
    whole, together = share_the_work(flow.build(), gate, stop_at)

    assert together == whole


def captured(graph, gate, stop_at):
    """The tapes of two runs that share the work of one flow, as the driver has them."""
    gate.open_until = stop_at
    first, second = Site(2), Site(3)
    first.start(graph)
    images = first.take_shards()
    first.leave()
    gate.open_until = NUM_EPOCHS
    second.start(graph, images)
    second.finish()
    pieces = {shard: [] for shard in range(NUM_SHARDS)}
    for effect in [*first.effects, *second.effects]:
        if isinstance(effect, DriverMessage) and effect.tag == CAPTURE_TAG:
            pieces[effect.shard].append(effect.body)
    return Recording.of(pieces.values())


@pytest.mark.parametrize("to_files", [False, True])
def test_a_tape_that_two_runs_wrote_is_that_of_one(to_files, gate, tmp_path):
    flow = Dataflow(num_shards=NUM_SHARDS)
    flow.source(records).capture(tmp_path if to_files else None)
    recording = captured(flow.build(), gate, 3)

    played = Dataflow(num_shards=2)
    played.replay(tmp_path if to_files else recording).collect()

    expected = [
        (epoch, pair)
        for shard in range(NUM_SHARDS)
        for item in records(shard, NUM_SHARDS)
        for epoch, pairs in [item]
        for pair in pairs
    ]
    found = [(t, pair) for t, block in played.run().batches("out") for pair in block]
    assert sorted(found) == sorted(expected)


def test_a_tape_goes_on_where_it_was_played_elsewhere(gate):
    flow = Dataflow(num_shards=NUM_SHARDS)
    flow.source(np.arange(3000), batch_size=5, epoch_every=1).capture()
    recording = flow.run().recording("capture")
    again = Dataflow(num_shards=2)
    list_all(held(again.replay(recording)))

    whole, together = share_the_work(again.build(), gate, NUM_EPOCHS)

    assert len(whole) > 100
    assert together == whole


def write_lines(path):
    path.write_text("".join(f"{n},{n % 7}\n" for n in range(4000)))


def write_csv(path):
    path.write_text("a,b\n" + "".join(f"{n},{n % 7}\n" for n in range(4000)))


def write_parquet(path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"a": np.arange(4000)})
    parquet.write_table(table, path, row_group_size=1000)


@pytest.mark.parametrize(
    ("write", "method"),
    [
        (write_lines, "read_text"),
        (write_csv, "read_csv"),
        (write_parquet, "read_parquet"),
    ],
)
def test_files_are_read_on_elsewhere(write, method, gate, tmp_path):
    write(tmp_path / "rows")
    flow = Dataflow(num_shards=2)
    stream = getattr(flow, method)(tmp_path / "rows", batch_size=5, epoch_every=1)
    list_all(held(stream))

    whole, together = share_the_work(flow.build(), gate, NUM_EPOCHS)

    assert len(whole) > 100
    assert together == whole


@pytest.mark.parametrize("how", ["capture", "replay"])
def test_what_a_connection_carries_is_refused_elsewhere(how, gate, tmp_path):
    place = f"unix:{tmp_path / 'place'}"
    writing, reading = Dataflow(num_shards=1), Dataflow(num_shards=1)
    writing.source(records).capture(place)
    reading.replay(place).collect()
    sites = Site(1), Site(1)
    gate.open_until = 2
    graphs = writing.build(), reading.build()
    for site, graph in zip(sites, graphs, strict=True):
        site.start(graph)
    for _ in range(STEPS_TO_REST):
        for site in sites:
            site._step()

    images = [site.take_shards() for site in sites]
    for site in sites:
        site.leave()
    which = int(how == "replay")
    elsewhere = Site(1)
    elsewhere.start(graphs[which], images[which])
    with pytest.raises(TapeError, match="connection"):
        elsewhere.finish()
    elsewhere.leave()


def test_the_columns_of_a_first_block_are_remembered_elsewhere(gate):
    def changing(shard, num_shards):
        yield {"x": np.arange(3)}
        while Gate.open_until < NUM_EPOCHS:
            yield None
        yield {"x": np.arange(3.0)}

    flow = Dataflow(num_shards=1)
    flow.source(changing, name="rows").collect()
    graph = flow.build()
    gate.open_until = 1
    first, second = Site(1), Site(1)
    first.start(graph)
    images = first.take_shards()
    gate.open_until = NUM_EPOCHS
    second.start(graph, images)

    with pytest.raises(SchemaError, match="other columns than those of the first"):
        second.finish()


def test_an_input_that_was_closed_is_closed_elsewhere(gate):
    flow = Dataflow(num_shards=1)
    flow.input("rows").concat(flow.source(records)).collect()  # the run goes on
    graph = flow.build()
    gate.open_until = 1
    first, second = Site(1), Site(1)
    first.start(graph)
    (dataflow,) = first.workers[0]._dataflows.values()
    dataflow.post(graph.operator_named("rows").index, 0, ("close",))
    images = first.take_shards()
    gate.open_until = NUM_EPOCHS
    second.start(graph, images)

    second.finish()


class Service:
    """How many calls of `ask` are out, and were at most."""

    num_out = most_out = 0


async def ask(record):
    Service.num_out += 1
    Service.most_out = max(Service.most_out, Service.num_out)
    answer = await asked(record)
    Service.num_out -= 1
    return answer


def test_calls_that_are_made_again_keep_to_the_limit(gate):
    limit = 60  # of each worker: one shard before, four after
    flow = Dataflow(num_shards=NUM_SHARDS)
    numbers = flow.source(lambda shard, count: [list(range(shard, 200, count))])
    numbers.map_async(ask, limit=limit).collect()
    graph = flow.build()
    gate.answers.clear()
    first, second = Site(NUM_SHARDS), Site(1)
    first.start(graph)
    images = first.take_shards()
    first.leave()
    Service.num_out = Service.most_out = 0
    gate.answers.set()
    second.start(graph, images)
    second.finish()

    assert len(second.collected()) == 200
    assert 0 < Service.most_out <= limit


TESTS = Path(__file__).parents[1]
MOVING = "runtime/test_moving.py", "test_two_runs_that_share_the_work_give_what_one"
HERE = "runtime/test_moving_operators.py"

MOVED = {
    "accumulate": MOVING,
    "aggregate": MOVING,
    "aggregate-combine": MOVING,
    "bytewax": (
        "io/test_bytewax_process.py",
        "test_a_bytewax_dataflow_is_not_begun_again_elsewhere",
    ),
    "capture": (HERE, "test_a_tape_that_two_runs_wrote_is_that_of_one"),
    "compute": MOVING,
    "count": MOVING,
    "count-combine": MOVING,
    "delay": MOVING,
    "distinct": MOVING,
    "distinct-combine": MOVING,
    "fold": MOVING,
    "input": (HERE, "test_an_input_that_was_closed_is_closed_elsewhere"),
    "join": MOVING,
    "map_async": MOVING,
    "map_batch": (HERE, "test_the_columns_of_a_first_block_are_remembered_elsewhere"),
    "read": (
        "io/test_bytewax_sources.py",
        "test_the_state_that_a_run_left_lets_another_go_on",
    ),
    "read_csv": (HERE, "test_files_are_read_on_elsewhere"),
    "read_parquet": (HERE, "test_files_are_read_on_elsewhere"),
    "read_text": (HERE, "test_files_are_read_on_elsewhere"),
    "rebalance": MOVING,
    "reduce": MOVING,
    "reduce-combine": MOVING,
    "replay": (HERE, "test_a_tape_goes_on_where_it_was_played_elsewhere"),
    "source": MOVING,
    "state_machine": MOVING,
    "window": MOVING,
    "window-event_time": MOVING,
    "write": ("io/test_bytewax_sinks.py", "test_a_resumed_sink_cuts_off"),
}
"""By kind of operator with state: the test that moves it."""

OF_USERS = "unary unary_frontier unary_notify binary binary_frontier binary_notify sink"
MOVED |= dict.fromkeys(OF_USERS.split(), MOVING)  # one of them stands for all


def nothing(*_):
    return None


class Lines:
    """A source of Bytewax's shape."""

    def list_parts(self):
        return ["one"]

    def build_part(self, *_):
        return self


class Place(Lines):
    """A sink of Bytewax's shape."""

    def part_fn(self, key):
        return 0


def mixture(flow, s):
    layer = ml.MoE(num_experts=2, d_ff=2)
    s.moe(layer, layer.init(jax.random.key(0), np.ones((1, 2), np.float32)))


def join_loop(flow, s):
    end = flow.feedback(None, by=1, num_shards=2)
    end.connect(end.stream.filter(nothing))


STATE_OF = {
    "map": lambda flow, s: s.map(nothing),
    "map_batch": lambda flow, s: s.map_batch(nothing),
    "map_async": lambda flow, s: s.map_async(nothing),
    "flat_map": lambda flow, s: s.flat_map(nothing),
    "filter": lambda flow, s: s.filter(nothing),
    "inspect": lambda flow, s: s.inspect(nothing),
    "inspect_batch": lambda flow, s: s.inspect_batch(nothing),
    "exchange": lambda flow, s: s.exchange(nothing).map(nothing),
    "broadcast": lambda flow, s: s.broadcast().map(nothing),
    "gather": lambda flow, s: s.gather().map(nothing),
    "direct": lambda flow, s: s.direct().map(nothing),
    "rebalance": lambda flow, s: s.rebalance().map(nothing),
    "key_by": lambda flow, s: s.key_by(nothing).map(nothing),
    "concat": lambda flow, s: s.concat(s),
    "branch": lambda flow, s: s.branch(nothing),
    "partition": lambda flow, s: s.partition(2, nothing),
    "delay": lambda flow, s: s.delay(nothing),
    "window": lambda flow, s: s.window(Session(1), nothing),
    "fold": lambda flow, s: s.fold(0, nothing),
    "accumulate": lambda flow, s: s.accumulate(0, nothing),
    "reduce": lambda flow, s: s.reduce(nothing, nothing),
    "count": lambda flow, s: s.count(),
    "aggregate": lambda flow, s: s.aggregate("k", {"n": "count"}),
    "distinct": lambda flow, s: s.distinct(nothing, across_times=True),
    "join": lambda flow, s: s.join(s),
    "state_machine": lambda flow, s: s.state_machine(nothing),
    "compute": lambda flow, s: s.compute(nothing),
    "moe": mixture,
    "enter": lambda flow, s: s.enter(flow.scope()).map(nothing),
    "leave": lambda flow, s: s.enter(flow.scope()).leave().map(nothing),
    "iterate": lambda flow, s: s.iterate(lambda r: r.filter(nothing), max_iterations=2),
    "unary": lambda flow, s: s.unary(nothing),
    "unary_frontier": lambda flow, s: s.unary_frontier(nothing, nothing),
    "unary_notify": lambda flow, s: s.unary_notify(nothing, nothing),
    "binary": lambda flow, s: s.binary(s, nothing),
    "binary_frontier": lambda flow, s: s.binary_frontier(s, nothing, nothing),
    "binary_notify": lambda flow, s: s.binary_notify(s, nothing, nothing),
    "sink": lambda flow, s: s.sink(nothing),
    "write": lambda flow, s: s.write(Place()),
    "probe": lambda flow, s: s.probe(),
    "collect": lambda flow, s: s.collect(),
    "capture": lambda flow, s: s.capture(),
    "input": lambda flow, s: flow.input(),
    "source": lambda flow, s: flow.source([1]),
    "read": lambda flow, s: flow.read(Lines()),
    "bytewax": lambda flow, s: flow.bytewax(nothing),
    "read_text": lambda flow, s: flow.read_text(__file__),
    "read_csv": lambda flow, s: flow.read_csv(__file__),
    "read_parquet": lambda flow, s: flow.read_parquet("*.parquet"),
    "replay": lambda flow, s: flow.replay(Recording((b"",))),
    "operator": lambda flow, s: flow.operator(Logic(on_batch=nothing), inputs=[s]),
    "scope": lambda flow, s: flow.scope(),
    "feedback": join_loop,
}


def test_every_method_says_what_state_it_makes():
    assert set(STATE_OF) == (public(Stream) | public(Dataflow)) - OF_FLOWS_THEMSELVES


@pytest.mark.parametrize("method", sorted(STATE_OF))
def test_operators_with_state_are_moved_by_a_test(method, tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "rows.parquet")
    monkeypatch.chdir(tmp_path)
    flow = Dataflow(num_shards=2)
    stream = flow.source(records).map(nothing)
    STATE_OF[method](flow, stream)

    made = [spec for spec in flow.build().operators if spec.states]
    for kind in {spec.kind for spec in made}:
        file, test = MOVED[kind]
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        names = [node.name for node in tree.body if hasattr(node, "name")]
        assert any(name.startswith(test) for name in names), test
