"""Operators on single records and on whole blocks."""

from __future__ import annotations

import itertools
import queue
from collections import Counter
from functools import partial

import numpy as np
import pytest

from timelyml import Dataflow
from timelyml.errors import GraphError, OperatorError

WORDS = ["to be or", "not to be", "", "that is the question"]


def spread(flow, records):
    """A stream whose records are on all shards."""
    return flow.source(records).exchange(lambda record: record)


def test_map_applies_the_function_to_each_record_once(cluster):
    flow = Dataflow()
    spread(flow, range(100)).map(lambda x: 3 * x).collect()

    assert sorted(cluster.run(flow)["out"]) == [3 * x for x in range(100)]


def test_map_keeps_the_order_of_its_records(cluster):
    flow = Dataflow()
    flow.source(range(5000)).map(str).collect()

    assert cluster.run(flow)["out"] == [str(x) for x in range(5000)]


def test_map_gives_the_function_one_row_of_columns_at_a_time(cluster):
    columns = {"x": np.arange(6), "y": np.arange(6.0) / 2}
    flow = Dataflow()
    flow.source(columns).map(lambda row: (int(row["x"]), float(row["y"]))).collect()

    assert cluster.run(flow)["out"] == [(x, x / 2) for x in range(6)]


def test_map_of_rows_gives_a_list():
    flow = Dataflow()
    flow.source(np.arange(3)).map(lambda x: x).collect()

    ((_, payload),) = flow.run().batches("out")
    assert isinstance(payload, list)


def test_map_batch_gets_whole_blocks_and_keeps_columns(cluster):
    rows = np.arange(24.0).reshape(12, 2)
    flow = Dataflow()
    flow.source(rows).map_batch(lambda block: {"sum": block.sum(axis=1)}).collect()

    payloads = [payload for _, payload in cluster.run(flow).batches("out")]
    found = np.concatenate([payload["sum"] for payload in payloads])
    assert np.array_equal(found, rows.sum(axis=1))


def test_map_batch_may_change_the_number_of_records(cluster):
    flow = Dataflow()
    flow.source(np.arange(10)).map_batch(lambda block: block[block % 3 == 0]).collect()

    assert [int(x) for x in cluster.run(flow)["out"]] == [0, 3, 6, 9]


def test_map_batch_cannot_write_to_what_it_was_given(cluster):
    def add_one(block):
        block += 1
        return block

    flow = Dataflow()
    flow.source(np.zeros(4)).map_batch(add_one).collect()

    with pytest.raises(OperatorError, match="read-only"):
        cluster.run(flow)


def test_flat_map_sends_everything_that_is_yielded(cluster):
    flow = Dataflow()
    spread(flow, WORDS).flat_map(str.split).collect()

    expected = Counter(word for line in WORDS for word in line.split())
    assert Counter(cluster.run(flow)["out"]) == expected


def test_flat_map_takes_generators_of_any_length(cluster):
    def count_to(n):
        yield from range(n)

    flow = Dataflow()
    flow.source([0, 20_000, 1]).flat_map(count_to).collect()

    assert cluster.run(flow)["out"] == [*range(20_000), 0]


def test_an_endless_generator_keeps_neither_results_nor_others_back(cluster):
    def tell(shard, delivery):
        if "first" not in shard.state:
            shard.state["first"] = shard.emit("first", list(delivery.payload[:3]))

    told = queue.Queue()
    flow = Dataflow(num_shards=1)
    flow.source([0]).flat_map(lambda _: itertools.count()).sink(tell)
    flow.source(range(1000), batch_size=10, epoch_every=1).map(str).probe("others")

    run = cluster.start(flow, on_message=lambda *message: told.put(message[-1]))
    assert told.get(timeout=10) == [0, 1, 2]
    run.probe("others").wait_until(999, timeout_s=10)
    run.cancel()


