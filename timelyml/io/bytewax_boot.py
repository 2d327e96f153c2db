"""What a worker tells the Bytewax process that it starts: one line of JSON.

The pickled function that builds the dataflow follows it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class GuestBoot:
    """What a Bytewax process must know.

    Attributes:
        name: Of the operator that it feeds, for messages.
        process_index: Its index in the Bytewax cluster.
        addresses: Of all processes of that cluster; none, if there is only one.
        epoch_interval_s: How long an epoch of Bytewax is.
        credit_bytes: Bytes that may be under way to the worker.
        has_columns: Whether each item is a block of columns, rather than a record.
        is_regular: Whether each item is an epoch of its own.
        token: Shared secret of the link, in hex.
        bind: Where its transport binds.
        host: The worker's endpoint, as a mapping.
        sys_path: The worker's `sys.path`, so that the same modules import.
        num_build_bytes: Length of the pickled function.
    """

    name: str
    process_index: int
    addresses: list[str]
    epoch_interval_s: float
    credit_bytes: int
    has_columns: bool
    is_regular: bool
    token: str = field(repr=False)
    bind: str
    host: dict[str, Any]
    sys_path: list[str]
    num_build_bytes: int

    def to_line(self) -> bytes:
        """Return the line that the process reads."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> GuestBoot:
        """Read the line that the worker wrote."""
        return cls(**json.loads(line))
