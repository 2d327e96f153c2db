"""What the object store is told and what it decides, as values.

A *handle* names a logical buffer, however many shards it has: reference counts, states
and memory are kept per logical buffer (the paper's sections 4.2 and 4.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from timelyml.errors import MemoryLimitError, TimelyError


class Handle(NamedTuple):
    """Name of a logical buffer.

    The client that makes it chooses it, so that calls can use what earlier calls will
    produce without waiting for an answer.
    """

    client: str
    number: int

    def __str__(self) -> str:
        return f"{self.client}/{self.number}"


class BufferState(StrEnum):
    """What has become of a logical buffer."""

    PENDING = "pending"  # what produces it has not finished
    READY = "ready"
    FAILED = "failed"  # what produces it failed, or something before that
    LOST = "lost"  # it went with the devices that held it
    DONATED = "donated"  # its memory was given to a computation


@dataclass(frozen=True, slots=True)
class Buffer:
    """A logical buffer.

    Attributes:
        size_bytes: On the device that holds most of it.
        label: How the user knows it, for errors: of what call it is which output.
    """

    handle: Handle
    placement: str
    size_bytes: int
    label: str = ""

    @property
    def name(self) -> str:
        """The handle, with the label if there is one."""
        return f"{self.handle} ({self.label})" if self.label else str(self.handle)


@dataclass(frozen=True, slots=True)
class Claim:
    """The memory that a call of a program needs.

    Attributes:
        arguments: Buffers that it reads, each once.
        donated: Those of them that it takes over: their memory is its own from the start.
        outputs: Buffers that it makes.
        scratch_bytes: By placement, what it takes on a device beyond its outputs and the
            arguments that it leaves alone, at its peak: temporaries, results that live
            within it, and what of donated memory its outputs cannot use.
    """

    client: str
    program: str
    arguments: tuple[Handle, ...] = ()
    donated: tuple[Handle, ...] = ()
    outputs: tuple[Buffer, ...] = ()
    scratch_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Admit:
    """A program has its memory.

    Attributes:
        returns: Arguments that have to be brought back from host memory first.
    """

    client: str
    program: str
    returns: tuple[Handle, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """A program can never have its memory."""

    client: str
    program: str
    error: MemoryLimitError


@dataclass(frozen=True, slots=True)
class Spill:
    """Bring a buffer that nobody is using to host memory, then say `spilled`."""

    handle: Handle
    placement: str


@dataclass(frozen=True, slots=True)
class Vacant:
    """Nothing is left, and nothing runs, on a placement that is held."""

    placement: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Nobody can ask for a buffer any more: free it on devices and hosts."""

    handle: Handle


@dataclass(frozen=True, slots=True)
class Known:
    """What a client that waits for a buffer is told; no error: it is ready."""

    client: str
    handle: Handle
    error: TimelyError | None = None


StoreEffect: TypeAlias = Admit | Refuse | Spill | Vacant | Delete | Known
