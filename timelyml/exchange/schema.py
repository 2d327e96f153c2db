"""Schemas of messages: from a dataclass's annotations to flat msgpack values.

A message is a frozen dataclass (or a named tuple) of plain fields, other such
classes, and tuples of them; `Any` fields hold user values. Structure that the
annotations fix is not described on the wire, and is checked when it arrives.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from timelyml.errors import InvariantError, WireError
from timelyml.exchange.garbled import garbled

Convert: TypeAlias = Callable[[Any], Any]

_SCALARS = (int, float, bool, str, bytes)
_ROW_VALUES = {*_SCALARS, tuple}


class _Field(NamedTuple):
    """How one field is converted; None: it travels as it is."""

    encode: Convert | None
    decode: Convert | None
    plain: type[Any] | None = None  # the type that needs no decoding
    is_optional: bool = False
    items: tuple[Convert, Convert] | None = None  # of a tuple of records: of each


class Schema:
    """How the fields of one message class become a list and back."""

    def __init__(self, cls: type[Any], index: int) -> None:
        self.cls = cls
        self.index = index
        self.encode: Convert = list
        self.decode: Convert = list
        self._is_begun = False

    def compile(self, registry: dict[type[Any], Schema], any_field: Convert) -> None:
        """Fill in `encode` and `decode`, once every class is in the registry.

        Nested classes come first, since their functions become part of these; a
        class that contains itself cannot be a message.
        """
        if self._is_begun:
            return
        self._is_begun = True
        hints = typing.get_type_hints(self.cls)
        fields = {
            name: _field_of(hints[name], registry, any_field)
            for name in field_names(self.cls)
        }
        self.encode, self.decode = _generate(self.cls, fields)


def build_schemas(
    message_types: Sequence[type[Any]], any_field: Convert
) -> dict[type[Any], Schema]:
    """Return schemas of the classes and of those nested in them, in a fixed order.

    Args:
        message_types: Frozen dataclasses or named tuples with annotated fields.
        any_field: Prepares the user value of an `Any` field for msgpack.
    """
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


def is_record(hint: Any) -> bool:
    """Whether it is a class of named fields: a dataclass or a named tuple."""
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
        if is_record(hint) and hint not in seen:
            seen.add(hint)
            yield hint
            waiting += typing.get_type_hints(hint).values()


def _generate(cls: type[Any], fields: dict[str, _Field]) -> tuple[Convert, Convert]:
    """Return an encoder and a decoder written out for one class.

    As `dataclasses` does for `__init__`: 0.5 instead of 1.3 us for five fields. A
    plain slotted class is filled through its slots, since the `__init__` of a frozen
    one takes twice as long.
    """
    if issubclass(cls, tuple):
        return _generate_for_tuple(cls, list(fields.values()))
    names = list(fields)
    variables = "".join(f"{name}, " for name in names)
    # A field may be called like anything but these.
    scope: dict[str, Any] = {
        "__cls": cls,
        "__new": object.__new__,
        "__refuse": _refuse,
        "__type": type,
        "__list": list,
        "__len": len,
    }
    packed, body = [], []
    for name, field in fields.items():
        scope[f"__encode_{name}"] = field.encode
        scope[f"__decode_{name}"] = field.decode
        scope[f"__plain_{name}"] = field.plain
        value = f"__encode_{name}(__m.{name})" if field.encode else f"__m.{name}"
        test = f"None if __m.{name} is None else " if field.is_optional else ""
        packed.append(test + value)
        if field.decode:
            test = f"if __type({name}) is not __plain_{name}: " if field.plain else ""
            body.append(f"{test}{name} = __decode_{name}({name})")
    if _has_plain_slots(cls):
        scope |= {f"__set_{name}": cls.__dict__[name].__set__ for name in names}
        body.append("__self = __new(__cls)")
        body += [f"__set_{name}(__self, {name})" for name in names]
        body.append("return __self")
    else:
        body.append(f"return __cls({variables})")
    lines = [
        f"def encode(__m): return [{', '.join(packed)}]",
        "def decode(__values):",
        f" if __type(__values) is not __list or __len(__values) != {len(names)}:",
        "  __refuse(__cls, __values)",
        *([f" {variables}= __values"] if names else []),
        *(f" {line}" for line in body),
    ]
    exec("\n".join(lines), scope)  # noqa: S102 - holds only names of fields
    return scope["encode"], scope["decode"]


def _generate_for_tuple(
    cls: type[Any], fields: Sequence[_Field]
) -> tuple[Convert, Convert]:
    """Return the same for a named tuple, which is what every step sends.

    What is done to each field is written out, and to each item of a tuple of records:
    a call less for each of them, so that a block takes 3 us less either way.
    """
    scope: dict[str, Any] = {"cls": cls, "new": tuple.__new__, "refuse": _refuse}
    scope["not_a_list"] = _not_a_list
    encoded, decoding = [], []
    for at, field in enumerate(fields):
        scope[f"encode_{at}"], scope[f"decode_{at}"] = field.encode, field.decode
        scope[f"plain_{at}"] = field.plain
        value = f"v{at}"
        if field.items is not None:
            scope[f"encode_{at}"], scope[f"decode_{at}"] = field.items
            encoded.append(f"list(map(encode_{at}, v{at}))")
            decoding.append(f" if type(v{at}) is not list: not_a_list(v{at})")
            decoding.append(f" v{at} = tuple(map(decode_{at}, v{at}))")
            continue
        if field.encode:
            value = f"encode_{at}(v{at})"
            if field.is_optional:
                value = f"None if v{at} is None else {value}"
        encoded.append(value)
        if field.decode:
            test = f"if type(v{at}) is not plain_{at}: " if field.plain else ""
            decoding.append(f" {test}v{at} = decode_{at}(v{at})")
    variables = "".join(f"v{at}, " for at in range(len(fields)))
    lines = [
        "def encode(message):",
        f" [{variables}] = message",
        f" return [{', '.join(encoded)}]",
        "def decode(values):",
        f" if type(values) is not list or len(values) != {len(fields)}:",
        "  refuse(cls, values)",
        f" [{variables}] = values",
        *decoding,
        f" return new(cls, ({variables}))",
    ]
    exec("\n".join(lines), scope)  # noqa: S102 - holds only indices of fields
    return scope["encode"], scope["decode"]


def _has_plain_slots(cls: type[Any]) -> bool:
    return (
        dataclasses.is_dataclass(cls)
        and not hasattr(cls, "__post_init__")
        and all(
            isinstance(cls.__dict__.get(name), types.MemberDescriptorType)
            for name in field_names(cls)
        )
    )


def _refuse(cls: type[Any], values: Any) -> None:
    raise garbled(
        f"a message does not fit its class {cls.__name__}",
        f"{values!r:.80}",
        f"{len(field_names(cls))} fields",
        message_type=cls.__name__,
    )


def _field_of(
    hint: Any, registry: dict[type[Any], Schema], any_field: Convert
) -> _Field:
    """Return how a value of the annotation is converted."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        return _Field(None, _scalar_decoder(hint), hint)
    if is_record(hint):
        schema = registry[hint]
        schema.compile(registry, any_field)
        if schema.decode is list:  # still at it
            raise InvariantError(
                f"message class {hint.__name__} contains itself; got it in a field of "
                f"its own; expected a tree of classes; carry it as a plain value"
            )
        return _Field(schema.encode, schema.decode)
    if origin in (typing.Union, types.UnionType):
        return _union_field(arguments, registry, any_field)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _tuple_field(arguments[0], registry, any_field)
    if hint is tuple:
        raise InvariantError(
            "a field of a message says nothing of its items; got a bare tuple; expected "
            "tuple[...]; keep its class out of the compiled modules, which forget it"
        )
    return _Field(any_field if hint is Any else None, None)


