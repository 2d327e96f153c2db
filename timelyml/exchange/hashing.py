"""Hashes and destinations of keys, the same in every process and container.

Equal keys hash equally, whatever their type (`1 == 1.0 == True`), and a numpy array
of keys goes where its elements one by one would go. Integers are not hashed but
taken modulo the number of shards, so that placement is even and predictable.
"""

from __future__ import annotations

import datetime as dt
import enum
import hashlib
import math
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml.errors import RoutingError

_WORD = 0xFFFFFFFFFFFFFFFF
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_INT64_LIMIT = 2.0**63
HASHABLE = "numbers, strings, bytes, dates, enum members or tuples of them"


def stable_hash(key: Any) -> int:
    """Return a 64-bit hash of a key that no process or run changes.

    Takes None, booleans, numbers, strings, bytes, dates, enum members, tuples of
    those, and numpy scalars.

    Raises:
        RoutingError: The key is NaN, which equals nothing, or of another type.

    Source:
        splitmix64 (Steele, Lea, Flood, 2014) for numbers; BLAKE2b for bytes.

    >>> stable_hash(1) == stable_hash(1.0) == stable_hash(True)
    True
    """
    if isinstance(key, np.generic):
        key = _plain(key)
    if isinstance(key, str):
        return _hash_bytes(b"s" + key.encode("utf-8", "surrogatepass"))
    number = _as_number(key)
    if number is not None:
        if isinstance(number, float):
            return _splitmix(struct.unpack("<Q", struct.pack("<d", number))[0])
        if -(2**63) <= number < 2**64:
            return _splitmix(number & _WORD)
        size = number.bit_length() // 8 + 1
        return _hash_bytes(b"i" + number.to_bytes(size, "little", signed=True))
    return _hash_other(key)


def destination_of(key: Any, num_shards: int) -> int:
    """Return the shard of one key: integers modulo shards, others by their hash."""
    if type(key) is int:
        return key % num_shards
    if isinstance(key, np.generic):
        key = _plain(key)
    number = _as_number(key)
    if isinstance(number, int):
        return number % num_shards
    return stable_hash(key) % num_shards


def destinations_by_key(keys: Iterable[Any], num_shards: int) -> npt.NDArray[np.intp]:
    """Return the shard of each key; `keys` is an array or any iterable of keys.

    Raises:
        RoutingError: A key cannot be hashed; names the row.
    """
    if isinstance(keys, np.ndarray) and keys.ndim == 1 and keys.dtype.kind in "biuf":
        return _destinations_of_array(keys, num_shards)
    known: dict[Any, int] = {}  # equal keys have one destination
    found: list[int] = []
    if isinstance(keys, np.ndarray) and keys.ndim == 1:
        keys = _moments(keys) if keys.dtype.kind == "M" else keys.tolist()
    for row, key in enumerate(keys):
        try:
            shard = known.get(key)
            if shard is None:
                shard = known[key] = destination_of(key, num_shards)
        except (TypeError, RoutingError) as error:
            raise _unroutable(row, key, error) from error
        found.append(shard)
    return np.fromiter(found, np.intp, len(found))


def _unroutable(row: int, key: Any, error: TypeError | RoutingError) -> RoutingError:
    """Say which row it was, with the rule and the advice of `error` only."""
    if isinstance(error, RoutingError):
        why, rule, advice = (error.values[part] for part in ("why", "rule", "advice"))
    else:
        why, rule, advice = str(error), HASHABLE, "change the key"
    return RoutingError(
        f"a row has a key that cannot be routed; got {key!r} at row {row}: {why}; "
        f"expected {rule}; {advice}",
        row=row,
    )


def _not_hashed(why: str, rule: str, advice: str) -> RoutingError:
    msg = f"a key cannot be hashed; got {why}; expected {rule}; {advice}"
    return RoutingError(msg, why=why, rule=rule, advice=advice)


