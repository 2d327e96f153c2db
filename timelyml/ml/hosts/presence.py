"""What a host says of its devices when it comes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True, slots=True)
class Present:
    """A host is there, with its devices.

    Attributes:
        platform: What JAX calls its devices: "cpu", "cuda" or "tpu".
        kind: What the maker calls them.
        num_devices: How many it has itself.
        coordinates: Where each is in the mesh of its island; none if nobody says.
    """

    platform: str
    kind: str
    num_devices: int
    coordinates: tuple[tuple[int, ...], ...] = ()

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """What is said of where each is; of one nothing, if not of all."""
        count = self.num_devices
        return self.coordinates if len(self.coordinates) == count else ((),) * count


def present_of(
    devices: Sequence[jax.Device],
    rank: int = 0,
    num_hosts: int = 1,
    mesh: Sequence[int] | None = None,
) -> Present:
    """Return what a host says of its devices.

    Args:
        devices: Its own.
        rank: Its place among the hosts of its island.
        num_hosts: How many these are.
        mesh: The shape of the mesh that the island is said to be, in row-major order, if
            it has as many devices; None: what the platform says.
    """
    first, count = devices[0], len(devices)
    if mesh is None or math.prod(mesh) != num_hosts * count:
        places = [_coordinates(device) for device in devices]
        stated = tuple(each for each in places if each is not None)
    else:
        numbers = range(rank * count, (rank + 1) * count)
        stated = tuple(tuple(map(int, np.unravel_index(n, mesh))) for n in numbers)
    is_known = len(stated) == count
    return Present(first.platform, first.device_kind, count, stated if is_known else ())


def _coordinates(device: Any) -> tuple[int, ...] | None:
    """Return where a TPU is: its chip, and which core of it; other devices do not say."""
    coords = getattr(device, "coords", None)
    if coords is None:
        return None
    return (*map(int, coords), int(getattr(device, "core_on_chip", 0)))
