"""Streams from iterables, arrays and functions."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operators.fakes import FakeShard, logic_of
from timelyml import Cluster, Custom, Dataflow
from timelyml.errors import (
    ConfigError,
    GraphError,
    OperatorError,
    PayloadError,
    ShippingError,
)
from timelyml.operators import readers


def test_an_iterable_is_read_in_order_on_shard_0(cluster):
    flow = Dataflow(num_shards=3)

    def tag(shard, delivery):
        shard.output().send(delivery.time, [(shard.index, r) for r in delivery.payload])

    flow.source(range(3000)).unary(tag).collect()

    assert cluster.run(flow)["out"] == [(0, n) for n in range(3000)]


def test_all_of_an_iterable_is_one_epoch_by_default(cluster):
    flow = Dataflow()
    flow.source(range(5000)).count().collect()

    assert cluster.run(flow).batches("out") == [(0, [5000])]


def test_epoch_every_counts_batches(cluster):
    flow = Dataflow()
    flow.source(range(25), batch_size=4, epoch_every=2).count().collect()

    assert cluster.run(flow).batches("out") == [(0, [8]), (1, [8]), (2, [8]), (3, [1])]


def test_an_empty_iterable_is_an_empty_stream(cluster):
    flow = Dataflow()
    flow.source([]).count().collect()

    assert cluster.run(flow)["out"] == []


class Squares:
    """An iterable that is read anew each time."""

    def __iter__(self):
        return (n * n for n in itertools.count())


def test_an_endless_iterable_is_read_one_batch_per_activation():
    stream = Dataflow().source(Squares(), batch_size=3, epoch_every=1)
    shard = FakeShard()
    logic = logic_of(stream)
    logic.on_start(shard)

    assert shard.turn(logic) == [(0, [0, 1, 4], True)]
    assert shard.turn(logic) == [(1, [9, 16, 25], True)]


def test_a_source_waits_for_epoch_credit_and_holds_no_older_epoch():
    stream = Dataflow().source(Squares(), batch_size=1, epoch_every=1)
    shard = FakeShard(last_epoch=1)
    logic = logic_of(stream)
    logic.on_start(shard)
    for _ in range(5):
        shard.turn(logic)

    assert [time for time, _, _ in shard.sent] == [0, 1]
    assert shard.held() == [2]

    shard.last_epoch = 2
    assert shard.turn(logic) == [(2, [4], True)]


def test_the_epoch_credit_of_a_run_bounds_a_source(cluster):
    flow = Dataflow(num_shards=1)
    gate = flow.input("gate", num_shards=1)
    fast = flow.source(Squares(), batch_size=1, epoch_every=1).probe("read")
    fast.concat(gate).count().collect()

    run = cluster.start(flow, max_epochs_ahead=4)
    run.probe("read").wait_until(3, timeout_s=10)
    assert run.probe("read").frontier == (4,)
    run.input("gate").advance_to(10)
    run.probe("read").wait_until(13, timeout_s=10)
    assert run.probe("read").frontier == (14,)
    run.stop(timeout_s=10)  # closes the gate; the source is told a moment later
    batches = run.result().batches("out")
    assert len(batches) >= 14
    assert batches == [(n, [1]) for n in range(len(batches))]


@pytest.mark.parametrize("kind", ["source", "read"])
def test_a_source_opens_many_epochs_in_one_step(kind):
    flow = Dataflow()
    if kind == "source":
        numbers = flow.source(range(200), batch_size=1, epoch_every=1, name="in")
    else:
        numbers = flow.read(Numbers(200), epoch_every=1, name="in")
    numbers.map(lambda n: n + 1, name="next").collect()
    with Cluster(1, mode="inline") as cluster, cluster.start(flow.build()) as run:
        assert run.result(60)["out"] == list(range(1, 201))
        metrics = run.metrics()

    operators = metrics["operators"]
    assert operators["next"]["batches_in"] == 200
    assert operators["in"]["activations"] < 50  # at least 32 epochs in most of them
    changes = metrics["progress"]["changes"]
    assert changes < 200  # the right to send each epoch is not counted one by one


class Numbers:
    """A source in the shape of Bytewax's: one partition of single numbers."""

    def __init__(self, stop):
        self.stop = stop

    def list_parts(self):
        return ["all"]

    def build_part(self, step_id, part, state):
        return NumbersPartition(self.stop)


class NumbersPartition:
    def __init__(self, stop):
        self.numbers = iter(range(stop))

    def next_batch(self):
        return [next(self.numbers)]


