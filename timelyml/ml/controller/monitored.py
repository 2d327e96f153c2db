"""What clients and the controller tell each other about hosts and what they have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AskHosts:
    """Ask all hosts what they have; `Hosts` answers."""

    request: int


@dataclass(frozen=True, slots=True)
class HostInfo:
    """A worker process that has devices, as it says itself.

    Attributes:
        host: Its index as a worker of the cluster.
        num_functions: Computations that it has compiled for the slices on it.
        num_programs: Programs that it keeps, those of collected calls too.
        num_buffers: Values that have a part there.
        num_launches: Launches that were ordered and are not over.
        epoch: Of its upkeep: it has obeyed all that was decided before.
        num_open_epochs: Those before of which something still goes on there, as
            functions are compiled, as far as the controller knows.
    """

    host: int
    island: str
    process_id: int
    num_devices: int
    num_slices: int
    num_functions: int
    num_programs: int
    num_buffers: int
    num_launches: int
    epoch: int
    num_open_epochs: int


@dataclass(frozen=True, slots=True)
class Hosts:
    """All hosts that are there."""

    request: int
    hosts: tuple[HostInfo, ...]
