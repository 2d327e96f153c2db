from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import PlacementError
from timelyml.graph import Contiguous, Custom, RoundRobin

SHARDS = st.integers(1, 200)
WORKERS = st.integers(1, 40)


@st.composite
def placements(draw):
    num_shards, num_workers = draw(SHARDS), draw(WORKERS)
    holders = st.lists(
        st.integers(0, num_workers - 1), min_size=num_shards, max_size=num_shards
    )
    rule = draw(
        st.one_of(
            st.just(RoundRobin()),
            st.just(Contiguous()),
            st.builds(lambda table: Custom(tuple(table)), holders),
        )
    )
    return rule, num_shards, num_workers


@given(placements())
def test_the_shards_of_a_worker_are_those_it_is_the_worker_of(case):
    rule, num_shards, num_workers = case
    expected = [[] for _ in range(num_workers)]
    for shard in range(num_shards):
        expected[rule.worker_of(shard, num_shards, num_workers)].append(shard)
    for worker in range(num_workers):
        found = list(rule.shards_of(worker, num_shards, num_workers))
        assert found == expected[worker]


@pytest.mark.parametrize("rule", [RoundRobin(), Contiguous()])
@given(num_shards=SHARDS, num_workers=WORKERS)
def test_a_rule_balances_to_one_shard(rule, num_shards, num_workers):
    loads = [
        len(rule.shards_of(w, num_shards, num_workers)) for w in range(num_workers)
    ]
    assert max(loads) - min(loads) <= 1
    assert sum(loads) == num_shards


@given(SHARDS, WORKERS)
def test_contiguous_shards_are_neighbours(num_shards, num_workers):
    rule = Contiguous()
    workers = [rule.worker_of(s, num_shards, num_workers) for s in range(num_shards)]
    assert workers == sorted(workers)


@pytest.mark.parametrize("rule", [RoundRobin(), Contiguous()])
def test_a_single_shard_stands_on_the_first_worker(rule):
    assert rule.worker_of(0, num_shards=1, num_workers=4) == 0


@pytest.mark.parametrize("rule", [RoundRobin(), Contiguous(), Custom((0, 1))])
@pytest.mark.parametrize("shard", [-1, 2])
def test_a_shard_that_does_not_exist_is_refused(rule, shard):
    with pytest.raises(PlacementError, match=f"got {shard}; expected 0 or more"):
        rule.worker_of(shard, num_shards=2, num_workers=2)


def test_a_table_of_the_wrong_length_is_refused():
    with pytest.raises(PlacementError, match=r"'a'.* got 2; expected 3") as caught:
        Custom((0, 1)).check(3, None, who="operator 'a'")
    assert (caught.value.got, caught.value.num_shards) == (2, 3)


def test_a_table_with_a_missing_worker_is_refused_once_workers_are_known():
    rule = Custom((0, 5))
    rule.check(2, None, who="operator 'a'")
    with pytest.raises(PlacementError, match="got 5; expected less than 4"):
        rule.check(2, 4, who="operator 'a'")


@pytest.mark.parametrize("table", [5, lambda shard: 0])
def test_what_is_no_table_is_refused(table):
    with pytest.raises(PlacementError, match="custom placement has no table; got"):
        Custom(table)


@pytest.mark.parametrize("entry", [-1, 1.5, "0"])
def test_a_table_entry_that_is_no_worker_is_refused(entry):
    with pytest.raises(PlacementError, match="no worker for shard 1"):
        Custom((0, entry))


def test_the_text_of_a_table_does_not_grow_with_it():
    small, large = Custom((0, 1)), Custom((0, 1) * 2048)
    assert len(small.describe()) == len(large.describe())
    assert small.describe() != large.describe()


def test_the_size_of_a_rule_does_not_depend_on_shards():
    shards = RoundRobin().shards_of(1, num_shards=4096, num_workers=2)
    assert len(pickle.dumps(shards)) < 100
