"""What the object store is told and what it decides, as values.

A *logical buffer* is one, however many shards it has: reference counts, states and
memory are kept per logical buffer (the paper's sections 4.2 and 4.6). It is known by a
number, which the client that makes it chooses, so that calls can use what earlier calls
will produce without waiting for an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from timelyml.errors import MemoryLimitError
from timelyml.ml.functions import ArrayType, Spec

CLIENT_BITS = 40
"""A client's buffers are its number, shifted by so many bits, and a count."""


class BufferState(StrEnum):
    """What has become of a logical buffer."""

    PENDING = "pending"  # what produces it has not finished
    READY = "ready"
    FAILED = (
        "failed"  # what produces it failed, or something before that, or it is lost
    )


class Buffer(NamedTuple):
    """A logical buffer.

    Attributes:
        placement: The slice that it lies on.
        type: Shape and element type of the whole.
        spec: How it is sharded over the slice.
        size_bytes: On the device that holds most of it.
        host_bytes: In the memory of the host that holds most of it, if it is spilled.
        label: How the user knows it, for errors: of what call it is which output.
    """

    number: int
    placement: str
    type: ArrayType
    spec: Spec
    size_bytes: int
    host_bytes: int
    label: str = ""

    @property
    def name(self) -> str:
        """The client that chose the number, and its count.

        >>> of = ArrayType((2,), "int8", 1)
        >>> Buffer((3 << CLIENT_BITS) + 7, "slice-1", of, (), 2, 2).name
        '3/7'
        """
        return f"{self.number >> CLIENT_BITS}/{self.number & (1 << CLIENT_BITS) - 1}"

    def __str__(self) -> str:
        label = f" ({self.label})" if self.label else ""
        return f"{self.name}{label}: {self.type}, {self.size_bytes:,} bytes"


class Claim(NamedTuple):
    """The memory that a call of a program needs.

    Attributes:
        program: The call's name.
        label: What people know it as.
        arguments: Buffers that it reads, each once.
        exported: Those of them that are only sent elsewhere, from wherever they are: a
            copy on the host does.
        donated: Those of them that it takes over: their memory is its own from the start.
        outputs: Buffers that it makes.
        scratch_bytes: By placement, what it takes on a device beyond its outputs and the
            arguments that it leaves alone, at its peak: temporaries, results that live
            within it, and what of donated memory its outputs cannot use.
    """

    client: int
    program: str
    arguments: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()
    outputs: tuple[Buffer, ...] = ()
    scratch_bytes: Mapping[str, int] = MappingProxyType({})
    label: str = ""
    exported: tuple[int, ...] = ()

    def without(self, placement: str) -> Claim:
        """Return what is left of it where a placement is gone."""
        scratch = {x: n for x, n in self.scratch_bytes.items() if x != placement}
        outputs = tuple(x for x in self.outputs if x.placement != placement)
        return self._replace(scratch_bytes=scratch, outputs=outputs)


class Admit(NamedTuple):
    """A program has its memory.

    Attributes:
        returns: Arguments that have to be brought back from host memory first.
    """

    program: str
    returns: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """A program can never have its memory."""

    program: str
    error: MemoryLimitError


@dataclass(frozen=True, slots=True)
class Spill:
    """Bring a buffer that nobody is using to host memory, then say `spilled`."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Vacant:
    """Nothing is left, and nothing runs, on a placement that is held."""

    placement: str


LedgerEffect: TypeAlias = Admit | Refuse | Spill | Vacant


class Delete(NamedTuple):
    """Nobody can ask for a buffer any more: free it on devices and hosts."""

    buffer: Buffer


class Known(NamedTuple):
    """What a client is told that waits for a buffer; no error: it is ready.

    `error` is pickled, as it came from where it happened.
    """

    client: int
    number: int
    error: bytes | None = None


DirectoryEffect: TypeAlias = Delete | Known