def test_stop_ends_an_endless_source(cluster):
    flow = Dataflow()
    flow.source(Squares(), batch_size=2, epoch_every=1).probe("read").collect()

    run = cluster.start(flow)
    run.probe("read").wait_until(2, timeout_s=10)
    run.stop(timeout_s=10)

    found = run.result()["out"]
    assert found == [n * n for n in range(len(found))]
    assert len(found) >= 6


def endless_run(cluster):
    """A run of a regular source, which has come to epoch 5."""

    def endless(shard, num_shards):
        return ([shard] for _ in itertools.count())

    flow = Dataflow(num_shards=3)
    share = flow.source(endless, regular=True)
    share.exchange(lambda n: n, dense=True).count().probe("read").collect()

    run = cluster.start(flow)
    run.probe("read").wait_until(5, timeout_s=10)
    return run


def test_stop_ends_a_regular_source_at_the_same_epoch_on_every_shard(cluster):
    run = endless_run(cluster)
    run.stop(timeout_s=10)

    batches = run.result().batches("out")
    last = max(epoch for epoch, _ in batches)
    assert batches == [(epoch, [1]) for epoch in range(last + 1) for _ in range(3)]


def test_stops_asked_for_by_many_threads_are_one_stop(cluster):
    run = endless_run(cluster)
    stops = [threading.Thread(target=run.stop, args=(True, 10)) for _ in range(4)]
    for stop in stops:
        stop.start()
    for _ in range(20):
        run.request_stop()
    for stop in stops:
        stop.join()

    batches = run.result().batches("out")
    last = max(epoch for epoch, _ in batches)
    assert batches == [(epoch, [1]) for epoch in range(last + 1) for _ in range(3)]


def test_records_that_come_slowly_are_sent_before_the_batch_is_full():
    stream = Dataflow().source(range(100), batch_size=90)
    shard = FakeShard(tick_s=readers.MAX_DELAY_S / 2)
    logic = logic_of(stream)
    logic.on_start(shard)

    ((_, first, is_last),) = shard.turn(logic)
    assert 0 < len(first) < 90
    assert not is_last
    assert [n for _, part, _ in shard.drain(logic) for n in part] == list(range(100))


def test_epochs_do_not_depend_on_how_fast_records_come(monkeypatch):
    monkeypatch.setattr(readers, "MAX_DELAY_S", 0.0)
    monkeypatch.setattr(readers, "RECORDS_PER_LOOK", 3)
    stream = Dataflow().source(range(50), batch_size=10, epoch_every=2)
    shard = FakeShard()
    logic = logic_of(stream)
    logic.on_start(shard)

    epochs = Counter()
    for time, part, _ in shard.drain(logic):
        epochs[time] += len(part)
    assert epochs == {0: 20, 1: 20, 2: 10}


@pytest.mark.parametrize("num_shards", [1, 3, 7])
def test_shards_share_the_rows_of_arrays_in_contiguous_ranges(cluster, num_shards):
    columns = {"x": np.arange(20), "y": np.arange(40.0).reshape(20, 2)}
    flow = Dataflow(num_shards=num_shards)
    flow.source(columns, batch_size=4).collect()

    batches = [payload for _, payload in cluster.run(flow).batches("out")]
    for name, column in columns.items():
        found = np.concatenate([batch[name] for batch in batches])
        assert np.array_equal(found, column)
        assert found.dtype == column.dtype


def test_every_shard_has_its_own_batches_in_the_epochs_of_arrays(cluster):
    flow = Dataflow(num_shards=2)
    flow.source(np.arange(10), batch_size=2, epoch_every=1).collect()

    found = {}
    for time, payload in cluster.run(flow).batches("out"):
        found.setdefault(time, []).extend(payload.tolist())
    assert found == {0: [0, 1, 5, 6], 1: [2, 3, 7, 8], 2: [4, 9]}


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 30),
    num_shards=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    epoch_every=st.integers(1, 3),
)
def test_every_shard_of_arrays_sends_one_block_per_epoch(
    rows, num_shards, batch_size, epoch_every
):
    stream = Dataflow(num_shards=num_shards).source(
        np.arange(rows), batch_size=batch_size, epoch_every=epoch_every, regular=True
    )
    logic = logic_of(stream)
    ends, found = [], []
    for index in range(num_shards):
        shard = FakeShard(index, num_shards)
        logic.on_start(shard)
        sent = shard.drain(logic)
        ends.append([time for time, _, is_last in sent if is_last])
        assert all(len(part) <= batch_size for _, part, _ in sent)
        found += [int(n) for _, part, _ in sent for n in part]
    assert found == list(range(rows))
    assert ends == [list(range(len(ends[0])))] * num_shards


