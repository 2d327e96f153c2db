"""Schemas of messages: from a dataclass's annotations to flat msgpack values.

A message is a frozen dataclass (or a named tuple) of plain fields, other such
classes, and tuples of them; `Any` fields hold user values. Structure that the
annotations fix is not described on the wire, and is checked when it arrives.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from timelyml.errors import WireError

Convert: TypeAlias = Callable[[Any], Any]

_SCALARS = (int, float, bool, str, bytes)


class Schema:
    """How the fields of one message class become a list and back.

    A schema is built once per class and codec; `encode` and `decode` run for each
    message, so they touch only the fields that need it.
    """

    def __init__(self, cls: type[Any], index: int) -> None:
        self.cls = cls
        self.index = index
        self.encode: Convert = list
        self.decode: Convert = list

    def compile(self, registry: dict[type[Any], Schema], any_field: Convert) -> None:
        """Fill in `encode` and `decode`; nested classes join the registry."""
        hints = typing.get_type_hints(self.cls)
        names = field_names(self.cls)
        pairs = [_converters(hints[name], registry, any_field) for name in names]
        self.encode = _row_encoder(names, [encode for encode, _ in pairs])
        self.decode = _row_decoder(self.cls, [decode for _, decode in pairs])


def build_schemas(
    message_types: Sequence[type[Any]], any_field: Convert
) -> dict[type[Any], Schema]:
    """Return schemas of the classes and of those nested in them, in a fixed order."""
    registry: dict[type[Any], Schema] = {}
    for cls in message_types:
        registry[cls] = Schema(cls, len(registry))
    for cls in message_types:
        for inner in _nested_classes(cls):
            if inner not in registry:
                registry[inner] = Schema(inner, len(registry))
    for schema in registry.values():
        schema.compile(registry, any_field)
    return registry


def field_names(cls: type[Any]) -> tuple[str, ...]:
    """Return the fields of a dataclass or named tuple, in order."""
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return tuple(cls._fields)


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (
        dataclasses.is_dataclass(hint)
        or (issubclass(hint, tuple) and hasattr(hint, "_fields"))
    )


def _nested_classes(cls: type[Any]) -> Iterator[type[Any]]:
    waiting = list(typing.get_type_hints(cls).values())
    seen = set()
    while waiting:
        hint = waiting.pop(0)
        waiting += typing.get_args(hint)
        if _is_record(hint) and hint not in seen:
            seen.add(hint)
            yield hint
            waiting += typing.get_type_hints(hint).values()


def _row_encoder(names: Sequence[str], encoders: Sequence[Convert | None]) -> Convert:
    special = [(i, encode) for i, encode in enumerate(encoders) if encode is not None]
    if not names:
        return _no_fields
    if len(names) == 1:
        (name,) = names
        first = encoders[0]
        if first is None:
            return lambda message: [getattr(message, name)]
        return lambda message: [first(getattr(message, name))]
    getter = operator.attrgetter(*names)
    if not special:
        return lambda message: list(getter(message))

    def encode_fields(message: Any) -> list[Any]:
        values = list(getter(message))
        for position, encode in special:
            values[position] = encode(values[position])
        return values

    return encode_fields


def _no_fields(_: Any) -> list[Any]:
    return []


def _row_decoder(cls: type[Any], decoders: Sequence[Convert | None]) -> Convert:
    special = [(i, decode) for i, decode in enumerate(decoders) if decode is not None]
    width = len(decoders)

    def decode_fields(values: Any) -> Any:
        if type(values) is not list or len(values) != width:
            raise WireError(
                f"a message does not fit its class {cls.__name__}; got "
                f"{type(values).__name__}; expected {width} fields",
                message_type=cls.__name__,
            )
        for position, decode in special:
            values[position] = decode(values[position])
        return cls(*values)

    return decode_fields


def _converters(
    hint: Any, registry: dict[type[Any], Schema], any_field: Convert
) -> tuple[Convert | None, Convert | None]:
    """Return how a value of the annotation is encoded and decoded; None: as it is."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        return None, _scalar_decoder(hint)
    if _is_record(hint):
        schema = registry[hint]
        # Looked up when called: schemas may refer to ones not compiled yet.
        return (lambda value: schema.encode(value)), (
            lambda value: schema.decode(value)
        )
    if origin in (typing.Union, types.UnionType):
        return _union_converters(arguments, registry, any_field)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _tuple_converters(arguments[0], registry, any_field)
    if hint is Any:
        return any_field, None
    return None, None


def _union_converters(
    options: Sequence[Any], registry: dict[type[Any], Schema], any_field: Convert
) -> tuple[Convert | None, Convert | None]:
    """Convert `Record | None` by its record; other unions are user values."""
    inner = [option for option in options if option is not type(None)]
    if len(inner) != 1 or len(inner) == len(options) or not _is_record(inner[0]):
        return None, None
    encode, decode = _converters(inner[0], registry, any_field)
    return _unless_none(encode), _unless_none(decode)


def _unless_none(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda value: None if value is None else convert(value)


def _tuple_converters(
    item: Any, registry: dict[type[Any], Schema], any_field: Convert
) -> tuple[Convert | None, Convert | None]:
    """Convert `tuple[item, ...]`; rows of plain values travel flat, as one list."""
    arguments = typing.get_args(item)
    is_row = typing.get_origin(item) is tuple and Ellipsis not in arguments
    if is_row and all(_is_plain(argument) for argument in arguments):
        return _flatten_rows, _rows_decoder(len(arguments))
    encode, decode = _converters(item, registry, any_field)
    return _items_encoder(encode), _items_decoder(decode)


def _is_plain(hint: Any) -> bool:
    """Whether a value of the annotation is its own msgpack value, or a timestamp."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return all(_is_plain(option) for option in typing.get_args(hint))
    return hint in _SCALARS or hint == tuple[int, ...]


def _flatten_rows(rows: Any) -> list[Any]:
    return list(chain.from_iterable(rows))


def _rows_decoder(width: int) -> Convert:
    allowed = {int, float, bool, str, bytes, tuple}

    def decode_rows(flat: Any) -> Any:
        if type(flat) is list and not allowed.issuperset(map(type, flat)):
            flat = [v.item() if isinstance(v, np.generic) else v for v in flat]
        if (
            type(flat) is not list
            or len(flat) % width
            or not allowed.issuperset(map(type, flat))
        ):
            raise WireError(
                f"a message holds malformed rows; got {type(flat).__name__}; expected "
                f"plain values in groups of {width}",
                width=width,
            )
        values = iter(flat)
        return tuple(zip(*(values,) * width, strict=True))

    return decode_rows


def _items_encoder(encode: Convert | None) -> Convert:
    if encode is None:
        return list
    return lambda items: [encode(item) for item in items]


def _items_decoder(decode: Convert | None) -> Convert:
    def decode_items(items: Any) -> Any:
        if type(items) is not list:
            raise WireError(
                f"a message holds no sequence where one belongs; got "
                f"{type(items).__name__}; expected a list",
                got=type(items).__name__,
            )
        return tuple(items) if decode is None else tuple([decode(i) for i in items])

    return decode_items


def _scalar_decoder(cls: type[Any]) -> Convert:
    def check(value: Any) -> Any:
        if type(value) is cls:
            return value
        if isinstance(value, np.generic) and cls in (int, bool, float):
            return cls(value)  # the sender computed it with numpy
        raise WireError(
            f"a message holds a wrong value; got {type(value).__name__}; expected "
            f"{cls.__name__}",
            got=type(value).__name__,
        )

    return check
