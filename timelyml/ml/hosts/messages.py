"""What the controller and hosts tell each other about computations and buffers.

A buffer is known by a number that is unique in the cluster. Elements travel as pieces
of arrays, from whoever has them to whoever needs them: from a client by way of the
controller, from host to host, and back. Everything else is a few numbers for each host
and call, whatever the number of devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from timelyml.ml.functions import ArrayType, MemoryNeeds
from timelyml.ml.hosts.presence import Present
from timelyml.ml.hosts.timing import Arrival, AskTime, Time
from timelyml.ml.hosts.upkeep_messages import UpkeepDue
from timelyml.ml.scheduling import GangKey, Ticket

NO_NEEDS = MemoryNeeds(0, 0, 0, 0)
"""Of a computation that cannot run."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A process would be a host of an island that is new.

    Attributes:
        island: Its name; empty: one of its own, of any name.
        num_hosts: How many processes form it.
        num_devices: How many devices this one has.
    """

    island: str
    num_hosts: int
    num_devices: int


@dataclass(frozen=True, slots=True)
class Formed:
    """All hosts of an island have come; they join now, in this order of ranks."""

    island: str
    hosts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostRefused:
    """A process cannot be a host, and leaves."""

    reason: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """A host would leave; what is on its island may come to its end for so long."""

    drain_s: float


@dataclass(frozen=True, slots=True)
class Coordinator:
    """Where the processes of an island join; from its first host to the others.

    `departure` is where it sees that they have ended; `hosts` are in order of ranks.
    """

    address: str
    departure: str
    hosts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SliceMade:
    """A virtual slice on devices of this host's island.

    Attributes:
        devices: In row-major order of the mesh: the rank of a process among those of
            the island, and the position of the device in that process.
    """

    name: str
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    devices: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Compile a computation for a slice, in the background.

    Attributes:
        pickled: The computation, or None if the host was sent it before.
        line: The user's that first called it there, for errors.
    """

    identity: str
    slice: str
    pickled: bytes | None
    line: str = ""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A host has compiled a computation for a slice, or knows why it cannot.

    Attributes:
        needs: What it takes on a device; nothing if it cannot run.
        error: Pickled, why it cannot.
    """

    identity: str
    slice: str
    needs: MemoryNeeds
    error: bytes | None = None


@dataclass(frozen=True, slots=True)
class Expect:
    """A buffer will come in pieces, to lie on a slice.

    Attributes:
        is_copy: Whether it stays in host memory until it is ordered back.
        senders: Other hosts that pieces come from; without one of them it means nothing.
        num_elements: So many come to this host, and the rest are zeros; None: all.
    """

    buffer: int
    slice: str
    type: ArrayType
    spec: Any
    is_copy: bool = False
    senders: tuple[int, ...] = ()
    num_elements: int | None = None


class Prepare(NamedTuple):
    """Get ready for a gang, whose ticket comes with this message or later.

    Attributes:
        args: Buffers it takes, in the order of the computation's arguments.
        copied: Positions of arguments to be copied before, since the computation takes
            their memory while others still use them.
        outs: Numbers for the buffers of its results.
    """

    key: GangKey
    computation: str
    slice: str
    args: tuple[int, ...]
    copied: tuple[int, ...]
    outs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadProgram:
    """Keep a program, to be run by its number; `pickled` is a `HostProgram`."""

    program: int
    pickled: bytes


class Run(NamedTuple):
    """Get ready for a call of a program, whose tickets come with this or later.

    Attributes:
        name: Of the call; its blocks are the gangs of that name.
        inputs: Buffers, in the order of the program's inputs.
        outputs: Numbers for the buffers of its outputs.
        copied: Those of the inputs to be copied before the program takes their memory,
            since others still use them.
        first_move: The number of what the first move brings to a host; others follow.
        failed: Inputs that will never be there, and the pickled reason.
        matrix: Of a call that moves rows, how many go from which shard to which.
    """

    name: str
    program: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    copied: tuple[int, ...]
    first_move: int
    failed: tuple[tuple[int, bytes], ...]
    matrix: Any = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop what is left of a call of a program.

    Attributes:
        ordered: The blocks that were ordered before, all of which are over.
    """

    name: str
    ordered: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Export:
    """Send pieces of a buffer to a peer once it is computed.

    Attributes:
        peer: A host, or the controller.
        target: Under which number it is known there.
        boxes: Start and stop of each dimension of each piece.
        starts: Where each piece goes; None: to where it lies.
    """

    buffer: int
    type: ArrayType
    peer: int
    target: int
    boxes: Any
    starts: Any = None


