"""Row counts rounded up to a few bucket sizes, so that XLA compiles a few shapes.

What a sparse exchange delivers has another number of rows at each timestamp, and
a new shape costs XLA 0.1 to 0.4 s. Padding rows are zeros; a caller cuts them off
again. Pure: numpy only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optree

_STEPS_PER_OCTAVE = 8
"""A size is rounded up to this fraction of the next power of two."""


def bucket_size(num_rows: int, *, smallest: int = 16) -> int:
    """Round a number of rows up to an eighth of the next power of two.

    Between two powers of two there are four such sizes, so a thousandfold range of
    row counts needs about forty shapes and pads by a tenth on average.

    Args:
        num_rows: Actual rows; 0 stays 0, since nothing is computed then.
        smallest: Smallest bucket above 0.

    >>> [bucket_size(rows) for rows in (0, 1, 16, 17, 33, 257, 1000)]
    [0, 16, 16, 20, 40, 320, 1024]
    """
    if num_rows < 0:
        raise ValueError(
            f"bucket_size: negative row count; got {num_rows!r}; expected 0 or more; "
            "count rows with num_records"
        )
    if num_rows == 0:
        return 0
    rows = max(num_rows, smallest)
    octave = 1 << (rows - 1).bit_length()
    step = max(1, octave // _STEPS_PER_OCTAVE)
    return -(-rows // step) * step


def octave_sizes(most: int, *, smallest: int = 16) -> tuple[int, ...]:
    """Return those of the bucket sizes that double, and the largest that is needed.

    For whoever compiles all sizes ahead: a handful, where `bucket_size` would take
    four times as many to pad less.

    Args:
        most: Rows at most; the last size is just as many.
        smallest: As of `bucket_size`.

    >>> octave_sizes(100), octave_sizes(16), octave_sizes(5)
    ((16, 32, 64, 100), (16,), (5,))
    """
    sizes = []
    size = smallest
    while size < most:
        sizes.append(size)
        size *= 2
    return (*sizes, most)


def num_rows_of(tree: Any) -> int:
    """Give the length of the leading axis that the arrays of a pytree share."""
    lengths = {np.shape(leaf)[0] for leaf in optree.tree_leaves(tree)}
    if len(lengths) != 1:
        raise ValueError(
            f"num_rows_of: leading axes differ; got {sorted(lengths)!r}; expected one "
            "length; columns of a batch share their leading axis"
        )
    return int(lengths.pop())


def pad_rows(tree: Any, size: int) -> Any:
    """Append zero rows to every array of a pytree until its leading axis is `size`.

    Arrays of that length already are returned as they are, without a copy.
    """

    def pad(leaf: Any) -> Any:
        array = np.asarray(leaf)
        missing = size - array.shape[0]
        if missing == 0:
            return array
        if missing < 0:
            raise ValueError(
                f"pad_rows: more rows than the bucket; got {array.shape[0]!r}; expected "
                f"at most {size}; round up with bucket_size"
            )
        padded = np.zeros((size, *array.shape[1:]), array.dtype)
        padded[: array.shape[0]] = array
        return padded

    return optree.tree_map(pad, tree)


def cut_rows(tree: Any, num_rows: int) -> Any:
    """Keep the first `num_rows` rows of every array of a pytree, as views."""
    return optree.tree_map(lambda leaf: np.asarray(leaf)[:num_rows], tree)


def on_buckets(function: Callable[[Any], Any], rows: Any, *, smallest: int = 16) -> Any:
    """Apply a row-wise function to rows padded to a bucket, and cut the result."""
    count = num_rows_of(rows)
    padded = pad_rows(rows, bucket_size(count, smallest=smallest))
    return cut_rows(function(padded), count)
