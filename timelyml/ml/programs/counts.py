"""Counts and lists of integers, as users write them: of Python, of numpy, of JAX."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from timelyml.errors import ConfigError


def as_count(who: str, option: str, value: Any, least: int) -> int | None:
    """Return an option that is a count, or None.

    Args:
        who: Whose option it is.
        option: What it is called.
        value: As given: anything with `__index__`, but no boolean.
        least: What it may be at least.

    Raises:
        ConfigError: It is no count, or too small.

    >>> as_count("route", "max_rows", np.int64(3), 1)
    3
    """
    if value is None:
        return None
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < least:
        raise ConfigError(
            f"{who}: option {option!r} cannot work; got {value!r}; expected an integer "
            f"of at least {least}, or None",
            option=option,
        )
    return count


def listed(values: Any) -> Any:
    """Return a list of integers as an array; anything else as it is.

    >>> listed([1, 0]), listed("no list")
    (array([1, 0]), 'no list')
    """
    is_list = isinstance(values, list | tuple) and values
    if is_list and all(isinstance(each, int | np.integer) for each in values):
        return np.asarray(values)
    return values
