"""Records for which a function raises: the run fails, they are skipped, or diverted."""

from __future__ import annotations

import numpy as np
import pytest

from timelyml import Dataflow
from timelyml.errors import ConfigError
from timelyml.operators import FailedRecord


def invert(n):
    return 60 // n


def spread(flow, records):
    return flow.source(records).exchange(lambda record: record)


def test_a_failure_fails_the_run_by_default(cluster):
    flow = Dataflow()
    spread(flow, [3, 0]).map(invert).collect()

    with pytest.raises(ZeroDivisionError, match="'map' failed"):
        cluster.run(flow)


@pytest.mark.parametrize("method", ["map", "flat_map", "filter"])
def test_skipped_records_are_left_out(cluster, method):
    functions = {
        "map": invert,
        "flat_map": lambda n: [invert(n)],
        "filter": lambda n: invert(n) > 9,
    }
    flow = Dataflow()
    stream = spread(flow, [1, 0, 4, 20, 0])
    getattr(stream, method)(functions[method], on_error="skip").collect()

    expected = {"map": [60, 15, 3], "flat_map": [60, 15, 3], "filter": [1, 4]}
    assert sorted(cluster.run(flow)["out"]) == sorted(expected[method])


def test_diverted_records_come_with_what_went_wrong(cluster):
    flow = Dataflow(num_shards=2)
    results, failed = spread(flow, [2, 0, 3]).map(
        invert, on_error="divert", name="invert"
    )
    results.collect()
    failed.collect("failed")

    found = cluster.run(flow)
    assert sorted(found["out"]) == [20, 30]
    (failure,) = found["failed"]
    assert isinstance(failure, FailedRecord)
    assert (failure.record, failure.error_type) == (0, "ZeroDivisionError")
    assert "division" in failure.message
    assert "return 60 // n" in failure.traceback_text
    assert failure.operator == "invert"


class MuteError(Exception):
    def __str__(self):
        raise LookupError("no words")


def test_a_failure_that_cannot_say_what_it_is_is_diverted_all_the_same(cluster):
    def fail(x):
        raise MuteError

    flow = Dataflow()
    results = flow.source([1]).map(fail, on_error="divert")
    results.results.collect("good")
    results.failed.collect("bad")
    (failed,) = cluster.run(flow)["bad"]
    assert (failed.record, failed.error_type) == (1, "MuteError")
    assert failed.message == "(its __str__ raised LookupError)"


def test_diverted_records_keep_their_times(cluster):
    flow = Dataflow(num_shards=1)
    numbers = flow.source([0, 5, 0, 7, 0], batch_size=2, epoch_every=1)
    results, failed = numbers.map(invert, on_error="divert")
    results.count().collect("good")
    failed.count().collect("bad")

    found = cluster.run(flow)
    assert found.batches("good") == [(0, [1]), (1, [1])]
    assert found.batches("bad") == [(0, [1]), (1, [1]), (2, [1])]


def test_what_a_generator_yielded_before_it_failed_is_sent(cluster):
    def count_down(n):
        yield n
        yield 10 // (n - 2)

    flow = Dataflow()
    results, failed = flow.source([3, 2, 4]).flat_map(count_down, on_error="divert")
    results.collect()
    failed.map(lambda f: f.record).collect("failed")

    found = cluster.run(flow)
    assert found["out"] == [3, 10, 2, 4, 5]
    assert found["failed"] == [2]


def test_a_block_that_fails_is_diverted_whole(cluster):
    def halves(block):
        if block.max() > 5:
            raise ValueError("too large")
        return block / 2

    flow = Dataflow(num_shards=1)
    rows = flow.source(np.arange(9), batch_size=3)
    results, failed = rows.map_batch(halves, on_error="divert")
    results.collect()
    failed.map(lambda f: (f.record.tolist(), f.message)).collect("failed")

    found = cluster.run(flow)
    assert [float(x) for x in found["out"]] == [0, 0.5, 1, 1.5, 2, 2.5]
    assert found["failed"] == [([6, 7, 8], "too large")]


def test_a_predicate_that_fails_on_rows_diverts_them(cluster):
    flow = Dataflow(num_shards=1)
    rows = flow.source({"x": np.array([4, 0, 9]), "y": np.arange(3)})
    kept, failed = rows.filter(lambda row: 9 % int(row["x"]) == 0, on_error="divert")
    kept.collect()
    failed.map(lambda f: int(f.record["y"])).collect("failed")

    found = cluster.run(flow)
    assert [int(row["x"]) for row in found["out"]] == [9]
    assert found["failed"] == [1]


def test_a_filter_by_block_keeps_columns(cluster):
    flow = Dataflow()
    rows = flow.source({"x": np.arange(20), "y": np.arange(20.0)})
    rows.filter(lambda block: block["x"] % 6 == 0, by_batch=True).collect()

    payloads = [payload for _, payload in cluster.run(flow).batches("out")]
    assert np.concatenate([p["x"] for p in payloads]).tolist() == [0, 6, 12, 18]
    assert np.concatenate([p["y"] for p in payloads]).tolist() == [0, 6, 12, 18]


def test_a_block_predicate_must_give_one_boolean_per_row(cluster):
    flow = Dataflow()
    flow.source(np.arange(4)).filter(lambda block: block, by_batch=True).collect()

    with pytest.raises(Exception, match="needs one boolean for each row; got shape"):
        cluster.run(flow)


def test_an_unknown_way_is_refused():
    with pytest.raises(ConfigError, match="'on_error' out of range; got 'ignore'"):
        Dataflow().source([1]).map(abs, on_error="ignore")
