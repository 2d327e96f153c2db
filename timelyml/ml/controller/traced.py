"""What clients and the controller tell each other about what devices do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AskTrace:
    """Begin to keep what devices do (`Acknowledged` answers), or end it (`Traced`).

    Attributes:
        ends: The request by which it began; 0 begins.
    """

    request: int
    ends: int = 0


@dataclass(frozen=True, slots=True)
class LaunchSpan:
    """What a host launched in one place of the order of its island.

    Times are seconds of the controller's monotonic clock.

    Attributes:
        name: Of the computation; of a block of a program's, those of all, once each.
        client: Whose it is.
        host: The process; a launch that spans several has a span of each.
        results: The buffers that it made which have numbers; see `Handle.buffer`.
        began_s: When its devices were free, and it was launched.
        ended_s: When its host found it over.
    """

    name: str
    client: int
    slice: str
    island: str
    host: int
    results: tuple[int, ...]
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """Pieces of a value that went from one slice to another, of one host or of two.

    Times are seconds of the controller's monotonic clock.

    Attributes:
        began_s: When the value was there and its host began to send.
        ended_s: When the other had put it where it belongs.
    """

    source: int
    source_island: str
    host: int
    island: str
    size_bytes: int
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Traced:
    """What devices did between the two requests.

    Attributes:
        num_left_out: Spans that were too many, or of hosts whose clocks are not known.
        clock_error_s: How far the clocks of two hosts may be apart at most; 0 if one.
    """

    request: int
    launches: tuple[LaunchSpan, ...]
    transfers: tuple[TransferSpan, ...]
    num_left_out: int
    clock_error_s: float
