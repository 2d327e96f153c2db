"""Rules fire once per time, on complete inputs, after everything they must see."""

import numpy as np
import pytest

from tests.ml.firing_cases import check, random_case
from timelyml import Dataflow, Direct
from timelyml.errors import ConfigError, GraphError
from timelyml.graph import InputSpec, Pipeline
from timelyml.ml import Firing, Rule, add_firing_operator
from timelyml.operators import collect
from timelyml.testing import FlowTester


def read(firing: Firing) -> None:
    firing.send(0, [(firing.time, firing.state.get("total", 0))])


def add(firing: Firing) -> None:
    total = firing.state.get("total", 0)
    firing.state["total"] = total + sum(firing.inputs[1].rows)


RULES = (Rule((0,), read, outputs=(0,)), Rule((1,), add, later=(0,)))


def two_rules(flow, left, right, rules=RULES):
    (out,) = add_firing_operator(
        flow.builder,
        "meet",
        [InputSpec(left.ref, Pipeline()), InputSpec(right.ref, Pipeline())],
        rules,
        num_outputs=1,
    )
    return out


def test_a_reader_sees_every_change_of_earlier_times_and_none_of_later(cluster):
    flow = Dataflow("f", num_shards=1)
    asks, changes = flow.input("asks"), flow.input("changes")
    collect(two_rules(flow, asks, changes))
    run = cluster.start(flow)
    left, right = run.input("asks"), run.input("changes")
    for epoch in range(5):  # the reader's side is ahead by five
        left.advance_to(epoch)
        left.send([None])
    left.close()
    for epoch in range(5):
        right.advance_to(epoch)
        right.send([10**epoch])
    right.close()
    assert run.result()["out"] == [(0, 0), (1, 1), (2, 11), (3, 111), (4, 1111)]


@pytest.mark.parametrize("first", ["asks", "changes"])
def test_it_does_not_matter_which_side_is_ahead(first):
    for seed in range(10):
        flow = Dataflow("f", num_shards=1)
        asks, changes = flow.input("asks"), flow.input("changes")
        collect(two_rules(flow, asks, changes))
        with FlowTester(1 + seed % 3, seed=seed) as tester:
            run = tester.start(flow)
            for name in (first, "changes" if first == "asks" else "asks"):
                handle = run.input(name)
                for epoch in range(5):
                    handle.advance_to(epoch)
                    handle.send([10**epoch])
                handle.close()
                tester.settle()
            out = run.result()["out"]
        assert out == [(0, 0), (1, 1), (2, 11), (3, 111), (4, 1111)], f"seed {seed}"


def simulate_rules(seed):
    case = random_case(seed)
    try:
        check(case, case.run(seed, "accumulator" if seed % 3 == 0 else "broadcast"))
    except BaseException as error:
        error.add_note(f"seed {seed}: {case}")
        raise


def test_each_rule_sees_what_the_order_of_rules_says():
    for seed in range(60):
        simulate_rules(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1_000, 4_000, 100))
def test_each_rule_sees_what_the_order_of_rules_says_for_thousands_of_seeds(first):
    for seed in range(first, first + 100):
        simulate_rules(seed)


def test_a_reader_waits_for_the_time_before_even_if_nothing_comes(cluster):
    flow = Dataflow("f", num_shards=1)
    asks, changes = flow.input("asks"), flow.input("changes")
    collect(two_rules(flow, asks, changes))
    run = cluster.start(flow)
    run.input("changes").send([5])
    run.input("changes").close()
    run.input("asks").advance_to(3)
    run.input("asks").send([None])
    run.input("asks").close()
    assert run.result()["out"] == [(3, 5)]


def scatter(firing: Firing) -> None:
    rows = firing.inputs[0].rows
    for shard in range(4):
        firing.send_to(0, shard, rows[rows % 4 == shard])


def gather(firing: Firing) -> None:
    blocks = firing.inputs[0]
    assert list(blocks.sources) == sorted(blocks.sources)
    assert blocks.counts.sum() == len(blocks.rows)
    firing.send(0, blocks.rows)


def test_direct_sends_meet_at_their_shard_in_the_order_of_producers(cluster):
    flow = Dataflow("f", num_shards=3)

    def rows(shard, num_shards):
        return (np.arange(12) + 100 * shard + epoch for epoch in range(3))

    up = flow.source(rows, name="rows")
    (sent,) = add_firing_operator(
        flow.builder,
        "scatter",
        [InputSpec(up.ref)],
        [Rule((0,), scatter, outputs=(0,))],
        num_outputs=1,
    )
    (met,) = add_firing_operator(
        flow.builder,
        "gather",
        [InputSpec(sent, Direct())],
        [Rule((0,), gather, outputs=(0,))],
        num_outputs=1,
        num_shards=4,
    )
    collect(met)
    batches = cluster.run(flow).batches("out")
    assert len(batches) == 3 * 4
    for index, (epoch, got) in enumerate(batches):
        shard = index % 4
        everything = np.concatenate(
            [np.arange(12) + 100 * source + epoch for source in range(3)]
        )
        assert (got == everything[everything % 4 == shard]).all()


@pytest.mark.parametrize(
    "rules",
    [
        [Rule((2,), read, outputs=(0,))],
        [Rule((0,), read, outputs=(1,))],
        [Rule((0,), read), Rule((0,), read)],
        [Rule((0,), read, asked_by=(3,))],
        [Rule((), read)],
    ],
)
def test_rules_that_do_not_fit_the_operator_are_refused(rules):
    flow = Dataflow("f", num_shards=1)
    up = flow.source([1])
    with pytest.raises(ConfigError, match="rule that does not fit"):
        two_rules(flow, up, up, rules)


def test_rules_that_would_each_wait_for_the_other_are_refused():
    flow = Dataflow("f", num_shards=1)
    up = flow.source([1])
    rules = [
        Rule((0,), read, outputs=(0,), later=(1,)),
        Rule((1,), read, outputs=(1,), later=(0,)),
    ]
    with pytest.raises(ConfigError, match="wait for each other"):
        add_firing_operator(
            flow.builder,
            "meet",
            [InputSpec(up.ref), InputSpec(up.ref)],
            rules,
            num_outputs=2,
        )


def test_a_change_that_its_reader_waits_for_at_the_same_time_is_refused():
    flow = Dataflow("f", num_shards=1)
    loop = flow.builder.feedback(by=0, num_shards=1)
    up = flow.source([1])
    rules = [
        Rule((0,), read, outputs=(0,)),
        Rule((1,), add, outputs=(1,), later=(0,)),
    ]
    _, changed = add_firing_operator(
        flow.builder,
        "meet",
        [InputSpec(loop.stream), InputSpec(up.ref)],
        rules,
        num_outputs=2,
    )
    loop.connect(changed)
    with pytest.raises(GraphError, match="meet"):
        flow.build()


def test_state_changed_for_later_advances_a_cycle():
    flow = Dataflow("f", num_shards=1)
    loop = flow.builder.feedback(by=0, num_shards=1)
    up = flow.source([1])
    (out,) = add_firing_operator(
        flow.builder,
        "meet",
        [InputSpec(up.ref), InputSpec(loop.stream)],
        RULES,
        num_outputs=1,
    )
    loop.connect(out)
    assert "(e+1)" in flow.builder.build().describe()
