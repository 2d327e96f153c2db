"""Schemas of columns: declared for a stream, or fixed by its first block.

A schema travels with streams while the graph is built, through operators that keep
columns as they are, so that one that names a column which is not there is refused at
once. Where a stream begins, blocks are checked against it as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from timelyml.errors import GraphError, PayloadError, SchemaError
from timelyml.exchange import num_records
from timelyml.graph import StreamRef
from timelyml.operators.columns import Columns, columns_of
from timelyml.operators.edges import Routed, StreamLike
from timelyml.runtime.shard import Shard

ColumnSpec: TypeAlias = Any
"""A dtype, or a pair of one and the shape of a row: `"float32"`, `("float32", (8,))`."""

SchemaLike: TypeAlias = "Schema | Mapping[str, ColumnSpec]"

SCHEMA = "schema"
"""Name of the state in which a shard keeps the schema that its first block fixed."""

FIRST = "first block"

_OF_ANY_WIDTH = "SU"  # text: its widest value decides, block by block


@dataclass(frozen=True, slots=True)
class ColumnType:
    """What the values of one column are."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()

    def fits(self, column: np.ndarray[Any, Any]) -> bool:
        """Whether a column is of this type; text may have any width, bytes any order."""
        if column.shape[1:] != self.shape:
            return False
        if self.dtype.kind in _OF_ANY_WIDTH:
            return bool(column.dtype.kind == self.dtype.kind)
        return bool(column.dtype.newbyteorder("=") == self.dtype.newbyteorder("="))

    def __str__(self) -> str:
        is_text = self.dtype.kind in _OF_ANY_WIDTH
        name = (
            {"S": "bytes", "U": "str"}[self.dtype.kind] if is_text else self.dtype.name
        )
        return f"{name}{list(self.shape)}" if self.shape else name


