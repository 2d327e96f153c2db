"""Devices that are always used together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import InvariantError
from timelyml.ml.resources import DeviceGroups

DEVICES = "abcdefgh"
sets = st.lists(st.sets(st.sampled_from(DEVICES), min_size=1), max_size=8)


@given(sets)
def test_groups_are_the_coarsest_partition_that_fits_every_set(chosen):
    groups = DeviceGroups()
    groups.add_devices(DEVICES)
    accounts = {0: frozenset(DEVICES)}  # follows the splits as a user would
    for index, devices in enumerate(chosen):
        for split in groups.register(str(index), devices):
            accounts[split.child] = accounts[split.parent] & devices
            accounts[split.parent] -= devices
    together = {
        device: tuple(device in devices for devices in chosen) for device in DEVICES
    }
    expected = {
        frozenset(d for d in DEVICES if together[d] == pattern)
        for pattern in together.values()
    }
    assert {groups.members(group) for group in groups} == expected
    assert len(groups) == len(expected)
    assert {group: groups.members(group) for group in groups} == accounts
    for index, devices in enumerate(chosen):
        parts = [groups.members(group) for group in groups.of(str(index))]
        assert frozenset().union(*parts) == devices
        assert sum(map(len, parts)) == len(devices)


def test_devices_leave_their_sets_with_their_groups():
    groups = DeviceGroups()
    groups.add_devices("ab")
    groups.add_devices("c")
    groups.register("all", "abc")
    assert groups.remove_devices("a") == ()
    assert groups.remove_devices("c") == (1,)
    assert groups.of("all") == (0,)
    assert (groups.size(0), "c" in groups) == (1, False)


def test_devices_and_sets_are_known_once():
    groups = DeviceGroups()
    groups.add_devices("ab")
    groups.register("x", "a")
    with pytest.raises(InvariantError, match="join twice"):
        groups.add_devices("bc")
    with pytest.raises(InvariantError, match="cannot be registered"):
        groups.register("x", "b")
    with pytest.raises(InvariantError, match=r"unknown devices \['c'\]"):
        groups.register("y", "c")
    groups.unregister("x")
    groups.register("x", "b")
