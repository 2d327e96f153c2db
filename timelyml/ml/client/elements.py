"""Elements of values: what a client sends of them, and how it puts pieces together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from timelyml.ml.functions import ArrayType, to_host
from timelyml.ml.functions.types import dtype_named
from timelyml.ml.hosts import Piece


def as_sealed(value: Any, array_type: ArrayType) -> Any:
    """Return the elements, of keys their words, as an array that nobody will change."""
    if isinstance(value, jax.Array):
        return to_host(value)
    copied = np.array(value, dtype_named(array_type.physical.dtype), order="C")
    copied.flags.writeable = False
    return copied


def assembled(array_type: ArrayType, pieces: Sequence[Piece]) -> Any:
    """Return the whole, read-only, of pieces that cover it."""
    physical = array_type.physical
    if len(pieces) == 1 and pieces[0].array.shape == physical.shape:
        array = pieces[0].array
    else:
        array = np.empty(physical.shape, dtype_named(physical.dtype))
        for piece in pieces:
            num_dims = len(piece.starts)
            ends = zip(piece.starts, piece.array.shape[:num_dims], strict=True)
            array[tuple(slice(start, start + size) for start, size in ends)] = (
                piece.array
            )
    array.flags.writeable = False
    return array
