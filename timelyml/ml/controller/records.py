"""What the controller knows of slices and of what is compiled for them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from timelyml.ml.functions import (
    ArrayType,
    Computation,
    LogicalMesh,
    MemoryNeeds,
    Spec,
)
from timelyml.ml.functions.specs import num_pieces
from timelyml.ml.hosts import (
    NO_NEEDS,
    Box,
    HeldBox,
    boxes_by_device,
)
from timelyml.ml.programs import Place
from timelyml.ml.store import Buffer
from timelyml.progress import new_tuple


def device_name(host: int, index: int) -> str:
    """Return how the scheduler and the resource manager call a device."""
    return f"{host}:{index}"


@dataclass(slots=True)
class LoadedCode:
    """A computation that is compiled for a slice.

    Attributes:
        hosts_left: Those that have not said that they compiled it.
        line: The user's that first called it, for errors.
        needs: Its memory on each device, by the host that says most.
        error: Pickled, why it cannot run, of the host that said so first.
    """

    hosts_left: set[int]
    line: str
    needs: MemoryNeeds = NO_NEEDS
    error: bytes | None = None


@dataclass(slots=True)
class SliceRecord:
    """A virtual slice on its devices.

    Attributes:
        client: Whose it is.
        platform: What JAX calls its devices.
        devices: Host and position on the host of each, in row-major order.
        num_calls: Calls on it that are not over.
        num_buffers: Buffers that lie on it.
        loaded: Computations that its hosts were told to compile, by identity.
        is_dropped: Whether it goes once nothing of it runs.
        error: Pickled, why it cannot be used any more.
        num_remaps: How often it went elsewhere.
        order: The scheduler that orders what runs on it: the name of its island, or of
            one that formed anew, with a number.
        is_closed: Whether nothing may begin on it now: it moves or has no devices.
        is_leaving: Whether nothing of it may be read either, as it is on its way.
        is_abandoned: Whether hosts of it died, or must die: what is left of it is on its
            devices, and what runs there is not waited for.
    """

    name: str
    client: int
    mesh: LogicalMesh
    island: str
    platform: str
    devices: tuple[tuple[int, int], ...]
    num_calls: int = 0
    num_buffers: int = 0
    loaded: dict[str, LoadedCode] = field(default_factory=dict)
    is_dropped: bool = False
    error: bytes | None = None
    num_remaps: int = 0
    order: str = ""
    is_closed: bool = False
    is_leaving: bool = False
    is_abandoned: bool = False
    _shares: dict[tuple[Spec, int], tuple[int, int]] = field(default_factory=dict)
    # Of what calls of each computation make, all fields of buffers but the number.
    _results: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    _hosts: tuple[object, tuple[int, ...]] = (None, ())  # of which devices

    def __post_init__(self) -> None:
        self.order = self.order or self.island

    def remap(self, target: SliceRecord) -> None:
        """Be from now on where another is."""
        self.island, self.order = target.island, target.order
        self.platform, self.devices = target.platform, target.devices
        self.loaded = target.loaded
        self.num_remaps += 1
        self.is_closed = self.is_leaving = self.is_abandoned = False
        self._shares.clear()
        self._results.clear()

    @property
    def device_names(self) -> tuple[str, ...]:
        """Names of devices, as the resource manager has them."""
        return tuple(device_name(*each) for each in self.devices)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The hosts that have devices of it, in order."""
        devices, hosts = self._hosts  # asked for several times in every call
        if devices is not self.devices:
            hosts = tuple(dict.fromkeys(host for host, _ in self.devices))
            self._hosts = self.devices, hosts
        return hosts

    @property
    def devices_by_host(self) -> dict[str, tuple[str, ...]]:
        """Names of devices by the name of their host, as the scheduler has them."""
        found: dict[str, list[str]] = {}
        for host, index in self.devices:
            found.setdefault(str(host), []).append(device_name(host, index))
        return {host: tuple(devices) for host, devices in found.items()}

    @property
    def place(self) -> Place:
        """Where it stands, as programs are lowered for."""
        hosts = tuple(str(host) for host, _ in self.devices)
        return Place(self.order, self.device_names, hosts)

    def held(self, spec: Spec, shape: tuple[int, ...]) -> list[HeldBox]:
        """Return who holds which box of an array that lies here so."""
        boxes = boxes_by_device(self.mesh, spec, shape)
        hosts = (host for host, _ in self.devices)
        return [HeldBox(host, box) for host, box in zip(hosts, boxes, strict=True)]

    def is_like(self, other: SliceRecord) -> bool:
        """Whether arrays lie on the same devices here as they do there."""
        return self is other or (self.devices, self.mesh) == (other.devices, other.mesh)

    def new_buffer(
        self, number: int, array_type: ArrayType, spec: Spec, label: str = ""
    ) -> Buffer:
        """Return a buffer that lies here so."""
        num_pieces, num_on_host = self._share(spec, len(array_type.shape))
        size_bytes = array_type.size_bytes // num_pieces
        host_bytes = size_bytes * num_on_host
        fields = number, self.name, array_type, spec, size_bytes, host_bytes, label
        buffer: Buffer = new_tuple(Buffer, fields)
        return buffer

    def new_results(
        self, numbers: Iterable[int], computation: Computation
    ) -> list[Buffer]:
        """Return the buffers that a call of a computation makes here."""
        known = self._results.get(computation.identity)
        if known is None:
            results = zip(computation.out_types, computation.out_specs, strict=True)
            known = self._results[computation.identity] = [
                tuple(self.new_buffer(0, *of, label_of(position, computation))[1:])
                for position, of in enumerate(results)
            ]
        pairs = zip(numbers, known, strict=False)
        return [new_tuple(Buffer, (number, *fields)) for number, fields in pairs]

    def _share(self, spec: Spec, num_dims: int) -> tuple[int, int]:
        """Return into how many pieces an array is cut, and the most that a host has."""
        found = self._shares.get((spec, num_dims))
        if found is None:
            counts = num_pieces(self.mesh, spec, num_dims)
            by_host: dict[int, set[Box]] = {}
            for host, box in self.held(spec, counts):
                by_host.setdefault(host, set()).add(box)
            found = math.prod(counts), max(map(len, by_host.values()))
            self._shares[spec, num_dims] = found
        return found


def label_of(position: int, computation: Computation) -> str:
    """Return what people call a result of a computation."""
    return f"output {position} of {computation.name}"
