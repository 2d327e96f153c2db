"""Plain Python values that msgpack lacks, and lists of records as columns."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from timelyml.exchange.arrays import dtype_token
from timelyml.exchange.garbled import garbled

NATIVE = frozenset({int, float, str, bytes, bool, type(None)})
"""Types that msgpack carries as they are."""

_NUMBERS = frozenset(np.dtype(code).type for code in "?bhilqBHILQefdFD")
_SMALL_BYTES = 1024


def encode_plain(value: Any) -> list[Any] | None:
    """Return `[name, *values]` for an integer, complex, set or time; else None.

    Only exact types are taken: a subclass would come back as its base. Times in a
    named zone are left to pickle.
    """
    cls = type(value)
    encode = _ENCODERS.get(cls)
    if encode is None or (cls is dt.datetime and value.tzinfo not in (None, dt.UTC)):
        return None
    return [cls.__name__, *encode(value)]


def decode_plain(items: list[Any]) -> Any:
    """Return the value that `encode_plain` described in `items[1:]`.

    Raises:
        WireError: The name is unknown.
    """
    _, name, *values = items
    decode = _DECODERS.get(name)
    if decode is None:
        raise garbled(
            "a frame holds an unknown kind of value",
            f"{name!r:.80}",
            f"one of {list(_DECODERS)}",
        )
    return decode(*values)


def _encode_int(value: int) -> list[Any]:
    size = value.bit_length() // 8 + 1
    return [value.to_bytes(size, "little", signed=True)]


def _decode_int(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _decode_datetime(text: str, fold: int) -> dt.datetime:
    return dt.datetime.fromisoformat(text).replace(fold=fold)


_ENCODERS: dict[type[Any], Callable[[Any], list[Any]]] = {
    int: _encode_int,
    complex: lambda value: [value.real, value.imag],
    set: lambda value: [list(value)],
    frozenset: lambda value: [list(value)],
    dt.date: lambda value: [value.toordinal()],
    dt.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    dt.datetime: lambda value: [value.isoformat(), value.fold],
}

PLAIN = frozenset(_ENCODERS)
"""Types that `encode_plain` takes."""

_DECODERS: dict[str, Callable[..., Any]] = {
    "int": _decode_int,
    "complex": complex,
    "set": set,
    "frozenset": frozenset,
    "date": dt.date.fromordinal,
    "timedelta": dt.timedelta,
    "datetime": _decode_datetime,
}


def columns_of(records: Sequence[Any], kinds: set[type[Any]]) -> list[list[Any]] | None:
    """Return the columns of equally long tuples; None if records are others."""
    if kinds != {tuple} or len(widths := set(map(len, records))) > 1:
        return None
    width = widths.pop()
    flat = list(chain.from_iterable(records))
    return [flat[start::width] for start in range(width)]


def as_array(records: Sequence[Any], kinds: set[type[Any]]) -> Any:
    """Return numpy scalars, or small arrays of one shape, as one array; else None.

    Its items, by iteration, are the records again.
    """
    if len(kinds) > 1:
        return None
    (kind,) = kinds
    if kind in _NUMBERS:
        return np.array(records, kind)
    if kind is np.ndarray and records[0].nbytes <= _SMALL_BYTES and records[0].ndim:
        forms = {(record.dtype, record.shape) for record in records}
        if len(forms) == 1 and dtype_token(records[0].dtype) is not None:
            return np.stack(records)
    return None
