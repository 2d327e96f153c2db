"""What timely dataflow has as parts of its own is written here as ordinary operators.

Barriers, sequencers, inputs in no order and ticks of a clock need no support: each is a
flow of a few lines, and means what it means there.
"""

from __future__ import annotations

from collections import defaultdict

from tests.operators.test_distinct import in_epochs
from timelyml import PER_WORKER, Dataflow, Logic

ROUNDS = 5


def test_a_barrier_is_a_frontier_that_feeds_back(cluster):
    """No shard begins a round before it has heard of every shard in the last one."""

    def begin(shard, number):
        shard.state["round"] = number
        shard.output().send(number, [(shard.index, number)])
        shard.state["right"].downgrade(number + 1)

    def on_start(shard):
        shard.state["right"] = shard.initial_capability()
        begin(shard, 0)

    def on_batch(shard, delivery):
        shard.state.setdefault(("heard", delivery.time), []).extend(delivery.payload)

    def on_frontier(shard):
        right, number = shard.state["right"], shard.state["round"]
        # Feedback adds 1: all have left a round once nothing more can come at the next.
        if not right.is_held or shard.frontier().less_equal(number + 1):
            return
        heard = shard.state.pop(("heard", number + 1))
        shard.emit("heard", sorted(heard))
        if number + 1 == ROUNDS:
            right.release()
        else:
            begin(shard, number + 1)

    flow = Dataflow()
    loop = flow.feedback(num_shards=PER_WORKER)
    (out,) = flow.operator(
        Logic(on_start=on_start, on_batch=on_batch, on_frontier=on_frontier),
        inputs=[loop.stream],
        outputs=[{}],  # what it hears leads to nothing
        is_source=True,
        states=("state",),
    )
    loop.connect(out.broadcast().map(lambda told: told))
    told = defaultdict(list)
    run = cluster.start(
        flow, on_message=lambda _, shard, tag, body: told[shard].append(body)
    )
    run.result()

    shards = range(cluster.num_workers)
    everybody = [[(shard, number) for shard in shards] for number in range(ROUNDS)]
    assert dict(told) == dict.fromkeys(shards, everybody)


def test_a_sequencer_gives_all_shards_the_same_order(cluster):
    def number(shard, delivery):
        first = shard.state.get("next", 0)
        shard.state["next"] = first + len(delivery.payload)
        shard.output().send(delivery.time, list(enumerate(delivery.payload, first)))

    def note(shard, delivery):
        shard.output().send(delivery.time, [(shard.index, n) for n in delivery.payload])

    flow = Dataflow(num_shards=3)
    said = flow.source(lambda shard, _: ([(shard, n)] for n in range(20)))
    ordered = said.gather(num_shards=1).unary(number)
    ordered.broadcast(num_shards=3).unary(note).collect()

    heard = defaultdict(dict)
    for shard, (place, record) in cluster.run(flow)["out"]:
        heard[shard][place] = record
    assert heard[0] == heard[1] == heard[2]
    assert sorted(heard[0]) == list(range(60))
    assert sorted(heard[0].values()) == [(s, n) for s in range(3) for n in range(20)]


def test_an_unordered_input_sends_at_any_time_that_it_holds(cluster):
    """Times are filled and closed in another order than that of time."""

    def on_start(shard):
        with shard.initial_capability() as first:
            rights = {time: first.delayed(time) for time in range(4)}
        shard.state["rights"] = rights
        shard.activate()

    def on_activate(shard):
        rights = shard.state["rights"]
        for time in (2, 0, 3, 1):
            with rights.pop(time) as right:
                shard.output().send(right.time, [(shard.index, time)])

    flow = Dataflow(num_shards=2)
    logic = Logic(on_start=on_start, on_activate=on_activate)
    (out,) = flow.operator(logic, is_source=True, states=("state",))
    out.count().collect()

    assert cluster.run(flow).batches("out") == [
        (t, [1]) for t in range(4) for _ in "ab"
    ]


def test_records_are_reclocked_to_the_ticks_of_another_stream(cluster):
    """Each record is sent at the first tick at or after its time; later ones never."""
    records, ticks = 0, 1

    def on_batch(shard, delivery):
        if delivery.time not in shard.state:
            shard.state[delivery.time] = (shard.retain(delivery.time), [], [])
        shard.state[delivery.time][1 + delivery.port].extend(delivery.payload)

    def on_frontier(shard):
        waiting = []
        for time in sorted(shard.state):
            if not all(shard.is_complete(port, time) for port in (records, ticks)):
                return
            _, found, ticked = shard.state[time]
            waiting += found
            if not ticked:
                continue
            shard.output().send(time, waiting)
            for passed in [t for t in shard.state if t <= time]:
                shard.state.pop(passed)[0].release()
            waiting = []
        if not shard.frontier(ticks).elements:
            while shard.state:
                shard.state.popitem()[1][0].release()

    flow = Dataflow(num_shards=1)
    numbers = flow.source(in_epochs([[1], [2], [3], [], [4], [5]]))
    clock = flow.source(in_epochs([[], ["tick"], [], ["tick"], [], []]), name="clock")
    numbers.binary_frontier(clock, on_batch, on_frontier).collect()

    assert cluster.run(flow).batches("out") == [(1, [1, 2]), (3, [3])]
