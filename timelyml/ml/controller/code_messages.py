"""What clients and the controller tell each other about computations."""

from __future__ import annotations

from dataclasses import dataclass

from timelyml.ml.functions import MemoryNeeds


@dataclass(frozen=True, slots=True)
class Register:
    """Have a computation compiled for a slice.

    Attributes:
        pickled: The computation.
        line: The user's that first called it there, for errors.
    """

    identity: str
    slice: str
    pickled: bytes
    line: str = ""


@dataclass(frozen=True, slots=True)
class NotCompiled:
    """A computation cannot run where its slice stands; `error` is pickled."""

    identity: str
    slice: str
    error: bytes


@dataclass(frozen=True, slots=True)
class AskCompiled:
    """Ask when a registered computation is compiled; `IsCompiled` or `Refused` answers."""

    request: int
    identity: str
    slice: str


@dataclass(frozen=True, slots=True)
class IsCompiled:
    """A computation is compiled; `needs` is what it takes on each device."""

    request: int
    needs: MemoryNeeds