class Schema:
    """The columns of a stream, by name and in order; of a bare array, one named "".

    Args:
        columns: By name, a dtype, or a pair of a dtype and the shape of a row.

    >>> Schema({"user": "int64", "x": ("float32", (8,)), "word": str})
    Schema(user: int64, x: float32[8], word: str)
    """

    def __init__(self, columns: Mapping[str, ColumnSpec]) -> None:
        self.columns = {name: _type_of(name, spec) for name, spec in columns.items()}
        if not self.columns:
            raise SchemaError(
                "a schema has no columns; got none; expected at least one; name them",
            )

    @classmethod
    def of(cls, payload: Any) -> Schema | None:
        """Return the schema that a payload shows; None if it is a list of records."""
        if isinstance(payload, list):
            return None
        return cls(
            {
                name: (column.dtype, column.shape[1:])
                for name, column in columns_of(payload).items()
            }
        )

    def empty(self) -> Columns:
        """Return columns of this schema without rows."""
        return {
            name: np.empty((0, *column.shape), column.dtype)
            for name, column in self.columns.items()
        }

    def check(self, who: str, payload: Any, *, origin: str = "declared") -> None:
        """Refuse a payload that does not fit; an empty list always does.

        Raises:
            SchemaError: It does not fit; names the column.
        """
        if isinstance(payload, list):
            if not payload:
                return
            raise _misfit(who, "records", self, origin, None)
        found = columns_of(payload)
        for name in [*self.columns, *found]:
            if name not in found:
                raise _misfit(who, f"no column {name!r}", self, origin, name)
            if name not in self.columns:
                raise _misfit(who, f"a column {name!r} more", self, origin, name)
            if not self.columns[name].fits(found[name]):
                column = found[name]
                got = ColumnType(column.dtype, column.shape[1:])
                raise _misfit(who, f"column {name!r} of {got}", self, origin, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.columns == other.columns

    def __hash__(self) -> int:
        return hash(tuple(self.columns.items()))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {column}" for name, column in self.columns.items())
        return f"Schema({shown})"


def as_schema(schema: SchemaLike | None) -> Schema | None:
    """Return what was declared as a schema."""
    if schema is None or isinstance(schema, Schema):
        return schema
    return Schema(schema)


def declare(stream: StreamRef, schema: Schema | None) -> StreamRef:
    """Note the schema of a stream that an operator makes, and return it."""
    if schema is not None and stream.loop is None:
        stream.builder.notes[stream.operator, stream.port] = schema
    return stream


def schema_of(up: StreamLike) -> Schema | None:
    """Return the schema of a stream, if it is known."""
    stream = up.stream if isinstance(up, Routed) else up
    noted = stream.builder.notes.get((stream.operator, stream.port))
    return noted if isinstance(noted, Schema) else None


def require(who: str, up: StreamLike, names: Iterable[str]) -> None:
    """Refuse columns that a stream of known schema does not have.

    Raises:
        GraphError: It has none of one name.
    """
    schema = schema_of(up)
    if schema is None:
        return
    for name in names:
        if name not in schema.columns:
            raise GraphError(
                f"operator {who!r} needs a column that its stream lacks; got {schema}; "
                f"expected {name!r} among them; correct the name",
                operator=who,
                column=name,
            )


class Guard:
    """Checks the blocks of one place: against what was declared, else the first one.

    Unless columns were declared, lists of records may come too.
    """

    def __init__(
        self,
        who: str,
        schema: Schema | None = None,
        cell: dict[Any, Any] | None = None,
    ) -> None:
        self._who = who
        self._declared = schema
        self._cell = {} if cell is None else cell  # has the schema of the first block
        self._known: Any = None  # what the last block looked like: a quick comparison

    def check(self, payload: Any) -> None:
        """Take a block that fits.

        Raises:
            SchemaError: It does not fit; names the column.
        """
        if self._known is list and type(payload) is list:  # tiny blocks are many
            return
        look = _look_of(payload)
        if look == self._known or not num_records(payload):
            return
        if self._declared is not None:
            self._declared.check(self._who, payload)
        elif not isinstance(payload, list):
            self._compare(payload)
        self._known = look

    def _compare(self, payload: Any) -> None:
        """Check columns against those of the first block; this may be it."""
        first: Schema | None = self._cell.get(FIRST)
        if first is not None:
            first.check(self._who, payload, origin="those of the first block")
        elif (shown := shown_by(payload)) is not None:
            self._cell[FIRST] = shown


class Guards:
    """A guard for each shard of an operator, made on the worker that has it.

    The operator declares the state `SCHEMA`: what a first block fixed goes with its shard.
    """

    def __init__(self, what: str, schema: Schema | None = None) -> None:
        self._what = what
        self._schema = schema
        self._guards: dict[int, Guard] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Guards, (self._what, self._schema)

    def of(self, shard: Shard) -> Guard:
        """Return the guard of one shard."""
        guard = self._guards.get(shard.index)
        if guard is None:
            who = f"{self._what} {shard.operator!r}"
            guard = Guard(who, self._schema, shard.state_of(SCHEMA))
            self._guards[shard.index] = guard
        return guard


def guard_maker(who: str, schema: Schema | None) -> Callable[[], Callable[[Any], None]]:
    """Return what makes a check for the driver's end of an input."""
    return lambda: Guard(who, schema).check


def _look_of(payload: Any) -> Any:
    """Return something that is equal for payloads of equal columns, and quick to make."""
    if isinstance(payload, dict):
        return [
            (name, getattr(c, "dtype", None), getattr(c, "shape", ())[1:])
            for name, c in payload.items()
        ]
    if isinstance(payload, np.ndarray):
        return payload.dtype, payload.shape[1:]
    return type(payload) if isinstance(payload, list) else object()


def shown_by(payload: Any) -> Schema | None:
    """Return the schema of a block; None if its columns are nested, and not checked."""
    try:
        return Schema.of(payload)
    except PayloadError:
        return None


def _type_of(name: str, spec: ColumnSpec) -> ColumnType:
    dtype, shape = spec if isinstance(spec, tuple) else (spec, ())
    try:
        found = ColumnType(np.dtype(dtype), tuple(shape))
    except TypeError as error:
        raise SchemaError(
            f"a schema has a column {name!r} of an unknown kind; got {spec!r}: {error}; "
            f"expected a dtype, or (dtype, shape of a row); correct it",
            column=name,
        ) from None
    if found.dtype.hasobject:
        raise SchemaError(
            f"a schema has a column {name!r} of Python objects; got {spec!r}; expected "
            f"numbers, text or times; send records instead",
            column=name,
        )
    return found


def _misfit(
    who: str, got: str, schema: Schema, origin: str, column: str | None
) -> SchemaError:
    return SchemaError(
        f"{who} has other columns than {origin}; got {got}; expected {schema}; convert "
        f"the block, or correct the schema",
        column=column,
    )
