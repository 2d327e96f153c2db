"""The sizes and settings of one training run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from examples.options import check_size

_SIZES = {
    "num_experts": "--experts",
    "d_model": "--d-model",
    "d_byte": "d_byte",
    "d_ff": "d_ff",
    "window": "window",
    "batch": "--batch",
    "steps": "--steps",
    "data_shards": "--data-shards",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides the result, so that a run can be repeated.

    `batch` is the number of bytes predicted per step, over all data shards.
    """

    num_experts: int = 8
    top_k: int = 2
    d_model: int = 128
    d_byte: int = 32
    d_ff: int = 192
    window: int = 12
    batch: int = 2048
    steps: int = 600
    data_shards: int = 2
    learning_rate: float = 6e-3
    warmup_steps: int = 40
    balance: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        for name, option in _SIZES.items():
            check_size(option, getattr(self, name))
        check_size("--seed", self.seed, least=0, most=2**32 - 1)
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"--top-k is out of range; got {self.top_k}; expected 1 to "
                f"{self.num_experts}, the number of --experts; lower it"
            )
        if self.batch % self.data_shards:
            raise ValueError(
                f"--batch is uneven; got {self.batch}; expected a multiple of "
                f"{self.data_shards}, the number of --data-shards; change one of them"
            )

    @property
    def shard_batch(self) -> int:
        """Tokens of one data shard in one step."""
        return self.batch // self.data_shards

    def to_dict(self) -> dict[str, Any]:
        """Give the settings as a plain dict, for the report."""
        return asdict(self)


def data_shards_for(workers: int, batch: int) -> int:
    """Give the most data shards, at most one per worker, that share a batch evenly.

    >>> data_shards_for(4, 2048), data_shards_for(3, 2048)
    (4, 2)
    """
    return max(n for n in range(1, max(1, workers) + 1) if batch % n == 0)
