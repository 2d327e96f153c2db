"""A batch cut into microbatches, of sizes that need not be equal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from timelyml.errors import ConfigError
from timelyml.ml.buckets import bucket_size, num_rows_of, pad_rows


def cut_batch(batch: Any, num_parts: int) -> list[Any]:
    """Cut a tree of arrays along their leading axis, as evenly as it goes.

    Sizes differ by one at most, larger ones first, so that no more than two shapes are
    compiled.

    Raises:
        ConfigError: Leading axes differ, or there are fewer rows than parts.

    >>> [part.tolist() for part in cut_batch(np.arange(8), 3)]
    [[0, 1, 2], [3, 4, 5], [6, 7]]
    """
    sizes = {
        np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(batch)
    }
    if len(sizes) != 1:
        raise ConfigError(
            f"a batch cannot be cut; got leading axes of {sorted(sizes)}; expected one "
            f"number of rows everywhere; give all arrays the same",
            option="batch",
        )
    (size,) = sizes
    if size < num_parts:
        raise ConfigError(
            f"a batch cannot be cut into {num_parts} microbatches; got {size} rows; "
            f"expected one for each at least; use fewer microbatches",
            option="num_microbatches",
        )
    ends = np.cumsum(
        [size // num_parts + (i < size % num_parts) for i in range(num_parts)]
    )
    return [
        jax.tree.map(lambda leaf: np.asarray(leaf)[start:end], batch)  # noqa: B023 - used at once
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def padded(x: Any, target: Any) -> tuple[Any, tuple[Any, Any]]:
    """Add rows of zeros up to a bucket's size; beside the target goes which are real.

    >>> x, (target, is_row) = padded(np.ones((9, 2)), np.ones(9))
    >>> x.shape, target.shape, int(is_row.sum())
    ((10, 2), (10,), 9)
    """
    count = num_rows_of((x, target))
    size = bucket_size(count, smallest=1)
    return pad_rows(x, size), (pad_rows(target, size), np.arange(size) < count)


def masked(loss_fn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return the loss as a function of what `padded` gives beside the input."""

    @functools.wraps(loss_fn)
    def loss(y: Any, target: tuple[Any, Any]) -> Any:
        return loss_fn(y, *target)

    return loss
