"""What a Bytewax process and the worker that it feeds say to each other.

The same codec and transport as between workers: arrays travel as they are, and
everything is authenticated by a token that only the two know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timelyml.exchange import Codec, Endpoint
from timelyml.runtime.shipping import dumps

HOST = 0
"""The worker's end of the link."""

GUEST = 1
"""The Bytewax process's end."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The Bytewax process is there; where it listens."""

    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class FedBlock:
    """Records or columns of one epoch, the credit that they cost, whether it is over."""

    epoch: int
    size_bytes: int
    payload: Any
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Passed:
    """Nothing more comes before `epoch`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The Bytewax dataflow has come to its end."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The Bytewax dataflow failed.

    Attributes:
        step: What Bytewax says, which names the step.
        error: The user's exception, pickled; None if it cannot be.
        traceback_text: Its traceback.
    """

    step: str
    error: bytes | None
    traceback_text: str


@dataclass(frozen=True, slots=True)
class Credit:
    """Bytes that were taken into the dataflow."""

    size_bytes: int


GuestMessage = Arrived | FedBlock | Passed | Finished | Broken

MESSAGES = (Arrived, FedBlock, Passed, Finished, Broken, Credit)


def feed_codec() -> Codec:
    """Return a codec for these messages."""
    return Codec(MESSAGES, allow_pickle=True, dumps=dumps)
