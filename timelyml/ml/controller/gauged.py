"""What clients and the controller tell each other about what takes memory at most."""

from __future__ import annotations

from dataclasses import dataclass

MAX_GROUPS = 1 << 16
"""Of a gauge."""


@dataclass(frozen=True, slots=True)
class OpenGauge:
    """Ask for a gauge; `Acknowledged` answers, and the request is its number."""

    request: int


@dataclass(frozen=True, slots=True)
class CountBuffers:
    """Have a gauge count own buffers while they are on devices, once they are made.

    Attributes:
        gauge: Its number.
        group: What is counted apart from others; below `MAX_GROUPS`.
        item: What they are part of; it is there while any of its buffers is.
    """

    gauge: int
    group: int
    item: int
    buffers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadGauge:
    """Ask for the peaks of a gauge (`Gauged` answers), and perhaps end it."""

    request: int
    gauge: int
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Gauged:
    """What there was at most: of each group its number, items, and bytes."""

    request: int
    peaks: tuple[tuple[int, int, int], ...]
