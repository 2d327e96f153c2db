"""The sizes and settings of one training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from examples.options import check_size

_SIZES = {
    "num_experts": "--experts",
    "layers": "--layers",
    "heads": "--heads",
    "d_model": "--d-model",
    "d_ff": "d_ff",
    "window": "--window",
    "batch": "--batch",
    "steps": "--steps",
    "data_shards": "--data-shards",
    "expert_shards": "--expert-shards",
    "train_bytes": "train_bytes",
    "held_out_bytes": "held_out_bytes",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides the result, so that a run can be repeated.

    `batch` is the number of sequences of a step, over all data shards, and `window` that
    of bytes predicted in each. Experts of `replicate` stand on two shards, in every layer.
    """

    num_experts: int = 8
    top_k: int = 2
    layers: int = 2
    heads: int = 4
    d_model: int = 128
    d_ff: int = 192
    window: int = 64
    batch: int = 48
    steps: int = 300
    data_shards: int = 2
    expert_shards: int = 4
    replicate: tuple[int, ...] = ()
    learning_rate: float = 5e-3
    warmup_steps: int = 40
    balance: float = 0.05
    seed: int = 0
    train_bytes: int = 4 << 20
    held_out_bytes: int = 1 << 19

    def __post_init__(self) -> None:
        object.__setattr__(self, "replicate", tuple(sorted(set(self.replicate))))
        for name, option in _SIZES.items():
            check_size(option, getattr(self, name))
        check_size("--window", self.window, least=4)
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
        if self.num_experts % self.expert_shards:
            raise ValueError(
                f"--experts is uneven; got {self.num_experts}; expected a multiple of "
                f"{self.expert_shards}, the number of --expert-shards; change one of them"
            )
        for expert in self.replicate:
            check_size("--replicate", expert, least=0, most=self.num_experts - 1)
        if self.replicate and self.expert_shards < 2:
            raise ValueError(
                f"--replicate has no second shard; got {self.expert_shards} expert shard; "
                "expected 2 or more; raise --expert-shards"
            )
        if self.d_model % (2 * self.heads):
            raise ValueError(
                f"--d-model is uneven; got {self.d_model}; expected a multiple of "
                f"{2 * self.heads}, twice the number of --heads; change one of them"
            )

    @property
    def shard_batch(self) -> int:
        """Sequences of one data shard in one step."""
        return self.batch // self.data_shards

    @property
    def tokens(self) -> int:
        """Bytes that are predicted in one step."""
        return self.batch * self.window

    def to_dict(self) -> dict[str, Any]:
        """Give the settings as a plain dict, for the report and for checkpoints."""
        return asdict(self)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Settings:
        """Take back what `to_dict` gave.

        Raises:
            ValueError: It is something else.
        """
        names = {field.name for field in fields(cls)}
        if set(told) != names:
            raise ValueError(
                f"--checkpoints holds another model; got settings {sorted(told)}; "
                f"expected {sorted(names)}; name a directory that this program wrote"
            )
        return cls(**told)


def data_shards_for(workers: int, batch: int) -> int:
    """Give the most data shards, at most one per worker, that share a batch evenly.

    >>> data_shards_for(4, 48), data_shards_for(5, 48)
    (4, 4)
    """
    return max(n for n in range(1, max(1, workers) + 1) if batch % n == 0)


def expert_shards_for(experts: int) -> int:
    """Give the most shards, at most 4, that share experts evenly.

    Each has a share in the cost of a step that does not depend on how much there is to
    compute, so small experts share shards.

    >>> expert_shards_for(8), expert_shards_for(6), expert_shards_for(7)
    (4, 3, 1)
    """
    return max(n for n in range(1, 5) if experts % n == 0)