def _destinations_of_array(
    keys: npt.NDArray[Any], num_shards: int
) -> npt.NDArray[np.intp]:
    if keys.dtype.kind == "u":
        wide: npt.NDArray[Any] = keys.astype(np.uint64, copy=False)
        return (wide % np.uint64(num_shards)).astype(np.intp)
    if keys.dtype.kind != "f":
        return (keys.astype(np.int64, copy=False) % num_shards).astype(np.intp)
    values = keys.astype(np.float64)
    missing = np.isnan(values)
    if missing.any():
        row = int(missing.argmax())
        raise RoutingError(
            f"a row has a key that equals nothing; got nan at row {row}; expected a "
            f"number; filter or replace it before the exchange",
            row=row,
        )
    shards = (_splitmix_array(values.view(np.uint64)) % np.uint64(num_shards)).astype(
        np.intp
    )
    whole = (np.floor(values) == values) & (np.abs(values) < _INT64_LIMIT)
    shards[whole] = values[whole].astype(np.int64) % num_shards
    for row in np.flatnonzero(np.abs(values) >= _INT64_LIMIT).tolist():
        shards[row] = destination_of(float(values[row]), num_shards)
    return shards


def _moments(keys: npt.NDArray[Any]) -> list[Any]:
    """Return moments as what equal ones share, whatever the unit they are counted in.

    Raises:
        RoutingError: One is NaT.
    """
    if (missing := np.isnat(keys)).any():
        row = int(missing.argmax())
        raise RoutingError(
            f"a row has a key that equals nothing; got NaT at row {row}; expected a "
            f"moment; filter or replace it before the exchange",
            row=row,
        )
    micros = keys.astype("M8[us]")
    moments: list[Any] = micros.tolist()
    for row in np.flatnonzero(micros != keys).tolist():  # finer, or out of its range
        seconds = keys[row].astype("M8[s]")
        rest = (keys[row] - seconds).astype("m8[ps]")
        parts = (int(part.astype(np.int64)) for part in (seconds, rest))
        moments[row] = ("moment", *parts)
    return moments


def _plain(key: np.generic) -> Any:
    """Return a scalar as a value of Python that equal ones share."""
    if not isinstance(key, np.datetime64):
        return key.item()
    if np.isnat(key):
        why = "NaT, which equals nothing, not even itself"
        raise _not_hashed(why, "a moment", "filter or replace it before the exchange")
    return _moments(np.array([key]))[0]


def _as_number(key: Any) -> int | float | None:
    """Return a number as the int it equals, or as a float without a whole value."""
    if isinstance(key, int):
        return int(key)
    if isinstance(key, complex) and not key.imag:
        key = key.real
    if isinstance(key, float):
        if math.isnan(key):
            why = "nan, which equals nothing, not even itself"
            raise _not_hashed(
                why, "a number", "filter or replace it before the exchange"
            )
        return int(key) if key.is_integer() else float(key)
    if isinstance(key, np.floating):  # longdouble, whose item() is itself
        return _as_number(float(key))
    return None


def _hash_other(key: Any) -> int:
    if key is None:
        return _splitmix(0x4E6F6E65)
    if isinstance(key, (bytes, bytearray)):
        return _hash_bytes(b"b" + key)
    if isinstance(key, tuple):
        mixed = _splitmix(len(key))
        for item in key:
            mixed = _splitmix(mixed ^ stable_hash(item))
        return mixed
    return stable_hash(_as_tuple(key))


def _as_tuple(key: Any) -> tuple[Any, ...]:
    """Return a tuple that equal keys of the remaining types share."""
    if isinstance(key, complex):
        return "complex", key.real, key.imag
    if isinstance(key, enum.Enum):
        return type(key).__qualname__, key.name
    if isinstance(key, dt.datetime):
        universal = key.astimezone(dt.UTC) if key.tzinfo is not None else key
        return "datetime", universal.replace(fold=0).isoformat()
    if isinstance(key, dt.date):  # equals its midnight, as numpy sees it
        return "datetime", f"{key.isoformat()}T00:00:00"
    why = f"{type(key).__name__}, which has no stable hash"
    raise _not_hashed(why, HASHABLE, "change the key")


def _hash_bytes(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _splitmix(word: int) -> int:
    word = (word + _GAMMA) & _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def _splitmix_array(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = words + np.uint64(_GAMMA)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_2)
    return words ^ (words >> np.uint64(31))
