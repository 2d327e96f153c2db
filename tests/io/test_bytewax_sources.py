"""Sources in the shape of Bytewax's: shared, resumed, ended, and refused when wrong."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.io.connectors import Notes, Numbers, OnePerShard
from tests.io.world import Interrupted
from tests.operators.fakes import FakeShard, logic_of
from timelyml import Dataflow
from timelyml.errors import ConfigError, GraphError, PayloadError
from timelyml.io.bytewax_sources import assign
from timelyml.runtime.shipping import loads

bytewax = pytest.importorskip("bytewax", reason="no wheels for this Python")


def everything(counts):
    return sorted(f"{part}:{n}" for part, count in counts.items() for n in range(count))


def with_shard(shard, delivery):
    records = [(shard.index, record) for record in delivery.payload]
    shard.output().send(delivery.time, records)


def test_every_partition_is_read_whole_by_one_shard_and_shards_have_equally_many(
    cluster,
):
    counts = {f"part{index}": 3 + index for index in range(7)}
    flow = Dataflow(num_shards=3)
    flow.read(Numbers(counts)).unary(with_shard).collect()

    records = cluster.run(flow)["out"]

    assert sorted(record for _, record in records) == everything(counts)
    readers = {(record.split(":")[0], shard) for shard, record in records}
    assert len(readers) == len(counts)
    assert sorted(Counter(shard for _, shard in readers).values()) == [2, 2, 3]


@settings(deadline=None)
@given(
    st.integers(1, 5),
    st.dictionaries(st.text("abc", min_size=1), st.sets(st.integers(0, 4), min_size=1)),
)
def test_a_partition_goes_to_a_shard_that_sees_it(num_shards, seen_by):
    listings = [
        (shard, sorted(p for p, seers in seen_by.items() if shard in seers), {})
        for shard in range(num_shards)
    ]

    owners = assign(listings)

    visible = {p for p, seers in seen_by.items() if seers & set(range(num_shards))}
    assert set(owners) == visible
    assert all(owner in seen_by[part] for part, owner in owners.items())
    assert owners == assign(listings[::-1])


@settings(deadline=None)
@given(st.integers(1, 6), st.sets(st.text("abcd", min_size=1)))
def test_shards_that_see_the_same_get_equally_many_up_to_one(num_shards, parts):
    owners = assign([(shard, sorted(parts), {}) for shard in range(num_shards)])

    loads = [list(owners.values()).count(shard) for shard in range(num_shards)]
    assert max(loads) - min(loads) <= 1


def test_a_dynamic_source_is_built_once_for_each_shard(cluster):
    flow = Dataflow(num_shards=3)
    flow.read(OnePerShard(), name="numbers").collect()

    built = [("numbers", shard, 3) for shard in range(3)]
    assert sorted(cluster.run(flow)["out"]) == sorted(2 * built)


class Batches:
    """A dynamic source of the batches it is given."""

    def __init__(self, *batches):
        self.batches = batches

    def build(self, step_id, worker_index, worker_count):
        batches = iter(self.batches)
        self.next_batch = lambda: next(batches)
        return self


def test_arrays_are_columns(cluster):
    flow = Dataflow(num_shards=1)
    flow.read(Batches(np.arange(3))).collect("array")
    flow.read(Batches({"x": np.arange(2)})).collect("dict")

    result = cluster.run(flow)

    np.testing.assert_array_equal(result.batches("array")[0][1], [0, 1, 2])
    np.testing.assert_array_equal(result.batches("dict")[0][1]["x"], [0, 1])


def test_columns_other_than_declared_are_refused(cluster):
    flow = Dataflow(num_shards=1)
    rows = flow.read(Batches({"x": np.arange(2)}), name="rows", schema={"x": "float64"})
    rows.collect()

    with pytest.raises(PayloadError, match="source 'rows' has other columns than decl"):
        cluster.run(flow)
    with pytest.raises(GraphError, match="expected 'y' among them"):
        rows.aggregate("y", {"n": "count"})


def test_columns_that_change_are_refused_as_everywhere(cluster):
    first, other = {"x": np.arange(2)}, {"x": np.arange(2.0)}
    flow = Dataflow(num_shards=1)
    flow.read(Batches(first, other), name="rows").collect()

    with pytest.raises(PayloadError, match="source 'rows' has other columns than"):
        cluster.run(flow)


def test_files_of_a_folder_are_read_line_by_line(cluster, tmp_path):
    from bytewax.connectors.files import DirSource

    for index in range(5):
        lines = "".join(f"{index}:{n}\n" for n in range(index))
        (tmp_path / f"{index}.txt").write_text(lines)
    flow = Dataflow()
    flow.read(DirSource(tmp_path, "*.txt", batch_size=2)).collect()

    expected = everything({str(index): index for index in range(5)})
    assert sorted(cluster.run(flow)["out"]) == expected


def test_a_file_and_a_csv_file_are_read_in_order(cluster, tmp_path):
    from bytewax.connectors.files import CSVSource, FileSource

    path = tmp_path / "table.csv"
    path.write_text("word,count\nto,2\nbe,3\nor,1\n")
    flow = Dataflow()
    flow.read(FileSource(path)).collect("lines")
    flow.read(CSVSource(path, batch_size=1)).collect("rows")

    result = cluster.run(flow)

    assert result["lines"] == ["word,count", "to,2", "be,3", "or,1"]
    assert [row["count"] for row in result["rows"]] == ["2", "3", "1"]


def test_a_polling_source_is_polled_at_its_interval_and_sooner_to_try_again(cluster):
    from bytewax.inputs import SimplePollingSource

    class Clock(SimplePollingSource):
        def __init__(self):
            super().__init__(timedelta(milliseconds=20))
            self.times = []

        def build_part(self, step_id, for_part, resume_state):
            self.began = datetime.now(UTC)
            return super().build_part(step_id, for_part, resume_state)

        def next_item(self):
            self.times.append(datetime.now(UTC) - self.began)
            if len(self.times) == 2:
                raise SimplePollingSource.Retry(timedelta(milliseconds=5))
            if len(self.times) == 5:
                raise StopIteration
            return self.times[-1]

    flow = Dataflow()
    flow.read(Clock()).collect()

    times = cluster.run(flow)["out"]

    due_ms = [0, 25, 45]
    assert all(
        time >= timedelta(milliseconds=due)
        for time, due in zip(times, due_ms, strict=True)
    )


def test_an_end_ends_and_an_abort_fails_with_the_exception_of_bytewax(cluster):
    from bytewax.inputs import AbortExecution
    from bytewax.testing import TestingSource

    ends = Dataflow()
    ends.read(TestingSource([1, 2, TestingSource.EOF(), 3])).collect()
    assert cluster.run(ends)["out"] == [1, 2]

    aborts = Dataflow()
    aborts.read(TestingSource([1, TestingSource.ABORT(), 3]), name="numbers").collect()
    with pytest.raises(AbortExecution, match="'numbers' failed on worker") as caught:
        cluster.run(aborts)
    assert "partition 'iterable' of 'numbers' was read" in caught.value.__notes__[0]


def test_a_pause_holds_back_its_partition_only(cluster):
    from bytewax.testing import TestingSource

    pause = TestingSource.PAUSE(timedelta(milliseconds=50))
    flow = Dataflow()
    late = flow.read(TestingSource(["first", pause, "late"]))
    stamped = late.map(lambda word: (word, datetime.now(UTC)))
    stamped.collect("late")

    (_, first), (_, second) = cluster.run(flow)["late"]

    assert second - first >= timedelta(milliseconds=45)


def test_an_epoch_holds_so_many_batches_of_each_shard(cluster):
    flow = Dataflow(num_shards=2)
    flow.read(Numbers({"a": 10, "b": 4}), epoch_every=2).collect()

    by_epoch = {}
    for time, batch in cluster.run(flow).batches("out"):
        by_epoch.setdefault(time, []).extend(batch)
    assert [sorted(by_epoch[epoch]) for epoch in sorted(by_epoch)] == [
        ["a:0", "a:1", "a:2", "a:3", "b:0", "b:1", "b:2", "b:3"],
        ["a:4", "a:5", "a:6", "a:7"],
        ["a:8", "a:9"],
    ]


class SilentUntil(Numbers):
    """Partition "silent" has nothing before the other has been read to its end."""

    def build_part(self, step_id, for_part, resume_state):
        partition = super().build_part(step_id, for_part, resume_state)
        if for_part == "silent":
            source, next_batch = self, partition.next_batch
            partition.next_batch = lambda: next_batch() if source.notes.lines else []
        return partition


def test_a_silent_shard_does_not_hold_back_the_epochs_of_others(cluster, tmp_path):
    source = SilentUntil({"busy": 30, "silent": 2}, notes=Notes(tmp_path / "notes"))
    flow = Dataflow(num_shards=2)
    flow.read(source, epoch_every=1).collect()

    records = cluster.run(flow, max_epochs_ahead=2)["out"]

    assert sorted(records) == everything(source.counts)


def test_epochs_by_the_clock_go_on_without_records(cluster):
    class Silent:
        def build(self, step_id, worker_index, worker_count):
            self.next_batch = list
            return self

    flow = Dataflow(num_shards=2)
    flow.read(Silent(), epoch_interval_s=0.002).probe("silent")

    run = cluster.start(flow)
    run.probe("silent").wait_until(20, timeout_s=20)
    run.stop()
    assert run.probe("silent").done


def test_a_partition_that_has_nothing_is_asked_less_and_less_often():
    class Silent:
        def build(self, step_id, worker_index, worker_count):
            self.next_batch = list
            return self

    logic = logic_of(Dataflow().read(Silent()))
    shard = FakeShard(tick_s=0.0005)
    logic.on_start(shard)

    for _ in range(1000):
        shard.turn(logic)

    assert shard.delays[0] <= 0.001
    assert shard.delays[-1] == pytest.approx(0.05, abs=0.001)


def test_partitions_are_closed_at_their_end_and_when_the_run_is_stopped(
    cluster, tmp_path
):
    notes = Notes(tmp_path / "notes")
    flow = Dataflow()
    flow.read(Numbers({"a": 3, "b": 1}, notes=notes), name="numbers").collect()
    cluster.run(flow)
    assert sorted(notes.lines) == ["closed numbers a", "closed numbers b"]

    notes.path.unlink()
    never = datetime(2200, 1, 1, tzinfo=UTC)
    flow = Dataflow()
    waiting = Numbers({"a": 3}, notes=notes, awake=lambda: never)
    flow.read(waiting, name="numbers").collect()
    run = cluster.start(flow)
    run.stop()
    assert notes.lines in ([], ["closed numbers a"])  # stopped before it was built


def test_the_state_that_a_run_left_lets_another_go_on_where_it_was():
    counts = {f"part{index}": 400 for index in range(5)}  # more than one step reads

    def flow():
        made = Dataflow(num_shards=2)
        made.read(Numbers(counts), epoch_every=1, name="numbers").collect()
        return made

    first, second = Interrupted(2), Interrupted(2)
    first.begin(flow(), max_epochs_ahead=2)
    first.step_until(lambda: len(records_of(first)) > 50)
    states = first.export("numbers")
    first.step_until(lambda: len(records_of(first)) == 2000)
    second.begin(flow(), states, max_epochs_ahead=2)
    remaining = sorted(set(everything(counts)) - read_by_then(states))
    second.step_until(lambda: len(records_of(second)) >= len(remaining))

    assert 50 < 2000 - len(remaining) < 2000
    assert read_by_then(states) <= set(records_of(first))
    assert sorted(records_of(second)) == remaining


def records_of(world):
    return [record for _, _, batch in world._collected() for record in batch]


def read_by_then(states):
    """What the exported positions say was read."""
    return {
        f"{part}:{n}"
        for exported in states.values()
        for part, position in loads(exported["positions"]).items()
        for n in range(position.value)
    }


def test_a_partition_goes_on_after_its_end_where_it_ended():
    from bytewax.testing import TestingSource

    def flow():
        made = Dataflow(num_shards=1)
        items = [1, 2, TestingSource.EOF(), 3]
        made.read(TestingSource(items), name="numbers").collect()
        made.input("open")
        return made

    def position(world):
        exported = world.export("numbers")["numbers", 0]
        positions = loads(exported["positions"]) if "positions" in exported else {}
        return [at.value for at in positions.values()]

    first, second = Interrupted(), Interrupted()
    first.begin(flow())
    # Not the end of the run, which would take its state: the input stays open.
    first.step_until(lambda: position(first) == [3] and records_of(first))
    second.begin(flow(), first.export("numbers"))
    second.step_until(lambda: records_of(second))

    assert (records_of(first), records_of(second)) == ([1, 2], [3])


class NotASource:
    pass


@pytest.mark.parametrize(
    ("value", "got"),
    [(NotASource(), "NotASource"), (Numbers, "the class Numbers"), ([1, 2], "list")],
)
def test_what_is_no_source_is_refused_when_the_flow_is_made(value, got):
    with pytest.raises(GraphError, match=rf"'read' needs a source; got {got}; exp"):
        Dataflow().read(value)


def test_a_sink_is_no_source(tmp_path):
    from bytewax.connectors.files import DirSink
    from bytewax.connectors.stdio import StdOutSink

    with pytest.raises(GraphError, match="'read' needs a source; got DirSink"):
        Dataflow().read(DirSink(tmp_path, 2))

    flow = Dataflow()
    flow.read(StdOutSink()).collect()
    with pytest.raises(GraphError, match="built something that is no partition"):
        flow.run()


@pytest.mark.parametrize("option", ["epoch_every", "epoch_interval_s"])
def test_options_out_of_range_are_refused(option):
    with pytest.raises(ConfigError, match=f"'{option}' out of range; got 0"):
        Dataflow().read(OnePerShard(), **{option: 0})


def test_a_source_without_partitions_is_an_error_that_names_it(cluster, tmp_path):
    from bytewax.connectors.files import FileSource

    flow = Dataflow()
    flow.read(FileSource(tmp_path / "missing"), name="lines").collect()

    with pytest.raises(GraphError, match="source 'lines' lists no partitions; got Fi"):
        cluster.run(flow)


@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("list_parts", "while 'numbers' listed its partitions"),
        ("build_part", "while partition 'a' of 'numbers' was built"),
        ("next_batch", "while partition 'a' of 'numbers' was read"),
        ("next_awake", "while partition 'a' of 'numbers' was asked when it is due"),
        ("close", "while partition 'a' of 'numbers' was closed"),
    ],
)
def test_an_exception_names_the_operator_and_tells_where_it_was(cluster, method, where):
    class Faulty(Numbers):
        def __init__(self):
            super().__init__({"a": 1})
            self.break_if(method in ("list_parts", "build_part"), self)

        def break_if(self, is_here, target):
            if is_here:
                setattr(target, method, lambda *_: 1 // 0)

        def build_part(self, step_id, for_part, resume_state):
            partition = super().build_part(step_id, for_part, resume_state)
            self.break_if(method not in ("list_parts", "build_part"), partition)
            return partition

    flow = Dataflow()
    flow.read(Faulty(), name="numbers").collect()

    with pytest.raises(ZeroDivisionError, match="operator 'numbers' failed") as caught:
        cluster.run(flow)
    assert where in caught.value.__notes__[0]
