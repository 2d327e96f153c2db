"""CSV files: rows as dicts of text, or as columns of a schema."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml.errors import PayloadError, SchemaError
from timelyml.io.batching import Batching
from timelyml.io.byte_ranges import cut_lines, decoded, lines_of, share_of
from timelyml.operators.readers import Pieces
from timelyml.operators.schema import Schema
from timelyml.runtime.shard import Shard

ROWS_PER_BATCH = 4096  # of files that are read whole

TRUTHS = {"true": True, "1": True, "false": False, "0": False}

Row = list[str]


@dataclass(frozen=True, slots=True)
class Header:
    """The columns of one file, and where the wanted ones stand."""

    path: Path
    names: tuple[str, ...]
    has_line: bool


def header_of(
    path: Path,
    names: tuple[str, ...] | None,
    delimiter: str,
    encoding: str,
    schema: Schema | None,
) -> Header:
    """Return the columns of a file: as they were given, or by its first line.

    Raises:
        SchemaError: The schema has a column that is not among them.
    """
    has_line = names is None
    if names is None:
        with path.open(encoding=encoding, newline="") as file:
            names = tuple(next(csv.reader(file, delimiter=delimiter), ()))
    for wanted in schema.columns if schema is not None else ():
        if wanted not in names:
            raise SchemaError(
                f"file {str(path)!r} lacks a column of the schema; got columns "
                f"{list(names)}; expected {wanted!r} among them; correct the schema, or "
                f"pass columns= for a file without header",
                column=wanted,
                path=str(path),
            )
    return Header(path, names, has_line)


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvReader:
    """Reads rows of files; see `read_csv`."""

    paths: tuple[Path, ...]
    names: tuple[str, ...] | None
    schema: Schema | None
    delimiter: str
    has_newlines: bool
    encoding: str
    batching: Batching

    def close(self) -> None:
        """Do nothing: files are closed with the pieces."""

    def pieces(self, shard: Shard, position: tuple[int, int]) -> Pieces:
        """Read the rows of one shard: from byte, or row, `position[0]` on."""
        if self.has_newlines:
            batches = self._whole_files(shard, position[0])
        else:
            batches = self._ranges(shard, position[0])
        for number, (payload, end) in enumerate(batches, position[1]):
            yield self.batching.piece(payload, number, end)

    def _ranges(self, shard: Shard, at: int) -> Iterator[tuple[Any, int]]:
        for part in share_of(self.paths, shard.index, shard.num_shards):
            if part.base + part.stop <= at:
                continue
            header = self._header(part.path)
            for found in lines_of(part, at):
                is_first = header.has_line and found.start == part.base
                for lines, end in cut_lines(found, self.batching.batch_size):
                    text = decoded(lines, found.path, self.encoding)
                    rows = list(csv.reader(text, delimiter=self.delimiter))
                    yield self._payload(header, rows[1:] if is_first else rows), end
                    is_first = False

    def _whole_files(self, shard: Shard, at: int) -> Iterator[tuple[Any, int]]:
        size = self.batching.batch_size or ROWS_PER_BATCH
        done = 0
        for path in self.paths[shard.index :: shard.num_shards]:
            header = self._header(path)
            with path.open(encoding=self.encoding, newline="") as file:
                reader = csv.reader(file, delimiter=self.delimiter)
                rows = islice(reader, int(header.has_line), None)
                while batch := list(islice(rows, size)):
                    done += len(batch)
                    if done > at:
                        yield self._payload(header, batch), done

    def _header(self, path: Path) -> Header:
        return header_of(path, self.names, self.delimiter, self.encoding, self.schema)

    def _payload(self, header: Header, rows: list[Row]) -> Any:
        width = len(header.names)
        rows = [row for row in rows if row]  # an empty line is no row
        for row in rows:
            if len(row) != width:
                raise PayloadError(
                    f"file {str(header.path)!r} has a row of another length; got "
                    f"{row!r:.200}; expected {width} fields; if fields hold ends of "
                    f"lines, pass has_newlines=True",
                    path=str(header.path),
                )
        if self.schema is None:
            return [dict(zip(header.names, row, strict=True)) for row in rows]
        return columns_of_rows(header, rows, self.schema)


def _truth(text: str) -> bool:
    return TRUTHS[text.strip().lower()]


CONVERTERS: dict[str, Callable[[str], Any]] = {
    "i": int,
    "u": int,
    "f": float,
    "c": complex,
    "b": _truth,
}
"""From text to a value, by the kind of a dtype."""


def columns_of_rows(header: Header, rows: list[Row], schema: Schema) -> Any:
    """Return the columns of the schema, converted from text.

    Raises:
        PayloadError: A field cannot be converted; names file and column.
    """
    by_name = (
        dict(zip(header.names, zip(*rows, strict=True), strict=True)) if rows else {}
    )
    return {
        name: _converted(header, name, by_name.get(name, ()), column.dtype)
        for name, column in schema.columns.items()
    }


def _converted(
    header: Header, name: str, fields: Iterable[str], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    fields = list(fields)
    convert = CONVERTERS.get(dtype.kind)
    try:
        if convert is not None:
            return np.fromiter(map(convert, fields), dtype, len(fields))
        if dtype.kind == "U":
            return np.array(fields, np.str_) if fields else np.empty(0, "U1")
        return np.array(fields, dtype)
    except (ValueError, OverflowError, KeyError) as error:
        raise PayloadError(
            f"file {str(header.path)!r} has a field that is no {dtype} in column "
            f"{name!r}; got {_culprit(fields, convert)!r:.100} ({error}); expected "
            f"{dtype}; correct it, or read the column as text",
            path=str(header.path),
            column=name,
        ) from None


def _culprit(fields: list[str], convert: Callable[[str], Any] | None) -> str:
    for field in fields:
        try:
            (convert or str)(field)
        except (ValueError, OverflowError, KeyError):
            return field
    return fields[0] if fields else ""
