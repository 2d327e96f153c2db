"""What stands for pickled values in a message that cannot be read as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any


class Unread(Enum):
    """Stands for a pickled value in the rest of a message."""

    FAILED = auto()  # it does not unpickle
    UNTRIED = auto()  # the message was given up before, or because of, another one


def holds_failed(value: Any) -> bool:
    """Whether what did not unpickle stands somewhere in a value.

    >>> holds_failed({"a": [1, (2, Unread.FAILED)]}), holds_failed([Unread.UNTRIED])
    (True, False)
    """
    if isinstance(value, Unread):
        return value is Unread.FAILED
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return any(holds_failed(getattr(value, name)) for name in names)
    if isinstance(value, Mapping):
        return any(map(holds_failed, [*value, *value.values()]))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(holds_failed, value))
    return False