def test_large_arrays_are_cut_into_batches_by_size():
    stream = Dataflow(num_shards=1).source(np.zeros((64, 1 << 20), np.uint8))
    shard = FakeShard()
    logic = logic_of(stream)
    logic.on_start(shard)

    assert [len(part) for _, part, _ in shard.drain(logic)] == [4] * 16


def test_arrays_that_do_not_fit_are_refused_at_the_call():
    with pytest.raises(PayloadError, match="differ in length"):
        Dataflow().source({"x": np.zeros(2), "y": np.zeros(3)})


def test_a_tuple_of_arrays_is_columns_and_another_tuple_is_records():
    flow = Dataflow()
    flow.source((np.arange(2), np.arange(2))).map(len).collect("rows")
    flow.source((1, 2, 3)).collect("items")

    result = flow.run()
    assert (result["rows"], result["items"]) == ([2, 2], [1, 2, 3])


def test_a_function_gives_each_shard_its_own_payloads_one_epoch_each(cluster):
    def share(shard, num_shards):
        for epoch in range(3):
            yield [(epoch, shard, num_shards)]

    flow = Dataflow(num_shards=4)
    flow.source(share).collect()

    expected = [(e, [(e, s, 4)]) for e in range(3) for s in range(4)]
    assert cluster.run(flow).batches("out") == expected


def test_a_function_may_say_which_epoch_it_is(cluster):
    def share(shard, num_shards):
        yield 2, ["a"]
        yield 2, ["b"]
        yield 5, np.arange(2)
        yield ["c"]

    flow = Dataflow(num_shards=1)
    flow.source(share).map(str).collect()

    found = cluster.run(flow).batches("out")
    assert found == [(2, ["a"]), (2, ["b"]), (5, ["0", "1"]), (5, ["c"])]


def test_a_pair_of_columns_is_not_taken_for_a_time(cluster):
    flow = Dataflow(num_shards=1)
    flow.source(lambda *_: [(np.arange(2), np.arange(2) * 2)]).map(
        lambda row: (int(row[0]), int(row[1]))
    ).collect()

    assert cluster.run(flow)["out"] == [(0, 0), (1, 2)]


def test_epochs_of_a_function_cannot_go_back(cluster):
    flow = Dataflow(num_shards=1)
    flow.source(lambda *_: [(3, ["x"]), (2, ["y"])], name="clock").collect()

    with pytest.raises(
        OperatorError, match="'clock' cannot move backwards; got epoch 2"
    ):
        cluster.run(flow)


def test_an_epoch_of_its_own_ends_when_a_later_one_comes():
    def share(shard, num_shards):
        yield 1, ["a"]
        yield None
        yield 4, []

    shard = FakeShard()
    logic = logic_of(Dataflow().source(share))
    logic.on_start(shard)
    shard.turn(logic)
    assert shard.held() == [1]
    assert shard.turn(logic) == []
    assert (shard.held(), len(shard.delays)) == ([1], 1)
    shard.turn(logic)
    assert shard.held() == [4]
    shard.drain(logic)


def test_none_means_nothing_yet(cluster):
    def share(shard, num_shards):
        for n in range(6):
            yield None if n % 2 else [n]

    flow = Dataflow(num_shards=2)
    flow.source(share).collect()

    expected = [(epoch, [2 * epoch]) for epoch in range(3) for _ in range(2)]
    assert cluster.run(flow).batches("out") == expected


def test_batch_size_cuts_what_a_function_gives_without_ending_its_epoch():
    shard = FakeShard()
    stream = Dataflow().source(lambda *_: [np.arange(5), []], batch_size=2)
    logic = logic_of(stream)
    logic.on_start(shard)

    found = [(time, list(part), last) for time, part, last in shard.drain(logic)]
    assert found == [
        (0, [0, 1], False),
        (0, [2, 3], False),
        (0, [4], True),
        (1, [], True),
    ]


def test_a_regular_function_may_feed_a_dense_edge(cluster):
    def share(shard, num_shards):
        for epoch in range(4):
            yield [shard] * (epoch if shard else 0)

    flow = Dataflow(num_shards=3)
    rows = flow.source(share, regular=True).exchange(lambda n: n, dense=True)
    rows.count().collect()

    found = cluster.run(flow).batches("out")
    assert found == [(epoch, [epoch]) for epoch in (1, 2, 3) for _ in (1, 2)]


