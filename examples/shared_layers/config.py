"""The sizes and settings of one run."""

from __future__ import annotations

from dataclasses import dataclass

from examples.options import check_size

_SIZES = ("steps", "pretraining_steps", "rows", "layers", "d_model", "length")
HEADS = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides the result; `rows` is the batch of each task."""

    steps: int = 100
    pretraining_steps: int = 50
    rows: int = 32
    layers: int = 4
    d_model: int = 64
    length: int = 32
    rate: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_size(f"--{name.replace('_', '-')}", getattr(self, name))
        check_size("--seed", self.seed, least=0, most=2**32 - 1)
        if self.d_model % (2 * HEADS):
            raise ValueError(
                f"--d-model does not fit; got {self.d_model}; expected a multiple of "
                f"{2 * HEADS}, twice the number of heads; change it"
            )
