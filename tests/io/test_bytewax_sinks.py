"""Sinks in the shape of Bytewax's: routed, closed, resumed, and refused when wrong."""

from __future__ import annotations

import pytest

from tests.io.connectors import Lines, Notes, Numbers, OnePerShard
from tests.io.world import Interrupted
from timelyml import Dataflow
from timelyml.errors import GraphError, PayloadError

bytewax = pytest.importorskip("bytewax", reason="no wheels for this Python")

WORDS = [f"word{n}" for n in range(60)]


def paired(stream):
    return stream.map(lambda word: (word, word))


def test_every_value_is_written_once_into_the_partition_of_its_key(cluster, tmp_path):
    sink = Lines(tmp_path, 5, notes=Notes(tmp_path.parent / f"{tmp_path.name}-notes"))
    flow = Dataflow(num_shards=3)
    paired(flow.source(WORDS, batch_size=7)).write(sink)

    cluster.run(flow)

    for index, part in enumerate(sink.list_parts()):
        written = (tmp_path / part).read_text().split()
        assert sorted(written) == sorted(
            w for w in WORDS if sink.part_fn(w) % 5 == index
        )
    assert sorted(sink.notes.lines) == [f"closed part-{index}" for index in range(5)]


def test_the_files_and_the_console_of_bytewax_are_written(cluster, tmp_path, capfd):
    from bytewax.connectors.files import DirSink, FileSink
    from bytewax.connectors.stdio import StdOutSink

    (tmp_path / "parts").mkdir()
    flow = Dataflow(num_shards=2)
    words = flow.source(WORDS)
    paired(words).write(DirSink(tmp_path / "parts", 3))
    paired(words).write(FileSink(tmp_path / "words"))
    words.write(StdOutSink())

    cluster.run(flow)

    parts = " ".join(path.read_text() for path in (tmp_path / "parts").iterdir())
    assert sorted(parts.split()) == sorted(WORDS)
    assert (tmp_path / "words").read_text().split() == WORDS
    if cluster.mode != "processes":  # theirs is that of the whole session
        assert capfd.readouterr().out.split() == WORDS


def test_a_dynamic_sink_is_built_once_for_each_shard_and_closed_at_the_end(
    cluster, tmp_path
):
    notes = Notes(tmp_path / "notes")
    flow = Dataflow(num_shards=3)
    spread = flow.source(range(6)).exchange(lambda n: n)
    spread.write(OnePerShard(notes))

    cluster.run(flow)

    expected = [f"{n % 3} of 3 got {n}" for n in range(6)] + 3 * ["closed"]
    assert sorted(notes.lines) == sorted(expected)


def test_whole_epochs_are_written_in_order_and_each_as_one(cluster, tmp_path):
    class Epochs(OnePerShard):
        def build(self, *built):
            partition = super().build(*built)
            partition.write_batch = lambda items: self.notes.add(",".join(items))
            return partition

    notes = Notes(tmp_path / "notes")
    flow = Dataflow(num_shards=2)
    read = flow.read(Numbers({"a": 12, "b": 12}, batch_size=1), epoch_every=4)
    read.gather(num_shards=1).write(Epochs(notes), whole_epochs=True)

    cluster.run(flow)

    epochs = [
        sorted(f"{part}:{n}" for part in "ab" for n in range(start, start + 4))
        for start in (0, 4, 8)
    ]
    written = [sorted(line.split(",")) for line in notes.lines if line != "closed"]
    records = [record for batch in written for record in batch]
    assert [sorted(records[8 * e : 8 * e + 8]) for e in range(3)] == epochs


def test_partitions_are_not_closed_when_the_run_fails(cluster, tmp_path):
    class Full(Lines):
        def build_part(self, step_id, for_part, resume_state):
            partition = super().build_part(step_id, for_part, resume_state)
            partition.write_batch = lambda values: 1 // 0
            return partition

    notes = Notes(tmp_path / "notes")
    (tmp_path / "parts").mkdir()
    flow = Dataflow(num_shards=1)
    paired(flow.source(WORDS)).write(Full(tmp_path / "parts", 1, notes=notes), name="w")

    with pytest.raises(ZeroDivisionError, match="operator 'w' failed") as caught:
        cluster.run(flow)
    assert "while partition 'part-0' of 'w' was written" in caught.value.__notes__[0]
    assert notes.lines == []


def test_a_resumed_sink_cuts_off_what_was_written_after_the_state_was_taken(tmp_path):
    sink = Lines(tmp_path, 3)

    def flow(source):
        made = Dataflow(num_shards=2)
        paired(source(made)).write(sink, name="lines")
        return made

    first, second = Interrupted(2), Interrupted(2)
    numbers = Numbers({"a": 300, "b": 300})
    reads = flow(lambda made: made.read(numbers, epoch_every=1))
    first.begin(reads, max_epochs_ahead=2)
    first.step_until(lambda: len(sink.written()) > 100)
    states, at_export = first.export("lines"), sink.written()
    first.step_until(lambda: len(sink.written()) > len(at_export) + 100)

    second.begin(flow(lambda made: made.input()), states)
    second.step(5)

    assert sink.written() == at_export


@pytest.mark.parametrize(
    ("value", "got"), [("path", "str"), (Lines, "the class Lines"), (print, "builtin")]
)
def test_what_is_no_sink_is_refused_when_the_flow_is_made(value, got):
    with pytest.raises(GraphError, match=rf"'write' needs a sink; got {got}"):
        Dataflow().source([1]).write(value)


def test_a_source_is_no_sink(tmp_path):
    from bytewax.connectors.files import DirSource

    with pytest.raises(GraphError, match="'write' needs a sink; got DirSource"):
        Dataflow().source([1]).write(DirSource(tmp_path))


def test_a_sink_without_partitions_is_refused_when_the_flow_is_made(tmp_path):
    with pytest.raises(GraphError, match="sink 'write' lists no partitions; got Lines"):
        Dataflow().source([1]).write(Lines(tmp_path, 0))


@pytest.mark.parametrize("record", ["word", ("word",), (1, "word"), ["key", "word"]])
def test_a_record_without_a_key_is_an_error_that_names_the_sink(
    cluster, tmp_path, record
):
    flow = Dataflow()
    flow.source([record]).write(Lines(tmp_path, 2), name="lines")

    with pytest.raises(PayloadError, match="sink 'lines' cannot place a record"):
        cluster.run(flow)


def test_a_partition_that_a_worker_does_not_see_is_an_error_that_names_it(
    cluster, tmp_path
):
    class Local(Lines):
        """Shows its partitions to whoever asks first."""

        def list_parts(self):
            self.num_parts, listed = 1, super().list_parts()
            return listed

    flow = Dataflow(num_shards=2)
    sink = Local(tmp_path, 2)
    flow.source([("k", 1)]).write(sink, name="lines")

    with pytest.raises(GraphError, match="sink 'lines' lacks partition 'part-1'"):
        cluster.run(flow)
