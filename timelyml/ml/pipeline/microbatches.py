"""A batch cut into microbatches, of sizes that need not be equal."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from timelyml.errors import ConfigError


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
