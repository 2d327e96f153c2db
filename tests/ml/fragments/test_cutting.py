"""Cuts of few bytes against all assignments there are."""

from __future__ import annotations

import itertools
import random

import pytest

from timelyml.ml.fragments.cutting import (
    Flow,
    Problem,
    assign,
    assign_in_order,
    moved_bytes,
)

NEAR = 1.2
"""What more than two places may cost, at most, of the least there is."""


def random_problem(seed, num_places):
    chance = random.Random(seed)
    count = num_places + chance.randint(2, 5)
    fixed = [None] * count
    for place, part in enumerate(chance.sample(range(count), num_places)):
        fixed[part] = place
    flows = []
    for part in range(count - 1):
        later = range(part + 1, count)
        readers = chance.sample(later, min(len(later), chance.randint(1, 3)))
        flows.append(Flow(chance.choice([1, 2, 3, 8, 100]), part, tuple(readers)))
    for _ in range(chance.randint(0, 2)):
        readers = tuple(chance.sample(range(count), 2))
        flows.append(Flow(chance.randint(1, 20), None, readers))
    return Problem(tuple(fixed), tuple(flows), num_places)


def assignments(problem):
    places = range(problem.num_places)
    return itertools.product(*([p] if p is not None else places for p in problem.fixed))


def keeps(problem, places):
    return all(p in (None, q) for p, q in zip(problem.fixed, places, strict=True))


def test_two_places_move_as_few_bytes_as_they_can():
    for seed in range(40):
        problem = random_problem(seed, 2)
        found = assign(problem)
        assert keeps(problem, found)
        least = min(moved_bytes(problem, each) for each in assignments(problem))
        assert moved_bytes(problem, found) == least


def test_more_places_move_few_bytes():
    for seed in range(60):
        problem = random_problem(seed, 3 + seed % 2)
        found = assign(problem)
        assert keeps(problem, found)
        least = min(moved_bytes(problem, each) for each in assignments(problem))
        assert moved_bytes(problem, found) <= NEAR * least


def crossed_bytes(problem, stages):
    """What goes over borders: a value over all up to its last reader; None if back."""
    total = 0
    for flow in problem.flows:
        if flow.producer is None:
            continue
        made = stages[flow.producer]
        if any(stages[each] < made for each in flow.consumers):
            return None
        total += flow.size_bytes * (max(stages[x] for x in flow.consumers) - made)
    return total


def test_stages_in_order_are_crossed_by_as_few_bytes_as_they_can():
    num_possible = 0
    for seed in range(120):
        problem = random_problem(seed, 3)
        costs = [crossed_bytes(problem, each) for each in assignments(problem)]
        possible = [cost for cost in costs if cost is not None]
        if possible:
            found = assign_in_order(problem)
            assert keeps(problem, found)
            assert crossed_bytes(problem, found) == min(possible)
            num_possible += 1
    assert num_possible > 10


@pytest.mark.parametrize("places", [(0, 1, 1, 2), (2, 0, 0, 1)])
def test_a_value_is_moved_once_to_each_place_that_reads_it(places):
    flows = Flow(8, 0, (1, 2, 3)), Flow(5, None, (0, 1, 2))
    assert moved_bytes(Problem(places, flows, 3), places) == 8 + 8 + 5 + 5


def test_without_anything_to_choose_nothing_changes():
    assert assign(Problem((1, 0), (Flow(1, 0, (1,)),), 2)) == [1, 0]