class Orders(NamedTuple):
    """All that the controller decided in one step for one host, in this order.

    Attributes:
        returns: Buffers to bring back from host memory to their devices.
        runs: Calls of programs.
        cancels: Calls of programs that do not go on.
        forgets: Gangs that were prepared and will not be launched.
        spills: Buffers to bring to host memory, to be answered by `Spilled`.
        releases: Buffers that nobody uses any more; what is launched next may need
            their memory.
        dropped: Slices on which nothing is left.
    """

    returns: tuple[int, ...]
    expects: tuple[Expect, ...]
    prepares: tuple[Prepare, ...]
    runs: tuple[Run, ...]
    exports: tuple[Export, ...]
    cancels: tuple[Cancel, ...]
    forgets: tuple[GangKey, ...]
    spills: tuple[int, ...]
    releases: tuple[int, ...]
    tickets: tuple[Ticket, ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Send buffers to where their slice will stand and forget them; `Left` answers."""

    slice: str
    exports: tuple[Export, ...]
    buffers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """All that was to be sent of a slice that goes elsewhere is on its way."""

    slice: str


@dataclass(frozen=True, slots=True)
class AbandonSlices:
    """Wait for nothing any more that runs on slices; it may never end."""

    slices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gone:
    """A host sends nothing any more but what is on its way already.

    Attributes:
        island: Which one it belonged to.
        reason: What became of it.
    """

    host: int
    island: str
    reason: str


@dataclass(frozen=True, slots=True)
class RemapSlice:
    """A slice stands from now on where another was made for it, in whose place it is.

    Buffers of it that are here already stay.

    Attributes:
        target: The name of the other.
        expects: Buffers that come from where it stood before.
    """

    slice: str
    target: str
    expects: tuple[Expect, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a buffer; `starts` says where it lies."""

    starts: tuple[int, ...]
    array: Any


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of a buffer.

    Attributes:
        target: The buffer here; at the controller, what was asked for.
        error: Pickled, if the buffer's computation failed; the pieces are then zeros.
        sent_ns: When the sender began to send what was there, by its clock; 0 of what
            clients put and of what failed.
    """

    target: int
    pieces: tuple[Piece, ...]
    error: bytes | None = None
    sent_ns: int = 0


class Done(NamedTuple):
    """What has one place in the order of the island is over on this host.

    Attributes:
        sequence: Its place in the order.
        device_ns: Device time that it took here.
        errors: Of each launch that failed, its gang in the program and the pickled
            error; of a call of one computation, gang 0.
        values: Results that are small enough to ride along, whole, by buffer.
        ended_ns: When it ended, by the host's clock, which knows nothing of others; it
            began `device_ns` before.
        num_left_out: Launches on one device that were left out, as there was nothing to
            do for its shard.
    """

    sequence: int
    device_ns: int
    errors: tuple[tuple[int, bytes], ...]
    values: tuple[tuple[int, Any], ...]
    ended_ns: int = 0
    num_left_out: int = 0


class Reports(NamedTuple):
    """All launches of a host that were found to be over in one step.

    Attributes:
        moves: What came from hosts since the last report, while that is asked for.
    """

    done: tuple[Done, ...]
    moves: tuple[Arrival, ...] = ()


@dataclass(frozen=True, slots=True)
class Spilled:
    """Buffers of this host are in its memory now, and not on its devices any more."""

    buffers: tuple[int, ...]


MESSAGES = (
    Arrived,
    Formed,
    HostRefused,
    Leaving,
    Present,
    Coordinator,
    SliceMade,
    Load,
    LoadProgram,
    Compiled,
    Orders,
    Leave,
    Left,
    AbandonSlices,
    Gone,
    RemapSlice,
    Pieces,
    Reports,
    Spilled,
    AskTime,
    Time,
    UpkeepDue,
)
"""What the codec encodes at the top; the rest is part of these."""
