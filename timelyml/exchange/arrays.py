"""Arrays as a dtype token, a shape and raw bytes, and back without a copy."""

from __future__ import annotations

import importlib
import math
import re
from functools import lru_cache
from typing import Any

import numpy as np

from timelyml.exchange.garbled import garbled

_MAX_DIMENSIONS = 32
_PLAIN_TOKEN = re.compile(r"[<>|=][biufcmMSUV]\d{1,9}(\[\d{0,9}[a-zA-Z]{1,7}\])?")
_NAMED_TOKEN = re.compile(r"[a-z][a-z0-9_]{1,30}")  # bfloat16, float8_e4m3fn...


@lru_cache(maxsize=256)
def dtype_token(dtype: np.dtype[Any]) -> str | None:
    """Return a short name of the dtype; None if only pickle can describe it."""
    if dtype.hasobject or dtype.names is not None or not dtype.itemsize:
        return None
    if dtype.subdtype is not None or dtype.metadata:
        return None
    if dtype.isbuiltin == 2:  # of `ml_dtypes`; float8_e5m2 says of itself "<f1"
        return dtype.name if _named_dtype(dtype.name) == dtype else None
    return dtype.str if _PLAIN_TOKEN.fullmatch(dtype.str) else None


@lru_cache(maxsize=256)
def _dtype_of(token: str) -> np.dtype[Any]:
    if _PLAIN_TOKEN.fullmatch(token):
        return np.dtype(token)
    found = _named_dtype(token) if _NAMED_TOKEN.fullmatch(token) else None
    if found is None:
        raise garbled(
            "an array has an unknown dtype", repr(token), "one of numpy", token=token
        )
    return found


def _named_dtype(name: str) -> np.dtype[Any] | None:
    """Return a dtype of `ml_dtypes`, which is loaded only when such data comes."""
    try:
        scalar = getattr(importlib.import_module("ml_dtypes"), name, None)
    except ModuleNotFoundError:
        return None
    is_scalar = isinstance(scalar, type) and issubclass(scalar, np.generic)
    return np.dtype(scalar) if is_scalar else None


def raw_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the array's memory as bytes; only a non-contiguous array is copied."""
    contiguous = np.ascontiguousarray(array)
    return contiguous.reshape(-1).view(np.uint8).data


def array_from_bytes(token: Any, shape: Any, data: Any) -> np.ndarray[Any, Any]:
    """Return a read-only array over `data`; copied only if it is misaligned.

    Raises:
        WireError: Shape, dtype and number of bytes do not agree.
    """
    dtype = _dtype_of(token)
    view = memoryview(data).cast("B").toreadonly()
    if len(shape) > _MAX_DIMENSIONS or not all(
        type(length) is int and length >= 0 for length in shape
    ):
        raise garbled("an array has a malformed shape", repr(shape), "a few lengths")
    if math.prod(shape) * dtype.itemsize != view.nbytes:
        raise garbled(
            "an array does not fit its bytes",
            f"{view.nbytes} for shape {list(shape)} of {dtype}",
            str(math.prod(shape) * dtype.itemsize),
            size_bytes=view.nbytes,
        )
    array = np.frombuffer(view, dtype).reshape(shape)
    if not array.flags.aligned:
        array = array.copy()
        array.flags.writeable = False
    return array
