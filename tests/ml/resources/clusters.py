"""Devices and hosts for tests of the resource manager."""

from __future__ import annotations

import itertools

from timelyml.ml.resources import Device, ResourceManager, SliceRequest

GIB = 1 << 30


def mesh(
    *sides: int, island: str = "a", kind: str = "cpu", per_host: int | None = None
) -> dict[str, list[Device]]:
    """Return the hosts of an island whose devices are a mesh of these sides, 1 GiB each."""
    places = list(itertools.product(*map(range, sides)))
    size = per_host or len(places)
    hosts: dict[str, list[Device]] = {}
    for index, place in enumerate(places):
        host = f"{island}/host{index // size}"
        device = Device(f"{host}/device{index}", island, host, kind, GIB, place)
        hosts.setdefault(host, []).append(device)
    return hosts


def manager_of(*islands: dict[str, list[Device]]) -> ResourceManager:
    """Return a manager that knows these hosts."""
    manager = ResourceManager()
    for hosts in islands:
        for host, devices in hosts.items():
            assert manager.add_host(host, devices) == []
    return manager


def ask(
    name: str,
    *sizes: int,
    client: str = "me",
    kind: str | None = None,
    island: str | None = None,
    memory_bytes: int = 0,
    is_adjacent: bool = False,
) -> SliceRequest:
    """Return a request for a slice with axes x, y, z of these sizes."""
    return SliceRequest(
        client,
        name,
        tuple(zip("xyz"[: len(sizes)], sizes, strict=True)),
        kind=kind,
        island=island,
        memory_bytes=memory_bytes,
        is_adjacent=is_adjacent,
    )


def places_of(manager: ResourceManager, name: str) -> list[tuple[int, ...]]:
    """Return the coordinates of a slice's devices, in row-major order of its shape."""
    devices = manager.devices_of(name)
    return [manager.inventory[device].coordinates for device in devices]
