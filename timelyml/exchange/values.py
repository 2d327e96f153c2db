"""Plain Python values that msgpack lacks, as a name and msgpack values."""

from __future__ import annotations

import datetime
from typing import Any

from timelyml.errors import WireError


def encode_plain(value: Any) -> list[Any] | None:
    """Return `[name, *values]` for an integer, complex, set or time; else None.

    Only exact types are taken: a subclass would come back as its base.
    """
    cls = type(value)
    if cls is int:
        return ["int", _int_bytes(value)]
    if cls is complex:
        return ["complex", value.real, value.imag]
    if cls is set or cls is frozenset:
        return [cls.__name__, list(value)]
    if cls is datetime.date:
        return ["date", value.toordinal()]
    if cls is datetime.timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if cls is datetime.datetime and _has_fixed_zone(value):
        return ["datetime", value.isoformat(), value.fold]
    return None


def decode_plain(items: list[Any]) -> Any:
    """Return the value that `encode_plain` described in `items[1:]`.

    Raises:
        WireError: The name is unknown.
    """
    name, first, *rest = items[1:]
    if name == "int":
        return int.from_bytes(first, "little", signed=True)
    if name == "complex":
        return complex(first, *rest)
    if name == "set":
        return set(first)
    if name == "frozenset":
        return frozenset(first)
    if name == "date":
        return datetime.date.fromordinal(first)
    if name == "timedelta":
        return datetime.timedelta(first, *rest)
    if name == "datetime":
        return datetime.datetime.fromisoformat(first).replace(fold=rest[0])
    raise WireError(f"a frame holds an unknown kind of value; got {name!r}", name=name)


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _has_fixed_zone(value: datetime.datetime) -> bool:
    """Whether the ISO form says all; a named time zone would be lost."""
    zone = value.tzinfo
    return zone is None or zone == datetime.timezone.utc
