"""How many tokens an expert takes from a group: one formula per reference system.

Pure Python on numbers that the host knows. `num_tokens` is that of the group (a
sequence, or a fixed number of tokens), never of a shard or a padded bucket: another
group size gives other results. Every formula gives at least 1, for a capacity of 0
would drop everything without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from timelyml.errors import ConfigError

Formula = Literal[
    "ceil", "fixed", "flaxformer", "maxtext", "megablocks", "mesh", "tutel"
]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of each expert, as a function of the tokens in a group.

    Attributes:
        factor: How much more than an even share an expert takes. What 0 and less
            mean is said at `of`.
        formula: Whose arithmetic; see `of`.
        minimum: The least capacity. DeepSpeed uses 4 (layer) or 8 (gate),
            flaxformer and mesh-tensorflow 4.
        alignment: Round up to a multiple of this ("tutel" only).

    >>> Capacity(1.25).of(10, num_experts=4, top_k=2)
    7
    >>> Capacity(0.5).of(2, num_experts=8, top_k=1)
    1
    """

    factor: float
    formula: Formula = "ceil"
    minimum: int = 1
    alignment: int = 1

    def __post_init__(self) -> None:
        may_be_zero = self.formula in ("megablocks", "tutel")
        may_be_negative = self.formula == "tutel"
        if (
            self.formula not in _FORMULAS
            or not math.isfinite(self.factor)
            or (self.factor == 0 and not may_be_zero)
            or (self.factor < 0 and not may_be_negative)
            or (self.formula == "fixed" and self.factor != int(self.factor))
            or self.minimum < 1
            or self.alignment < 1
        ):
            raise ConfigError(
                f"capacity cannot work; got {self!r}; expected a factor above 0 and a "
                f"minimum of 1 or more, formula one of {sorted(_FORMULAS)}; only "
                "'megablocks' and 'tutel' define a factor of 0, 'tutel' one below, and "
                "'fixed' takes whole numbers",
                option="capacity",
            )

    def of(
        self,
        num_tokens: int,
        *,
        num_experts: int,
        top_k: int,
        largest_count: int | None = None,
    ) -> int | None:
        """Give the capacity of every expert; None if nothing may be dropped.

        - "ceil": `ceil(tokens / experts * top_k * factor)`.
        - "fixed": `factor` itself, a whole number.
        - "megablocks": the same as "ceil", but rounded down; a factor of 0 drops nothing.
        - "flaxformer": `round(tokens / experts * factor)`, half to even, no `top_k`.
        - "mesh": `min(tokens, int(tokens * factor / experts))`, no `top_k`.
        - "maxtext": `max(ceil(tokens * top_k / experts) * factor, factor)` rounded
          down, made for one sequence per group.
        - "tutel": `top_k * int(factor * ceil(tokens / experts))`. A factor of 0
          gives the largest count, one below 0 the lesser of both.

        Args:
            num_tokens: In the group, without padding.
            num_experts: Number of experts.
            top_k: Experts per token.
            largest_count: The largest count of any expert, over all shards; for
                "tutel" with a factor of 0 or less.

        Source:
            GShard, DeepSpeed and Megatron (ceil), transformers' Switch (fixed),
            MegaBlocks, flaxformer, mesh-tensorflow, MaxText, Tutel. Where they can give 0, this gives the
            minimum.
        """
        if self.formula == "megablocks" and self.factor == 0:
            return None
        raw = _FORMULAS[self.formula](self.factor, num_tokens, num_experts, top_k)
        if self.formula == "tutel" and self.factor <= 0:
            raw = _bounded_by_counts(self.factor, raw, largest_count)
        aligned = -(-raw // self.alignment) * self.alignment
        return max(aligned, self.minimum)


def _ceil(factor: float, tokens: int, experts: int, top_k: int) -> int:
    return math.ceil(tokens / experts * (factor * top_k))


def _fixed(factor: float, *_: int) -> int:
    return int(factor)


def _megablocks(factor: float, tokens: int, experts: int, top_k: int) -> int:
    return int(factor * (top_k * tokens / experts))


def _flaxformer(factor: float, tokens: int, experts: int, _: int) -> int:
    return round(factor * tokens / experts)


def _mesh(factor: float, tokens: int, experts: int, _: int) -> int:
    return min(tokens, int(tokens * factor / experts))


def _maxtext(factor: float, tokens: int, experts: int, top_k: int) -> int:
    return int(max(math.ceil(tokens * top_k / experts) * factor, factor))


def _tutel(factor: float, tokens: int, experts: int, top_k: int) -> int:
    return top_k * int(abs(factor) * -(-tokens // experts))


def _bounded_by_counts(factor: float, raw: int, largest_count: int | None) -> int:
    if largest_count is None:
        raise ConfigError(
            f"capacity follows the counts; got factor {factor!r} and no count; expected "
            "the largest count of all shards; pass largest_count",
            option="largest_count",
        )
    return largest_count if factor == 0 else min(raw, largest_count)


_FORMULAS: dict[str, Callable[[float, int, int, int], int]] = {
    "ceil": _ceil,
    "fixed": _fixed,
    "flaxformer": _flaxformer,
    "maxtext": _maxtext,
    "megablocks": _megablocks,
    "mesh": _mesh,
    "tutel": _tutel,
}
