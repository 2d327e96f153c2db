"""Batches and epochs of what file sources read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timelyml.errors import ConfigError
from timelyml.operators.readers import Piece


@dataclass(frozen=True, slots=True)
class Batching:
    """How records become batches, and batches epochs.

    Attributes:
        batch_size: Most records in one batch; None: what one read gives.
        epoch_every: Batches per epoch, on each shard; None: one epoch holds all.
    """

    batch_size: int | None
    epoch_every: int | None

    def piece(self, payload: Any, number: int, end: int) -> Piece:
        """Return batch `number` of a shard, which ends at position `end`."""
        epoch = self._epoch_of(number)
        next_epoch = self._epoch_of(number + 1)
        position = (end, number + 1)
        return Piece(epoch, payload, next_epoch, next_epoch > epoch, position)

    def _epoch_of(self, number: int) -> int:
        return 0 if self.epoch_every is None else number // self.epoch_every


def make_batching(
    operator: str, batch_size: int | None, epoch_every: int | None
) -> Batching:
    """Check the options.

    Raises:
        ConfigError: One is out of range.
    """
    for option, value in (("batch_size", batch_size), ("epoch_every", epoch_every)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(
                f"operator {operator!r} has option {option!r} out of range; got "
                f"{value!r}; expected an integer of at least 1; correct the option",
                operator=operator,
                option=option,
            )
    return Batching(batch_size, epoch_every)
