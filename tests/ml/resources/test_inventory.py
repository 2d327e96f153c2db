"""Islands, hosts and devices as they come and go."""

from __future__ import annotations

import pytest

from tests.ml.resources.clusters import GIB, mesh
from timelyml.errors import ConfigError, PlacementError
from timelyml.ml.resources import Device, Inventory


def device(name="d", *, island="a", host="h", memory_bytes=GIB, at=(0,)):
    return Device(name, island, host, "cpu", memory_bytes, at)


@pytest.mark.parametrize("at", [(), (0, 0, 0, 0), (-1,)])
def test_a_device_stands_at_one_to_three_whole_numbers(at):
    with pytest.raises(ConfigError, match="impossible coordinates"):
        device(at=at)


def test_a_device_without_memory_is_refused():
    with pytest.raises(ConfigError, match="has no memory; got 0 bytes"):
        device(memory_bytes=0)


@pytest.mark.parametrize(
    ("host", "devices", "why"),
    [
        ("h", [device("new", at=(5,))], "got its name again"),
        ("i", [device("new", at=(5,))], "of 'h'; expected its own"),
        ("i", [device("d", host="i", at=(5,))], "got device 'd' twice"),
        ("i", [device("new", host="i", at=(0,))], "expected another place than 'd'"),
        ("i", [device("new", host="i", at=(0, 1))], "expected 1 as in the rest"),
    ],
)
def test_a_host_that_contradicts_what_is_there_cannot_join(host, devices, why):
    inventory = Inventory()
    inventory.add_host("h", [device()])
    with pytest.raises(PlacementError, match=why):
        inventory.add_host(host, devices)
    assert (list(inventory), inventory.hosts) == ([device()], ("h",))


def test_devices_go_with_their_host_and_come_back_unmarked():
    inventory = Inventory()
    inventory.add_host("h", [device()])
    inventory.withdraw(["d"])
    assert inventory.remove_host("h") == (device(),)
    assert "d" not in inventory
    inventory.add_host("h", [device()])
    assert inventory.is_usable("d")


def test_unknown_names_are_refused():
    inventory = Inventory()
    for change in (inventory.withdraw, inventory.restore):
        with pytest.raises(PlacementError, match="devices are unknown; got"):
            change(["d"])
    with pytest.raises(PlacementError, match="host 'h' cannot leave"):
        inventory.remove_host("h")


def test_what_there_is_is_said_by_island_and_kind():
    inventory = Inventory()
    for hosts in (mesh(2, 2), mesh(3, island="b", kind="gpu")):
        for host, devices in hosts.items():
            inventory.add_host(host, devices)
    inventory.withdraw(["a/host0/device0"])
    assert inventory.describe() == (
        "island a: 3 of kind cpu with 1,024 MiB each, "
        "island b: 3 of kind gpu with 1,024 MiB each"
    )
