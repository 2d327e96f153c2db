"""What the network must beat: an interpolated order-2 model counted in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from examples.corpus import Text

_BYTES = 256


class OrderTwo:
    """Predicts a byte from the two before it, falling back to one and to none.

    Source:
        Witten-Bell interpolation: a context that was seen n times, with t kinds of
        successors, trusts its own counts by n / (n + t).
    """

    def __init__(self, text: Text) -> None:
        at = text.positions(np.arange(text.num_bytes))
        wide = text.content.astype(np.int64)
        before, last, target = wide[at - 2], wide[at - 1], wide[at]
        pair = last * _BYTES + target
        self._counts = [
            np.bincount(target, minlength=_BYTES),
            np.bincount(pair, minlength=_BYTES**2),
            np.bincount(before * _BYTES**2 + pair, minlength=_BYTES**3),
        ]
        self._counts = [table.reshape(-1, _BYTES) for table in self._counts]
        self._totals = [table.sum(axis=1) for table in self._counts]
        self._kinds = [(table > 0).sum(axis=1) for table in self._counts]

    def bits_per_byte(
        self, context: NDArray[np.uint8], target: NDArray[np.uint8]
    ) -> float:
        """Give the mean code length in bits of targets after their contexts."""
        last = context[:, -1].astype(np.int64)
        before = context[:, -2].astype(np.int64)
        chance = np.full(len(target), 1 / _BYTES)
        rows = [np.zeros_like(last), last, before * _BYTES + last]
        for counts, totals, kinds, row in zip(
            self._counts, self._totals, self._kinds, rows, strict=True
        ):
            seen = counts[row, target] + kinds[row] * chance
            whole = totals[row] + kinds[row]
            chance = np.where(whole > 0, seen / np.maximum(whole, 1), chance)
        return float(-np.log2(chance).mean())
