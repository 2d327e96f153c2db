"""The sizes and settings of one run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from examples.options import check_size
from examples.pipeline.config import Settings as ModelSettings

_SIZES = (
    "devices", "hosts", "chunks", "steps", "d_model", "layers", "heads", "length",
    "batch",
)  # fmt: skip
ISLANDS = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides the result, so that a run can be repeated.

    Attributes:
        devices: Of each of the two islands; the single one has twice as many.
        hosts: Processes that an island is made of.
        chunks: Parts of the model whose gradients cross by themselves.
        length: Bytes predicted in each of the `batch` sequences of a step.
    """

    devices: int = 2
    hosts: int = 1
    chunks: int = 4
    steps: int = 60
    d_model: int = 128
    layers: int = 6
    heads: int = 4
    length: int = 64
    batch: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_size(f"--{name.replace('_', '-')}", getattr(self, name))
        check_size("--seed", self.seed, least=0, most=2**32 - 1)
        if self.devices % self.hosts:
            raise _error("--devices", self.devices, f"a multiple of {self.hosts} hosts")
        if self.batch % (ISLANDS * self.devices):
            rule = (
                f"a multiple of {ISLANDS * self.devices}, all devices of both islands"
            )
            raise _error("--batch", self.batch, rule)
        if self.chunks > self.layers + 2:
            most = f"at most {self.layers + 2}: the layers, the embedding and the head"
            raise _error("--chunks", self.chunks, most)
        if self.d_model % (2 * self.heads):
            rule = f"a multiple of {2 * self.heads}, twice the number of heads"
            raise _error("--d-model", self.d_model, rule)

    @property
    def model(self) -> ModelSettings:
        """What the model and its training in one program take, of the same sizes."""
        return ModelSettings(
            stages=1,
            islands=1,
            microbatches=1,
            steps=self.steps,
            d_model=self.d_model,
            layers=self.layers,
            heads=self.heads,
            length=self.length,
            batch=self.batch,
            seed=self.seed,
        )

    def to_dict(self) -> dict[str, Any]:
        """Give the settings as a plain dict, for the report."""
        return asdict(self)


def _error(option: str, got: object, expected: str) -> ValueError:
    return ValueError(
        f"{option} does not fit; got {got}; expected {expected}; change one of them"
    )
