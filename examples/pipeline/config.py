"""The sizes and settings of one training run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from examples.options import check_size

_SIZES = {
    "stages": "--stages",
    "islands": "--islands",
    "microbatches": "--microbatches",
    "steps": "--steps",
    "d_model": "--d-model",
    "layers": "--layers",
    "heads": "--heads",
    "length": "--length",
    "batch": "--batch",
}
TWO_EACH = ("interleaved", "interleaved-zb", "zbv")
"""Schedules that are run with two stages a rank; the others with one."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zbv")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides the result, so that a run can be repeated.

    `batch` is the number of sequences of a step, `length` that of bytes predicted in
    each.
    """

    stages: int = 4
    islands: int = 2
    microbatches: int = 8
    schedule: str = "1f1b"
    steps: int = 200
    d_model: int = 128
    layers: int = 6
    heads: int = 4
    length: int = 64
    batch: int = 32
    is_tied: bool = False
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, option in _SIZES.items():
            check_size(option, getattr(self, name))
        check_size("--seed", self.seed, least=0, most=2**32 - 1)
        if self.schedule not in SCHEDULES:
            raise _error("--schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")
        if self.stages > self.layers + 2:
            most = f"at most {self.layers + 2}: the layers, the embedding and the head"
            raise _error("--stages", self.stages, most)
        if self.schedule in TWO_EACH and self.stages % 2:
            raise _error("--stages", self.stages, f"an even number for {self.schedule}")
        if self.islands > self.ranks:
            raise _error("--islands", self.islands, f"at most {self.ranks}, the slices")
        if self.d_model % (2 * self.heads):
            rule = f"a multiple of {2 * self.heads}, twice the number of heads"
            raise _error("--d-model", self.d_model, rule)
        if self.microbatches > self.batch:
            rule = f"at most {self.batch}, the sequences of a batch"
            raise _error("--microbatches", self.microbatches, rule)

    @property
    def ranks(self) -> int:
        """How many slices there are."""
        return self.stages // (2 if self.schedule in TWO_EACH else 1)

    @property
    def devices_per_island(self) -> int:
        """How many slices the fullest island holds."""
        return -(-self.ranks // self.islands)

    def island_of(self, rank: int) -> str:
        """Name the island of a rank; neighbours share one."""
        return f"island-{rank * self.islands // self.ranks}"

    def to_dict(self) -> dict[str, Any]:
        """Give the settings as a plain dict, for the report."""
        return asdict(self)


def _error(option: str, got: object, expected: str) -> ValueError:
    return ValueError(
        f"{option} does not fit; got {got}; expected {expected}; change one of them"
    )
