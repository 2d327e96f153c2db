"""What clients and the controller tell each other.

A client numbers its buffers itself, within a range that is its own, so that it can use
what a call returns in the next call without waiting for an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timelyml.ml.controller.code_messages import (
    AskCompiled,
    IsCompiled,
    NotCompiled,
    Register,
)
from timelyml.ml.controller.explained import AskWhy, Why
from timelyml.ml.controller.gauged import CountBuffers, Gauged, OpenGauge, ReadGauge
from timelyml.ml.controller.monitored import AskHosts, Hosts
from timelyml.ml.controller.resource_messages import (
    AskDevices,
    ChangeDevices,
    ChangeSlice,
    Devices,
    Moved,
    ReformIsland,
)
from timelyml.ml.controller.traced import AskTrace, Traced
from timelyml.ml.functions import ArrayType
from timelyml.ml.hosts import Piece


@dataclass(frozen=True, slots=True)
class AskSlice:
    """Ask for a virtual slice; `SliceGiven` or `Refused` answers the `request`.

    Attributes:
        kind: Kind of device; any one kind if None.
        island: Name of an island; any if None.
        memory_bytes: Reserved on every device; 0 shares.
        timeout_s: How long to wait for devices; without end if None.
        is_adjacent: Whether neighbours have to be neighbours in the island's mesh.
    """

    request: int
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    kind: str | None = None
    island: str | None = None
    memory_bytes: int = 0
    timeout_s: float | None = None
    is_adjacent: bool = False


@dataclass(frozen=True, slots=True)
class DropSlice:
    """Give a slice back."""

    slice: str


@dataclass(frozen=True, slots=True)
class Put:
    """Make a buffer of a host array; of keys, their words."""

    buffer: int
    slice: str
    type: ArrayType
    spec: Any
    array: Any


@dataclass(frozen=True, slots=True)
class Call:
    """Run a registered computation.

    Attributes:
        args: Buffers, wherever they lie.
        outs: Numbers for the buffers of its results.
        order: Calls of the client on the slice with the same number, other than 0, are
            ordered as they come, whichever has first what it takes.
    """

    computation: str
    slice: str
    args: tuple[int, ...]
    outs: tuple[int, ...]
    order: int = 0


@dataclass(frozen=True, slots=True)
class RegisterProgram:
    """Have a program ready to be called under a number that its client chose.

    Attributes:
        pickled: The `Program`, after all passes.
        given: Those of its inputs that a call gives away.
        is_sequential: Whether a computation waits for the end of those before it.
        is_collected: Whether it is calls that only travel together.
    """

    program: int
    pickled: bytes
    given: tuple[int, ...]
    is_sequential: bool
    is_collected: bool = False


@dataclass(frozen=True, slots=True)
class CallProgram:
    """Run a registered program.

    Attributes:
        inputs: Buffers, in the order of its inputs, where it wants them.
        outs: Numbers for the buffers of its outputs.
    """

    program: int
    inputs: tuple[int, ...]
    outs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelCalls:
    """Drop what has not run of the calls that make these buffers."""

    buffers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """The client does not need these buffers any more."""

    buffers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask for the elements of a buffer; `Fetched` answers.

    Or, if it `is_notice`, only whether it is there, on all of its devices; `Finished` or
    `Failed` answers.
    """

    buffer: int
    is_notice: bool = False


@dataclass(frozen=True, slots=True)
class Publish:
    """Give buffers to a name; `Acknowledged` or `Refused` answers.

    `structure` goes to whoever opens them.
    """

    request: int
    name: str
    buffers: tuple[int, ...]
    structure: bytes


@dataclass(frozen=True, slots=True)
class Open:
    """Ask for what is published under a name; `Opened` or `Refused` answers.

    Waits so long for somebody to publish it; without end if None.
    """

    request: int
    name: str
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Unpublish:
    """Take a name back; `Acknowledged` or `Refused` answers."""

    request: int
    name: str


@dataclass(frozen=True, slots=True)
class Watch:
    """Tell when these buffers are there, which others make."""

    buffers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AskObjects:
    """Ask what buffers there are; `Objects` answers."""

    request: int


@dataclass(frozen=True, slots=True)
class AskUsage:
    """Ask what clients take; `Usage` answers."""

    request: int