def test_filter_keeps_what_the_predicate_accepts(cluster):
    flow = Dataflow()
    spread(flow, range(50)).filter(lambda x: x % 7 == 0).collect()

    assert sorted(cluster.run(flow)["out"]) == list(range(0, 50, 7))


def test_filter_keeps_columns(cluster):
    columns = (np.arange(10), np.arange(10) * 2.5)
    flow = Dataflow()
    flow.source(columns).filter(lambda row: row[0] % 4 == 0).collect()

    batches = [payload for _, payload in cluster.run(flow).batches("out")]
    assert all(isinstance(column, np.ndarray) for pair in batches for column in pair)
    assert np.concatenate([left for left, _ in batches]).tolist() == [0, 4, 8]
    assert np.concatenate([right for _, right in batches]).tolist() == [0, 10, 20]


def test_an_epoch_that_a_filter_empties_before_an_exchange_still_completes(cluster):
    flow = Dataflow()
    kept = flow.source(range(40), batch_size=10, epoch_every=1).filter(lambda x: x > 35)
    kept.exchange(lambda x: x).fold(0, lambda n, _: n + 1).collect()

    result = cluster.run(flow)
    assert {time for time, _ in result.batches("out")} == {3}
    assert sum(result["out"]) == 4


def test_inspect_sees_every_record_and_changes_nothing(cluster, tmp_path):
    seen = tmp_path / "seen"

    def note(record):
        with seen.open("a") as file:
            file.write(f"{record}\n")

    flow = Dataflow()
    spread(flow, range(20)).inspect(note).collect()

    result = cluster.run(flow)
    assert sorted(result["out"]) == list(range(20))
    assert sorted(map(int, seen.read_text().split())) == list(range(20))


def test_inspect_prints_operator_time_and_record_by_default(capsys):
    flow = Dataflow()
    flow.source(["a", "b"], batch_size=1, epoch_every=1).inspect(name="look")

    flow.run()

    assert capsys.readouterr().out == "look 0: 'a'\nlook 1: 'b'\n"


def test_inspect_batch_sees_times_and_payloads(capsys):
    flow = Dataflow()
    stream = flow.source(np.arange(3), batch_size=2, epoch_every=1)
    stream.inspect_batch(lambda time, payload: print(time, payload.tolist()))

    flow.run()

    assert capsys.readouterr().out == "0 [0, 1]\n1 [2]\n"


@pytest.mark.parametrize(
    "method", ["map", "map_batch", "flat_map", "filter", "inspect"]
)
def test_what_cannot_be_called_is_refused_by_the_call_that_takes_it(method):
    stream = Dataflow().source([1])

    with pytest.raises(GraphError, match=f"'{method}' needs a function for .*; got 3;"):
        getattr(stream, method)(3)


async def waits(record):
    return record


async def streams(record):
    yield record


def yields(record):
    yield record


class Waiting:
    async def __call__(self, record):
        return record


@pytest.mark.parametrize("method", ["map", "map_batch", "filter", "inspect", "branch"])
@pytest.mark.parametrize("fn", [waits, streams, yields, Waiting(), partial(waits, 1)])
def test_a_function_that_only_begins_when_it_is_called_is_refused(method, fn):
    """As a predicate it would be true of everything; elsewhere it would do nothing."""
    stream = Dataflow().source([1])

    rule = "one that returns; yield in" if fn is yields else "one without async; await"
    with pytest.raises(GraphError, match=f"'{method}' needs .* expected {rule}"):
        getattr(stream, method)(fn)


def test_a_failing_function_is_reported_with_its_operator_and_line(cluster):
    flow = Dataflow()
    flow.source([1, 0]).map(lambda x: 1 // x, name="invert").collect()

    with pytest.raises(OperatorError, match="invert") as caught:
        cluster.run(flow)
    assert isinstance(caught.value, ZeroDivisionError)
    assert "1 // x" in caught.value.traceback_text
