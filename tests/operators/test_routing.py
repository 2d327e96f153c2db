"""Moving records between shards, and joining and parting streams."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from timelyml import PER_WORKER, Dataflow, Pipeline
from timelyml.errors import GraphError, OperatorError
from timelyml.exchange import stable_hash

WORDS = [f"word-{n % 17}" for n in range(200)]


def at_shard(shard, delivery):
    """Send each record on with the shard that it is on."""
    records = [(shard.index, record) for record in delivery.payload]
    shard.output().send(delivery.time, records)


def test_integers_go_to_the_shard_of_their_remainder(cluster):
    flow = Dataflow(num_shards=5)
    flow.source(range(60)).exchange(lambda n: n).unary(at_shard).collect()

    assert sorted(cluster.run(flow)["out"]) == sorted((n % 5, n) for n in range(60))


def test_equal_keys_meet_whatever_shard_they_come_from(cluster):
    flow = Dataflow(num_shards=4)
    spread = flow.source(list(enumerate(WORDS))).exchange(lambda pair: pair[0])
    spread.map(lambda pair: pair[1]).exchange(lambda w: w).unary(at_shard).collect()

    shards = defaultdict(set)
    for shard, word in cluster.run(flow)["out"]:
        shards[word].add(shard)
    assert {word: {stable_hash(word) % 4} for word in WORDS} == shards


def test_equal_keys_meet_also_by_the_hashes_of_python(cluster):
    """A string hashes differently in processes that are left to themselves."""
    flow = Dataflow(num_shards=4)
    spread = flow.source(lambda shard, num_shards: [WORDS]).exchange(hash)
    spread.unary(at_shard).collect()

    shards = defaultdict(set)
    for shard, word in cluster.run(flow)["out"]:
        shards[word].add(shard)
    assert set(map(len, shards.values())) == {1}


def test_exchange_by_batch_sends_rows_where_the_array_says(cluster):
    rows = np.arange(40)
    flow = Dataflow(num_shards=3)
    spread = flow.source(rows).exchange(lambda block: (block // 2) % 3, by_batch=True)
    spread.unary(at_shard).collect()

    expected = Counter((n // 2 % 3, n) for n in range(40))
    assert Counter((s, int(n)) for s, n in cluster.run(flow)["out"]) == expected


def test_exchange_to_another_number_of_shards(cluster):
    flow = Dataflow(num_shards=2)
    wide = flow.source(range(70)).exchange(lambda n: n, num_shards=7)
    narrow = wide.unary(at_shard).exchange(lambda pair: pair[1], num_shards=3)
    narrow.unary(at_shard).collect()

    expected = sorted((n % 3, (n % 7, n)) for n in range(70))
    assert sorted(cluster.run(flow)["out"]) == expected


def test_exchange_to_one_shard_per_worker(cluster):
    flow = Dataflow(num_shards=3)
    spread = flow.source(range(30)).exchange(lambda n: n, num_shards=PER_WORKER)
    spread.unary(at_shard).collect()

    found = {shard for shard, _ in cluster.run(flow)["out"]}
    assert found == set(range(cluster.num_workers))


def test_a_destination_that_does_not_exist_is_refused(cluster):
    flow = Dataflow(num_shards=2)
    rows = flow.source(np.arange(4)).exchange(lambda block: block, by_batch=True)
    rows.collect()

    with pytest.raises(
        OperatorError, match="a row goes to a shard that does not exist"
    ):
        cluster.run(flow)


def test_two_readers_of_one_exchange_both_get_everything(cluster):
    flow = Dataflow(num_shards=3)
    routed = flow.source(range(30)).exchange(lambda n: n)
    routed.map(lambda n: ("a", n)).collect("left")
    routed.map(lambda n: ("b", n)).collect("right")

    result = cluster.run(flow)
    assert sorted(result["left"]) == [("a", n) for n in range(30)]
    assert sorted(result["right"]) == [("b", n) for n in range(30)]


def test_broadcast_reaches_every_shard_once(cluster):
    flow = Dataflow(num_shards=5)
    flow.source(["x", "y"]).broadcast().unary(at_shard).collect()

    expected = Counter((shard, word) for shard in range(5) for word in "xy")
    assert Counter(cluster.run(flow)["out"]) == expected


def test_broadcast_and_then_exchange_multiplies_records(cluster):
    flow = Dataflow(num_shards=3)
    flow.source(range(4)).broadcast().exchange(lambda n: n).unary(at_shard).collect()

    expected = Counter({(n % 3, n): 3 for n in range(4)})
    assert Counter(cluster.run(flow)["out"]) == expected


def test_gather_brings_everything_to_one_shard(cluster):
    flow = Dataflow(num_shards=4)
    spread = flow.source(range(40)).exchange(lambda n: n).map(lambda n: n)
    spread.gather(shard=2).unary(at_shard).collect()

    assert sorted(cluster.run(flow)["out"]) == [(2, n) for n in range(40)]


def test_gathering_on_a_shard_that_does_not_exist_is_refused():
    flow = Dataflow(num_shards=2)

    with pytest.raises(GraphError, match="has no shard to gather"):
        flow.source([1]).gather(shard=2).collect()


def test_concat_joins_streams(cluster):
    flow = Dataflow()
    streams = [flow.source(range(10 * n, 10 * n + 10)) for n in range(3)]
    streams[0].concat(*streams[1:]).collect()

    assert sorted(cluster.run(flow)["out"]) == list(range(30))


def test_concat_of_a_stream_with_itself_doubles_it(cluster):
    flow = Dataflow()
    stream = flow.source(range(5))
    stream.concat(stream).collect()

    assert sorted(cluster.run(flow)["out"]) == sorted([*range(5)] * 2)


def test_concat_ends_a_time_only_when_all_streams_did(cluster):
    flow = Dataflow(num_shards=1)
    fast = flow.source(range(3), batch_size=1, epoch_every=1)
    slow = flow.input("slow", num_shards=1)
    fast.concat(slow).fold([], lambda seen, n: [*seen, n]).collect()

    with cluster.start(flow) as run:
        handle = run.input("slow")
        for epoch in range(3):
            assert all(time < epoch for time, _ in run.batches("out"))
            handle.send([100 + epoch])
            handle.advance_to(epoch + 1)
    found = [(time, sorted(*seen)) for time, seen in run.result().batches("out")]
    assert found == [(epoch, [epoch, 100 + epoch]) for epoch in range(3)]


def test_streams_of_another_dataflow_cannot_be_joined():
    with pytest.raises(GraphError, match="belongs to another dataflow"):
        Dataflow("a").source([1]).concat(Dataflow("b").source([2]))


def test_branch_parts_records_without_losing_any(cluster):
    flow = Dataflow()
    small, large = flow.source(range(20)).branch(lambda n: n < 7)
    small.collect("small")
    large.collect("large")

    result = cluster.run(flow)
    assert (result["small"], result["large"]) == ([*range(7)], [*range(7, 20)])


def test_branches_have_names(cluster):
    flow = Dataflow()
    branches = flow.source(np.arange(6)).branch(lambda n: n % 2)
    branches.matching.collect("odd")
    branches.rest.collect("even")

    result = cluster.run(flow)
    assert [int(n) for n in result["odd"]] == [1, 3, 5]
    assert [int(n) for n in result["even"]] == [0, 2, 4]


def test_a_branch_without_reader_holds_nobody_back(cluster):
    flow = Dataflow()
    flow.source(range(10)).branch(lambda n: n < 3).matching.count().collect()

    assert cluster.run(flow)["out"] == [3]


def test_partition_parts_records_by_index(cluster):
    flow = Dataflow()
    for index, part in enumerate(flow.source(range(9)).partition(3, lambda n: n % 3)):
        part.collect(f"part-{index}")

    result = cluster.run(flow)
    assert dict(result) == {f"part-{i}": [i, i + 3, i + 6] for i in range(3)}


def test_partition_refuses_an_index_out_of_range(cluster):
    flow = Dataflow()
    flow.source([5]).partition(3, lambda n: n, name="fan")[0].collect()

    with pytest.raises(OperatorError, match="'fan' has no such part; got 5"):
        cluster.run(flow)


def test_dense_routing_needs_a_producer_that_always_sends():
    flow = Dataflow(num_shards=2)
    flow.source(range(4)).exchange(lambda n: n, dense=True).collect()

    with pytest.raises(GraphError, match="dense"):
        flow.build()


@pytest.mark.parametrize("route", ["exchange", "broadcast", "gather"])
def test_dense_routing_completes_times_by_counting(cluster, route):
    flow = Dataflow(num_shards=3)
    rows = flow.source(np.arange(24), batch_size=2, epoch_every=1, regular=True)
    arguments = [int] if route == "exchange" else []
    dense = getattr(rows, route)(*arguments, dense=True)
    dense.fold(0, lambda total, n: total + int(n)).collect()

    copies = 3 if route == "broadcast" else 1
    totals = defaultdict(int)
    for time, (part,) in cluster.run(flow).batches("out"):
        totals[time] += part
    expected = defaultdict(int)
    for shard in range(3):
        for place in range(8):
            expected[place // 2] += copies * (8 * shard + place)
    assert totals == expected


def by_tens(shard, delivery):
    """Send each number to the shard of its tens."""
    rows = delivery.payload
    shard.output().send_rows(delivery.time, rows, np.asarray(rows) // 10)


@pytest.mark.parametrize("kind", [list, np.array])
def test_send_rows_sends_each_row_to_the_shard_named_for_it(cluster, kind):
    flow = Dataflow()
    sent = flow.source(kind([25, 3, 41, 27, 8]), num_shards=1).unary(by_tens)
    sent.direct(num_shards=5).unary(at_shard).collect()

    found = [(s, int(n)) for s, n in cluster.run(flow)["out"]]
    assert found == [(0, 3), (0, 8), (2, 25), (2, 27), (4, 41)]


def test_what_is_passed_on_and_what_is_new_are_both_read_only(cluster):
    def send_both(shard, delivery):
        shard.output().send(delivery.time, delivery.payload)
        shard.output().send(delivery.time, [delivery.payload[0], np.ones(2)])

    def look(shard, delivery):
        flags = [array.flags.writeable for array in delivery.payload]
        shard.output().send(delivery.time, [flags])

    flow = Dataflow(num_shards=1)
    arrays = flow.source([0]).map(lambda _: np.ones(2)).unary(send_both)
    arrays.rebalance().unary(look).collect()

    assert cluster.run(flow)["out"] == [[False], [False, False]]


def test_send_rows_is_one_block_per_shard_that_gets_rows(cluster):
    def measure(shard, delivery):
        shard.output().send(delivery.time, [(shard.index, len(delivery.payload))])

    flow = Dataflow()
    numbers = flow.source(np.array([25, 3, 27]), num_shards=1)
    numbers.unary(by_tens).direct(num_shards=4).unary(measure).collect()

    assert cluster.run(flow)["out"] == [(0, 1), (2, 2)]


def test_send_rows_over_a_dense_edge_brings_every_shard_a_block(cluster):
    def on_batch(shard, delivery):
        shard.state[delivery.time] = len(delivery.payload)
        shard.notify_at(delivery.time)

    def on_notify(shard, time):
        shard.output().send(time, [(shard.index, shard.state.pop(time))])

    flow = Dataflow(num_shards=1)
    dense = flow.source(np.array([25, 3, 27]), regular=True)
    sent = dense.unary(by_tens, pact=Pipeline(dense=True), regular=True)
    wide = sent.direct(num_shards=4, dense=True)
    wide.unary_notify(on_batch, on_notify).collect()

    assert cluster.run(flow)["out"] == [(0, 1), (1, 0), (2, 2), (3, 0)]


def test_an_operator_knows_among_how_many_shards_it_chooses(cluster):
    def on_batch(shard, delivery):
        output = shard.output()
        output.send_rows(
            delivery.time,
            [output.num_target_shards] * output.num_target_shards,
            range(output.num_target_shards),
        )

    flow = Dataflow(num_shards=2)
    sent = flow.source([0]).unary(on_batch).probe()
    sent.direct(num_shards=6).unary(at_shard).collect()

    assert cluster.run(flow)["out"] == [(shard, 6) for shard in range(6)]


@pytest.mark.parametrize(
    ("destinations", "match"),
    [
        ([0, 3], r"shard that does not exist; got 3 at row 1; expected 0 to 2"),
        ([0, -1], r"shard that does not exist; got -1 at row 1; expected 0 to 2"),
        ([0], r"destinations do not fit .* shape \(1,\) .* each of 2 rows"),
        ([0.0, 1.0], r"destinations do not fit .* float64; expected one integer"),
        (1, r"destinations do not fit .* shape \(\)"),
    ],
)
def test_send_rows_refuses_destinations_that_do_not_fit(cluster, destinations, match):
    def on_batch(shard, delivery):
        shard.output().send_rows(delivery.time, delivery.payload, destinations)

    flow = Dataflow(num_shards=1)
    sent = flow.source([1, 2]).unary(on_batch, name="spread")
    sent.direct(num_shards=3).collect()

    with pytest.raises(OperatorError, match=f"'spread' failed .*{match}"):
        cluster.run(flow)


def test_a_direct_edge_needs_a_name_with_each_send(cluster):
    flow = Dataflow(num_shards=2)
    flow.source([1]).map(lambda n: n, name="nameless").direct().collect()

    with pytest.raises(OperatorError, match=r"'nameless' failed .* send_rows"):
        cluster.run(flow)


@pytest.mark.parametrize(
    "send",
    [
        lambda output, time: output.send_rows(time, [1, 2], [1, 0]),
        lambda output, time: output.send_to(time, 1, [1, 2]),
    ],
)
def test_shards_that_nobody_heeds_are_not_named_in_vain(cluster, send):
    flow = Dataflow(num_shards=2)
    sent = flow.source([1]).unary(
        lambda shard, delivery: send(shard.output(), delivery.time), name="spread"
    )
    sent.exchange(lambda n: n).collect()

    with pytest.raises(
        OperatorError, match=r"'spread' names .* by exchange by key; .* direct\(\)"
    ):
        cluster.run(flow)
