"""What clients and the controller tell each other about what takes long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AskWhy:
    """Ask what a buffer waits for, or if it is 0, slices; `Why` answers."""

    request: int
    buffer: int


@dataclass(frozen=True, slots=True)
class Why:
    """What is waited for, who holds it up, and since when; a sentence or two."""

    request: int
    text: str