def test_a_function_that_fails_fails_the_run_with_its_own_error(cluster):
    def share(shard, num_shards):
        yield [1]
        raise LookupError("no more pages")

    flow = Dataflow()
    flow.source(share, name="pages").collect()

    with pytest.raises(LookupError, match="no more pages"):
        cluster.run(flow)


def test_a_function_that_gives_nothing_to_read_is_reported(cluster):
    flow = Dataflow()
    flow.source(lambda shard, num_shards: None, name="pages").collect()

    with pytest.raises(OperatorError, match=r"'pages' has nothing to read on shard \d"):
        cluster.run(flow)


def test_a_generator_is_closed_when_its_source_is_stopped(tmp_path):
    closed = tmp_path / "closed"

    def share(shard, num_shards):
        try:
            for n in itertools.count():
                yield [n]
        finally:
            closed.touch()

    shard = FakeShard()
    logic = logic_of(Dataflow().source(share))
    logic.on_start(shard)
    shard.turn(logic)
    logic.on_message(shard, ("stop", None))

    assert closed.exists()
    assert shard.held() == []
    assert shard.turn(logic) == []


def test_shards_of_a_source_stand_where_their_placement_says(cluster):
    flow = Dataflow(num_shards=8)
    workers = [shard % cluster.num_workers for shard in (0, 0, 0, 1, 1, 1, 1, 0)]
    placed = flow.source(lambda *_: [["x"]], placement=Custom(tuple(workers)))

    def where(shard, delivery):
        shard.output().send(delivery.time, [(shard.index, shard.worker_index)])

    placed.unary(where, placement=Custom(tuple(workers))).collect()

    assert cluster.run(flow)["out"] == list(enumerate(workers))


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (range(23), {"batch_size": 3, "epoch_every": 2}),
        (np.arange(23), {"batch_size": 3, "epoch_every": 2}),
        (lambda *_: [[n, n + 1] for n in range(9)], {}),
        (lambda *_: [(n // 2, [n]) for n in range(9)], {}),
    ],
    ids=["iterable", "arrays", "function", "timed function"],
)
@pytest.mark.parametrize("num_turns", [0, 1, 4, 6])
def test_a_pickled_position_reads_on_where_it_stopped(data, options, num_turns):
    logic = logic_of(Dataflow().source(data, **options))
    whole = FakeShard()
    logic.on_start(whole)
    whole.drain(logic)

    first = FakeShard()
    logic.on_start(first)
    for _ in range(num_turns):
        first.turn(logic)
    second = FakeShard()
    second.state["cursor"] = pickle.loads(pickle.dumps(first.state["cursor"]))
    logic.on_start(second)
    second.drain(logic)

    assert plain(first.sent + second.sent) == plain(whole.sent)


def plain(sent):
    return [(time, list(part), is_last) for time, part, is_last in sent]


@pytest.mark.parametrize(
    ("data", "what"),
    [("text", "str"), (b"text", "bytes"), (iter([1]), "list_iterator"), (7, "int")],
)
def test_what_cannot_be_read_is_refused_at_the_call(data, what):
    with pytest.raises(GraphError, match=f"cannot read what it was given; got {what};"):
        Dataflow().source(data)


def test_a_function_of_other_arguments_is_refused_at_the_call():
    with pytest.raises(
        GraphError, match=r"expected one of \(shard_index, num_shards\)"
    ):
        Dataflow().source(lambda: [[1]])


@pytest.mark.parametrize("option", ["batch_size", "epoch_every"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_sizes_must_be_positive_integers(option, value):
    with pytest.raises(ConfigError, match=f"{option!r} out of range"):
        Dataflow().source([1], **{"batch_size": 1, option: value})


def test_epochs_of_no_known_size_are_refused():
    with pytest.raises(ConfigError, match="epochs of no known size"):
        Dataflow().source([1], epoch_every=2)


def test_epoch_every_is_refused_for_a_function():
    with pytest.raises(ConfigError, match="two rules for epochs"):
        Dataflow().source(lambda *_: [], batch_size=1, epoch_every=1)


def test_an_iterable_cannot_be_regular():
    with pytest.raises(ConfigError, match="cannot be regular"):
        Dataflow().source([1], regular=True)


def test_what_cannot_be_shipped_is_refused_with_the_name_of_the_source(cluster):
    lock = __import__("threading").Lock()
    flow = Dataflow()
    flow.source(lambda *_: [[lock]], name="locked").collect()

    with pytest.raises(ShippingError, match="locked"):
        cluster.run(flow)