@dataclass(frozen=True, slots=True)
class SliceGiven:
    """A slice is there.

    Attributes:
        devices: The host of each device and its position there, in row-major order.
    """

    request: int
    slice: str
    island: str
    platform: str
    devices: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A request cannot be met; `error` is pickled."""

    request: int
    error: bytes


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What was asked for is done."""

    request: int


@dataclass(frozen=True, slots=True)
class OpenedBuffer:
    """A buffer that the client holds from now on, and the slice that it lies on."""

    buffer: int
    type: ArrayType
    spec: Any
    slice: str
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    platform: str
    island: str
    devices: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """What is published under a name; each buffer is held once more."""

    request: int
    buffers: tuple[OpenedBuffer, ...]
    structure: bytes


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A logical buffer of a cluster.

    Attributes:
        name: The client that made it, and its count.
        label: What it is: of which call it is which result.
        owner: The client that it is charged to, be it for a loop of its; None once it
            belongs to a name, or only to launches under way.
        names: Those under which it is published.
        state: "pending", "ready" or "failed".
        spec: How it is sharded over its slice.
        device_bytes: What it takes on all devices together.
        host_bytes: What it takes in the memory of all hosts together.
        num_references: Handles, names, calls and fetches that keep it.
    """

    name: str
    label: str
    owner: int | None
    names: tuple[str, ...]
    state: str
    shape: tuple[int, ...]
    dtype: str
    spec: Any
    slice: str
    island: str
    device_bytes: int
    host_bytes: int
    num_references: int


@dataclass(frozen=True, slots=True)
class Objects:
    """All buffers there are, oldest first."""

    request: int
    objects: tuple[ObjectInfo, ...]


@dataclass(frozen=True, slots=True)
class ClientUsage:
    """What a client takes.

    Attributes:
        client: Its number; None of all that belongs to names, or only to calls.
        device_s: Seconds of device time of what it ran, over all devices.
        num_launches: How much of it was ordered and is over: a computation each, or a
            block of those of a program.
        num_objects: Buffers that it is charged for.
        device_bytes: What these take on all devices together.
        host_bytes: What these take in the memory of all hosts together.
        weight: Its share of device time, under the policy "share".
        priority: Larger ones go first, under the policy "priority".
        num_rows: Rows that its programs routed to shards.
        num_idle_shards: Shards that were sent none of a routing, each time.
        num_left_out: Launches of functions on rows that were left out, each on one
            device, as its shard had none.
    """

    client: int | None
    device_s: float
    num_launches: int
    num_objects: int
    device_bytes: int
    host_bytes: int
    weight: int = 1
    priority: int = 0
    num_rows: int = 0
    num_idle_shards: int = 0
    num_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """What each client takes."""

    request: int
    clients: tuple[ClientUsage, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Calls are over.

    Attributes:
        num_calls: How many.
        buffers: What they returned, all there now.
        values: Those that are small, whole.
        device_ns: Device time that these calls took.
        is_alone: Whether no other client has run anything where they ran.
    """

    num_calls: int
    buffers: tuple[int, ...]
    values: tuple[tuple[int, Any], ...]
    device_ns: int = 0
    is_alone: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Buffers will never be there; `num_calls` calls that made them are over."""

    num_calls: int
    buffers: tuple[int, ...]
    error: bytes


@dataclass(frozen=True, slots=True)
class Fetched:
    """The elements of a buffer, in pieces, or the pickled reason why there are none."""

    buffer: int
    pieces: tuple[Piece, ...]
    error: bytes | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing will be answered any more; `error` is pickled."""

    error: bytes


REQUESTS = (
    AskSlice, DropSlice, Register, RegisterProgram, Put, Call, CallProgram, CancelCalls,
    Release, Fetch, Publish, Open, Unpublish, Watch, AskObjects, AskUsage, ChangeSlice,
    ChangeDevices, AskDevices, ReformIsland, AskTrace, OpenGauge, CountBuffers,
    ReadGauge, AskHosts, AskCompiled, AskWhy,
)  # fmt: skip
"""What clients say."""

ANSWERS = (
    SliceGiven, Refused, Acknowledged, Opened, Objects, Usage, Devices, Traced, Gauged,
    Hosts, IsCompiled, Why,
)  # fmt: skip
"""What is told to who asked, with the number of the request."""

NEWS = Finished, Failed, NotCompiled, Fetched, Moved, Closed
"""What clients are told besides."""
