"""What clients and the controller tell each other.

A client numbers its buffers itself, within a range that is its own, so that it can use
what a call returns in the next call without waiting for an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    """

    request: int
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    kind: str | None = None
    island: str | None = None
    memory_bytes: int = 0
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class DropSlice:
    """Give a slice back."""

    slice: str


@dataclass(frozen=True, slots=True)
class Register:
    """Have a computation compiled for a slice; `pickled` is the computation."""

    identity: str
    slice: str
    pickled: bytes


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
    """

    computation: str
    slice: str
    args: tuple[int, ...]
    outs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RegisterProgram:
    """Have a program ready to be called under a number that its client chose.

    Attributes:
        pickled: The `Program`, after all passes.
        given: Those of its inputs that a call gives away.
        is_sequential: Whether a computation waits for the end of those before it.
    """

    program: int
    pickled: bytes
    given: tuple[int, ...]
    is_sequential: bool


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
class Release:
    """The client does not need these buffers any more."""

    buffers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask for the elements of a buffer; `Fetched` answers."""

    buffer: int


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
class Finished:
    """Calls are over.

    Attributes:
        num_calls: How many.
        buffers: What they returned, all there now.
        values: Those that are small, whole.
    """

    num_calls: int
    buffers: tuple[int, ...]
    values: tuple[tuple[int, Any], ...]


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
