"""CSV files: rows as dicts of text, or as columns of a schema."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from timelyml.errors import PayloadError, SchemaError
from timelyml.io.batching import Batching
from timelyml.io.byte_ranges import cut_lines, decoded, line_at, lines_of, share_of
from timelyml.operators.readers import Pieces
from timelyml.operators.schema import Schema
from timelyml.runtime.shard import Shard

ROWS_PER_BATCH = 4096  # of files that are read whole

TRUTHS = {"true": True, "1": True, "false": False, "0": False}

Row = list[str]


class CsvRows(Protocol):
    """What `csv.reader` returns."""

    @property
    def line_num(self) -> int:
        """How many lines it has read."""

    def __iter__(self) -> Iterator[Row]: ...

    def __next__(self) -> Row: ...


@dataclass(frozen=True, slots=True)
class Header:
    """The columns of one file, and where the wanted ones stand."""

    path: Path
    names: tuple[str, ...]
    has_line: bool


class Block(NamedTuple):
    """Rows that follow each other in one file.

    Attributes:
        header: Of the file.
        given: What the reader made of them; empty where a line was.
        rows: Those of them that are rows: an empty line is none.
        line_of: From an index in `given` to a line of the file, from 1. It reads the
            file again, as only an error needs to know.
    """

    header: Header
    given: list[Row]
    rows: list[Row]
    line_of: Callable[[int], int]

    def line(self, index: int) -> int:
        """Return the line at which `rows[index]` starts."""
        full = [at for at, row in enumerate(self.given) if row]
        return self.line_of(full[index])


def header_of(
    path: Path,
    names: tuple[str, ...] | None,
    delimiter: str,
    encoding: str,
    schema: Schema | None,
) -> Header:
    """Return the columns of a file: as they were given, or by its first line.

    Raises:
        SchemaError: The schema has a column that is not among them, or two are alike.
        PayloadError: The file is not of the encoding.
    """
    has_line = names is None
    if names is None:
        with path.open(encoding=encoding, newline="") as file:
            try:
                names = tuple(next(csv.reader(file, delimiter=delimiter), ()))
            except UnicodeDecodeError as error:
                raise _not_encoded(path, error) from None
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SchemaError(
            f"file {str(path)!r} has two columns of one name; got {list(names)}; "
            f"expected one {twice!r}; rename one, or pass columns= for a file without "
            f"header",
            column=twice,
            path=str(path),
        )
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
                start = found.start - part.base
                for lines, end in cut_lines(found, self.batching.batch_size):
                    text = decoded(lines, found.path, start, self.encoding)
                    line_of = partial(self._line_in_range, part.path, start, text)
                    whole = [*text, ""]  # which a field that has no end would take
                    rows = self._rows(header, self._reader(whole), line_of)
                    if len(rows) < len(whole):
                        raise _spanning(header.path, line_of, self._reader(whole))
                    if header.has_line and start == 0:
                        rows[0] = []
                    yield self._payload(header, rows, line_of), end
                    start = end - part.base

    def _whole_files(self, shard: Shard, at: int) -> Iterator[tuple[Any, int]]:
        size = self.batching.batch_size or ROWS_PER_BATCH
        done = 0
        for path in self.paths[shard.index :: shard.num_shards]:
            header = self._header(path)
            with path.open(encoding=self.encoding, newline="") as file:
                reader = self._reader(file)
                before = len(list(islice(reader, int(header.has_line))))
                line_of = partial(self._line_in_file, path, before)
                while rows := self._rows(header, reader, line_of, size):
                    done += len(rows)
                    if done > at:
                        yield self._payload(header, rows, line_of), done
                    before += len(rows)
                    line_of = partial(self._line_in_file, path, before)

    def _header(self, path: Path) -> Header:
        return header_of(path, self.names, self.delimiter, self.encoding, self.schema)

    def _reader(self, lines: Iterable[str]) -> CsvRows:
        return csv.reader(lines, delimiter=self.delimiter)

    def _rows(
        self,
        header: Header,
        reader: CsvRows,
        line_of: Callable[[int], int],
        most: int | None = None,
    ) -> list[Row]:
        rows: list[Row] = []
        try:
            rows.extend(islice(reader, most))
        except UnicodeDecodeError as error:
            raise _not_encoded(header.path, error) from None
        except csv.Error as error:
            line = line_of(len(rows))
            raise PayloadError(
                f"file {str(header.path)!r} has no CSV in line {line}; got {error}; "
                f"expected fields between {self.delimiter!r}; correct it, or pass "
                f"delimiter=",
                path=str(header.path),
                line=line,
            ) from None
        return rows

    def _line_in_range(self, path: Path, start: int, text: list[str], row: int) -> int:
        return line_at(path, start) + _lines_before(self._reader(text), row)

    def _line_in_file(self, path: Path, before: int, row: int) -> int:
        with path.open(encoding=self.encoding, newline="") as file:
            return 1 + _lines_before(self._reader(file), before + row)

    def _payload(
        self, header: Header, given: list[Row], line_of: Callable[[int], int]
    ) -> Any:
        rows = [row for row in given if row]
        block = Block(header, given, rows, line_of)
        for index, row in enumerate(rows):
            if len(row) != len(header.names):
                line = block.line(index)
                raise PayloadError(
                    f"file {str(header.path)!r} has a row of another length in line "
                    f"{line}; got {row!r:.200}; expected {len(header.names)} fields; if "
                    f"fields hold ends of lines, pass has_newlines=True",
                    path=str(header.path),
                    line=line,
                )
        if self.schema is None:
            return [dict(zip(header.names, row, strict=True)) for row in rows]
        return columns_of_rows(block, self.schema)


def _not_encoded(path: Path, error: UnicodeDecodeError) -> PayloadError:
    wrong = error.object[error.start : error.end]
    return PayloadError(
        f"file {str(path)!r} is not of encoding {error.encoding!r}; got {error.reason} "
        f"for {wrong!r}; expected text; pass encoding=",
        path=str(path),
    )


def _spanning(path: Path, line_of: Callable[[int], int], rows: CsvRows) -> PayloadError:
    """Return the error of a row that goes on in another line, which others may read."""
    index, row = next(
        (index, row) for index, row in enumerate(rows) if rows.line_num > index + 1
    )
    line = line_of(index)
    return PayloadError(
        f"file {str(path)!r} has a field that goes on after the end of line {line}; got "
        f"{row!r:.200}; expected quotes that end where they began; pass "
        f"has_newlines=True if that is meant",
        path=str(path),
        line=line,
    )


def _lines_before(reader: CsvRows, index: int) -> int:
    """Return how many lines the rows before row `index` take."""
    for _ in islice(reader, index):
        pass
    return reader.line_num


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

CANNOT_CONVERT = (ValueError, OverflowError, KeyError)


def columns_of_rows(block: Block, schema: Schema) -> Any:
    """Return the columns of the schema, converted from text.

    Raises:
        PayloadError: A field cannot be converted; names file, line and column.
    """
    names, rows = block.header.names, block.rows
    by_name = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {}
    return {
        name: _converted(block, name, by_name.get(name, ()), column.dtype)
        for name, column in schema.columns.items()
    }


def _converted(
    block: Block, name: str, fields: Sequence[str], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    try:
        return _as_array(fields, dtype)
    except CANNOT_CONVERT as error:
        index = _culprit(fields, dtype)
        path, line = str(block.header.path), block.line(index)
        raise PayloadError(
            f"file {path!r} has a field that is no {dtype} in line {line}, column "
            f"{name!r}; got {fields[index]!r:.100} ({error}); expected {dtype}; correct "
            f"it, or read the column as text",
            path=path,
            line=line,
            column=name,
        ) from None


def _as_array(fields: Sequence[str], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    convert = CONVERTERS.get(dtype.kind)
    if convert is not None:
        return np.fromiter(map(convert, fields), dtype, len(fields))
    if dtype.kind == "U":
        return np.array(fields, np.str_) if fields else np.empty(0, "U1")
    return np.array(fields, dtype)


def _culprit(fields: Sequence[str], dtype: np.dtype[Any]) -> int:
    """Return the index of the first field that cannot be converted."""
    for index, field in enumerate(fields):
        try:
            _as_array([field], dtype)
        except CANNOT_CONVERT:
            return index
    return 0
