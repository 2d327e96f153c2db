"""Which devices a slice gets, held against all choices that there are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ml.resources.clusters import ask, mesh
from timelyml.ml.resources.fitting import boxes, fit


def devices_of(*islands):
    return [device for hosts in islands for each in hosts.values() for device in each]


def are_neighbours(one, other):
    pairs = zip(one.coordinates, other.coordinates, strict=True)
    return one.island == other.island and sum(abs(a - b) for a, b in pairs) == 1


def is_adjacent(sizes, chosen):
    """Whether devices that differ by a step in one axis of the slice are neighbours."""
    places = dict(zip(itertools.product(*map(range, sizes)), chosen, strict=True))
    return all(
        are_neighbours(device, places[other])
        for place, device in places.items()
        for axis in range(len(sizes))
        if (other := tuple(p + (i == axis) for i, p in enumerate(place))) in places
    )


shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), shapes, st.data())
def test_every_box_is_a_slice_of_neighbours_on_the_devices_given(sides, sizes, data):
    pool = devices_of(mesh(*sides))
    given_away = data.draw(st.sets(st.sampled_from(range(len(pool)))))
    pool = [device for index, device in enumerate(pool) if index not in given_away]
    for chosen in boxes(sizes, pool):
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(pool)
        assert is_adjacent(sizes, chosen)


@settings(max_examples=60)
@given(st.sampled_from([(4,), (2, 3), (2, 2, 2)]), st.integers(1, 4), st.data())
def test_the_most_loaded_device_carries_as_little_as_in_any_other_choice(
    sides, size, data
):
    pool = devices_of(mesh(*sides))
    loads = {d.name: (data.draw(st.integers(0, 2)), 0) for d in pool}
    chosen = fit(ask("s", size), pool, lambda device: loads[device.name])
    best = min(
        (max(loads[d.name] for d in each), sum(loads[d.name][0] for d in each))
        for each in itertools.combinations(pool, size)
    )
    got = [loads[device.name] for device in chosen]
    assert (max(got), sum(n for n, _ in got)) == best


def test_neighbours_win_where_loads_are_equal():
    pool = devices_of(mesh(4, 4))
    chosen = fit(ask("s", 2, 2), pool, lambda _: (0, 0))
    assert is_adjacent((2, 2), chosen)


def test_load_wins_over_neighbours_unless_they_are_demanded():
    pool = devices_of(mesh(4))
    loads = {0: (0, 0), 1: (1, 0), 2: (0, 0), 3: (2, 0)}

    def load_of(device):
        return loads[device.coordinates[0]]

    free = fit(ask("s", 2), pool, load_of)
    beside = fit(ask("s", 2, is_adjacent=True), pool, load_of)
    assert [device.coordinates for device in free] == [(0,), (2,)]
    assert [device.coordinates for device in beside] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("sides", "sizes", "is_possible"),
    [
        ((2, 2), (4,), True),  # winds through the square
        ((2, 3), (3, 2), True),  # turned
        ((2, 2, 2), (4, 2), False),  # an axis winds only where it is alone
        ((8,), (2, 2), False),  # a line has no squares
        ((2, 2), (2, 1, 2), True),  # an axis of one needs no room
        ((3, 3), (5,), False),  # no box of five
    ],
)
def test_adjacency_is_found_in_boxes_of_the_mesh(sides, sizes, is_possible):
    request = ask("s", *sizes, is_adjacent=True)
    chosen = fit(request, devices_of(mesh(*sides)), lambda _: (0, 0))
    assert (chosen is not None) is is_possible
    assert chosen is None or is_adjacent(sizes, chosen)


def test_a_slice_stays_on_one_island_and_one_kind():
    pool = devices_of(mesh(2), mesh(2, island="b"), mesh(2, island="c", kind="gpu"))
    assert fit(ask("s", 3), pool, lambda _: (0, 0)) is None
    for wanted in ({"island": "b"}, {"kind": "gpu"}):
        chosen = fit(ask("s", 2, **wanted), pool, lambda _: (0, 0))
        (found,) = {(each.island, each.kind) for each in chosen}
        assert found == (("b", "cpu") if "island" in wanted else ("c", "gpu"))
    none = fit(ask("s", 1, island="a", kind="gpu"), pool, lambda _: (0, 0))
    assert none is None


def test_a_slice_of_an_island_of_thousands_is_found_with_a_flat_number_of_looks():
    pool = devices_of(mesh(64, 32))
    looks = 0

    def load_of(device):
        nonlocal looks
        looks += 1
        return (0, 0)

    chosen = fit(ask("s", 16, 8), pool, load_of)
    assert len(chosen) == 128
    # Every box is looked at once: corners x devices x two ways to lay it.
    assert looks <= 2 * 64 * 32 * 128 + len(pool)