def _union_field(
    options: Sequence[Any], registry: dict[type[Any], Schema], any_field: Convert
) -> _Field:
    """Convert `Record | None` by its record; other unions are user values."""
    records = [option for option in options if option is not type(None)]
    if len(records) != 1 or not is_record(records[0]):
        return _Field(None, None)
    inner = _field_of(records[0], registry, any_field)
    return _Field(inner.encode, inner.decode, type(None), is_optional=True)


def _tuple_field(
    item: Any, registry: dict[type[Any], Schema], any_field: Convert
) -> _Field:
    """Convert `tuple[item, ...]`; rows of plain values travel flat, as one list."""
    arguments = typing.get_args(item)
    is_row = typing.get_origin(item) is tuple and Ellipsis not in arguments
    if is_row and all(_is_plain(argument) for argument in arguments):
        return _Field(_flatten_rows, _rows_decoder(len(arguments)))
    inner = _field_of(item, registry, any_field)
    encode, decode = _items_encoder(inner), _items_decoder(inner)
    if inner.encode is None or inner.decode is None or inner.plain is not None:
        return _Field(encode, decode)
    return _Field(encode, decode, items=(inner.encode, inner.decode))


def _is_plain(hint: Any) -> bool:
    """Whether a value of the annotation is its own msgpack value, or a timestamp."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return all(_is_plain(option) for option in typing.get_args(hint))
    return hint in _SCALARS or hint == tuple[int, ...]


def _flatten_rows(rows: Any) -> list[Any]:
    return list(chain.from_iterable(rows))


def _rows_decoder(width: int) -> Convert:
    def decode_rows(flat: Any) -> Any:
        if width == 3 and (triples := _int_triples(flat)) is not None:
            return triples
        if type(flat) is not list or not _ROW_VALUES.issuperset(map(type, flat)):
            flat = _without_numpy(flat)
        if len(flat) % width:
            raise _malformed(flat)
        values = iter(flat)
        return tuple(zip(*(values,) * width, strict=True))

    def _without_numpy(flat: Any) -> list[Any]:
        """Return rows whose sender computed some values with numpy."""
        if type(flat) is list:
            plain = [v.item() if isinstance(v, np.generic) else v for v in flat]
            if _ROW_VALUES.issuperset(map(type, plain)):
                return plain
        raise _malformed(flat)

    def _malformed(flat: Any) -> WireError:
        return garbled(
            "a message holds malformed rows",
            f"{flat!r:.80}",
            f"plain values in groups of {width}",
            width=width,
        )

    return decode_rows


def _int_triples(flat: Any) -> Any:
    """Return rows of three integers; None if they are something else.

    Most are changes of progress at top-level times: 1.5 us less for a batch.
    """
    if type(flat) is not list or len(flat) % 3:
        return None
    rows: list[Any] = []
    values: list[Any] = flat
    for at in range(0, len(values), 3):
        place, time, delta = values[at], values[at + 1], values[at + 2]
        if type(place) is not int or type(time) is not int or type(delta) is not int:
            return None
        rows.append((place, time, delta))
    return tuple(rows)


def _items_encoder(field: _Field) -> Convert:
    encode = field.encode
    if encode is None:
        return list
    if field.is_optional:
        return lambda items: [None if i is None else encode(i) for i in items]
    return lambda items: list(map(encode, items))


def _items_decoder(field: _Field) -> Convert:
    decode, plain = field.decode, field.plain

    def decode_items(items: Any) -> Any:
        if type(items) is not list:
            _not_a_list(items)
        if decode is None:
            return tuple(items)
        if plain is None:
            return tuple(map(decode, items))
        return tuple([i if type(i) is plain else decode(i) for i in items])

    return decode_items


def _not_a_list(items: Any) -> None:
    raise garbled(
        "a message holds no sequence where one belongs", f"{items!r:.80}", "a list"
    )


def _scalar_decoder(cls: type[Any]) -> Convert:
    def decode_scalar(value: Any) -> Any:
        if type(value) is cls:
            return value
        if isinstance(value, np.generic) and cls in (int, bool, float):
            return cls(value)  # the sender computed it with numpy
        if cls is float and type(value) is int:
            return float(value)
        raise garbled("a message holds a wrong value", f"{value!r:.80}", cls.__name__)

    return decode_scalar
