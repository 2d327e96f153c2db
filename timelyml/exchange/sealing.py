"""Sealing of whole messages: makes the arrays inside them read-only.

Which fields of a message class can hold a payload follows from its annotations, so
that progress and credit messages cost nothing.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from timelyml.exchange.payload import seal
from timelyml.exchange.schema import field_names, is_record

Sealer: TypeAlias = Callable[[Any], None]

_PLAIN = (int, float, bool, str, bytes, type(None))


def seal_message(message: object) -> None:
    """Make every array in the message's payloads read-only, in place."""
    cls: Any = type(message)
    sealer = _sealer_of(cls)
    if sealer is not None:
        sealer(message)


@cache
def _sealer_of(cls: type[Any]) -> Sealer | None:
    if cls in _PLAIN:
        return None
    if not is_record(cls):
        return _seal_value
    hints = typing.get_type_hints(cls)
    found = [(name, _sealer_of_hint(hints[name])) for name in field_names(cls)]
    inner = [(name, sealer) for name, sealer in found if sealer is not None]
    if not inner:
        return None

    def seal_fields(value: Any) -> None:
        for name, sealer in inner:
            sealer(getattr(value, name))

    return seal_fields


def _sealer_of_hint(hint: Any) -> Sealer | None:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if all(_sealer_of_hint(argument) is None for argument in arguments):
            return None
        return seal_message
    if origin is tuple:
        inner = [_sealer_of_hint(arg) for arg in arguments if arg is not Ellipsis]
        return None if not any(inner) else _seal_items
    if isinstance(hint, type):
        return _sealer_of(hint)
    return _seal_value


def _seal_items(items: Any) -> None:
    for item in items:
        seal_message(item)


def _seal_value(value: Any) -> None:
    if isinstance(value, (list, np.ndarray)):
        seal(value)
    elif isinstance(value, dict):
        _seal_items(value.values())
    elif isinstance(value, tuple):
        _seal_items(value)
    elif dataclasses.is_dataclass(type(value)):
        seal_message(value)
