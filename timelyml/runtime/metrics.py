"""Figures of several workers, merged into those of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PEAK_SUFFIX = "_peak"


def merge_metrics(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add equal figures up, key by key; of a `..._peak` the largest counts.

    >>> merge_metrics([{"a": {"n": 1, "x_peak": 5}}, {"a": {"n": 2, "x_peak": 3}}])
    {'a': {'n': 3, 'x_peak': 5}}
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key not in merged:
                merged[key] = merge_metrics([value]) if _is_map(value) else value
            elif _is_map(value):
                merged[key] = merge_metrics([merged[key], value])
            elif isinstance(value, (int, float)):
                both = (merged[key], value)
                merged[key] = max(both) if key.endswith(PEAK_SUFFIX) else sum(both)
    return merged


def _is_map(value: object) -> bool:
    return isinstance(value, Mapping)
