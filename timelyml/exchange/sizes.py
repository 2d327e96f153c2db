"""How many bytes a payload counts for credit.

Sender and receiver both count, so the figure depends on values only: a payload
that crossed the wire counts exactly what it counted before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from timelyml.exchange.payload import Payload, leaves_of

_SAMPLE = 16  # records looked at in a longer list: one costs up to 3 us
_NESTING = 4
_OTHER_BYTES = 256  # of an object whose size cannot be told from its value
_FIXED_BYTES = {int: 32, float: 24, bool: 32, type(None): 16, complex: 32}


def size_bytes(payload: Payload) -> int:
    """Return the bytes of columns, or an estimate for a list of records.

    Of a list with more than 16 records, up to 16 evenly spaced ones are measured.

    >>> import numpy as np
    >>> size_bytes(np.zeros((4, 8), np.float32))
    128
    """
    if isinstance(payload, np.ndarray):
        return payload.nbytes
    if not isinstance(payload, list):
        return sum(leaf.nbytes for leaf in leaves_of(payload))
    count = len(payload)
    if count <= _SAMPLE:
        return _bytes_of(payload, 0, _NESTING)
    sample = payload[:: -(-count // _SAMPLE)]
    kinds = set(map(type, sample))
    fixed = _FIXED_BYTES.get(kinds.pop()) if len(kinds) == 1 else None
    if fixed is not None:
        return fixed * count
    return _bytes_of(sample, 0, _NESTING) * count // len(sample)


def _bytes_of(values: Iterable[Any], each: int, nesting: int) -> int:
    """Return the bytes of all values, and as many more as `each` for every one.

    A loop of its own, since a call for each number or string takes longer than it.
    """
    total = 0
    for value in values:
        size = _FIXED_BYTES.get(type(value))
        if size is None:
            if type(value) is str:
                size = 56 + len(value)
            elif nesting and type(value) is tuple:
                size = 64 + _bytes_of(value, 8, nesting - 1)
            else:
                size = _other_bytes(value, nesting)
        total += each + size
    return total


def _other_bytes(value: Any, nesting: int) -> int:
    if isinstance(value, (str, bytes, bytearray)):
        return 56 + len(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return 112 + value.nbytes
    if nesting and isinstance(value, dict):
        return 64 + _bytes_of(value.items(), 8, nesting - 1)
    if nesting and isinstance(value, (tuple, list, set, frozenset)):
        return 64 + _bytes_of(value, 8, nesting - 1)
    return _OTHER_BYTES
