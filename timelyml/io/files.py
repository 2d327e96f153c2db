"""Text, CSV and Parquet files as sources, each shared between the shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timelyml.graph import GraphBuilder, Placement, StreamRef
from timelyml.io.batching import Batching, make_batching
from timelyml.io.byte_ranges import (
    Paths,
    cut_lines,
    decoded,
    expand,
    lines_of,
    share_of,
)
from timelyml.io.csv_files import CsvReader, header_of
from timelyml.io.parquet_files import ParquetReader, parquet_schema
from timelyml.operators.readers import Pieces
from timelyml.operators.schema import SchemaLike, as_schema
from timelyml.operators.sources import read_from
from timelyml.runtime.shard import Shard


def read_text(
    flow: GraphBuilder,
    paths: Paths,
    *,
    encoding: str = "utf-8",
    batch_size: int | None = None,
    epoch_every: int | None = None,
    num_shards: int | None = None,
    placement: Placement | None = None,
    name: str | None = None,
) -> StreamRef:
    """Make a stream of the lines of files, without their ends.

    Each shard reads an equal range of the bytes of all files.

    Args:
        flow: The dataflow.
        paths: One path, a pattern with wildcards, or several.
        encoding: Of the text; a superset of ASCII, in which a byte 10 ends a line.
        batch_size: Most lines in one block; default: those of about 256 KiB.
        epoch_every: Blocks per epoch, on each shard. Default: one epoch holds all.
        num_shards: Default: the dataflow's.
        placement: Which worker holds which shard.
        name: Shown in traces and errors; the key of its position.

    Raises:
        ConfigError: There is no such file, or an option is out of range.
    """
    who = name or "read_text"
    batching = make_batching(who, batch_size, epoch_every)
    reader = TextReader(expand(who, paths), encoding, batching)
    return read_from(
        flow,
        reader,
        kind="read_text",
        num_shards=num_shards,
        placement=placement,
        name=name,
    )


def read_csv(
    flow: GraphBuilder,
    paths: Paths,
    *,
    schema: SchemaLike | None = None,
    columns: Sequence[str] | None = None,
    delimiter: str = ",",
    has_newlines: bool = False,
    encoding: str = "utf-8",
    batch_size: int | None = None,
    epoch_every: int | None = None,
    num_shards: int | None = None,
    placement: Placement | None = None,
    name: str | None = None,
) -> StreamRef:
    """Make a stream of the rows of CSV files: columns if a schema says how, else dicts.

    Each shard reads an equal range of the bytes of all files.

    Args:
        flow: The dataflow.
        paths: One path, a pattern with wildcards, or several.
        schema: Dtypes of the columns to read, by name: blocks are then columns of
            these, and other columns are left out. Default: blocks are lists of rows,
            as dicts of text.
        columns: Names of all columns, for files without a header. Default: the first
            line of each file has them.
        delimiter: Between fields.
        has_newlines: Whether quoted fields hold ends of lines. Files are then read
            whole, each by one shard.
        encoding: Of the text.
        batch_size: Most rows in one block; default: those of about 256 KiB.
        epoch_every: Blocks per epoch, on each shard. Default: one epoch holds all.
        num_shards: Default: the dataflow's.
        placement: Which worker holds which shard.
        name: Shown in traces and errors; the key of its position.

    Raises:
        ConfigError: There is no such file, or an option is out of range.
        SchemaError: A file lacks a column of the schema, or has two of one name.
        PayloadError: A file does not begin with text of the encoding.
    """
    who = name or "read_csv"
    declared = as_schema(schema)
    files = expand(who, paths)
    names = tuple(columns) if columns is not None else None
    for path in files:
        header_of(path, names, delimiter, encoding, declared)
    reader = CsvReader(
        paths=files,
        names=names,
        schema=declared,
        delimiter=delimiter,
        has_newlines=has_newlines,
        encoding=encoding,
        batching=make_batching(who, batch_size, epoch_every),
    )
    return read_from(
        flow,
        reader,
        kind="read_csv",
        num_shards=num_shards,
        placement=placement,
        schema=declared,
        name=name,
    )


def read_parquet(
    flow: GraphBuilder,
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    fill: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    epoch_every: int | None = None,
    num_shards: int | None = None,
    placement: Placement | None = None,
    name: str | None = None,
) -> StreamRef:
    """Make a stream of the columns of Parquet files; needs the extra `arrow`.

    Each shard reads some of the row groups of all files.

    Args:
        flow: The dataflow.
        paths: One path, a pattern with wildcards, or several.
        columns: Names of those to read; default: all.
        fill: By column, what stands for missing values. Default: NaN; a column of
            another kind than floats needs a value, if some are missing.
        batch_size: Most rows in one block; default: a row group.
        epoch_every: Blocks per epoch, on each shard. Default: one epoch holds all.
        num_shards: Default: the dataflow's.
        placement: Which worker holds which shard.
        name: Shown in traces and errors; the key of its position.

    Raises:
        ConfigError: There is no such file, an option is out of range, or pyarrow is
            not installed.
        SchemaError: A file lacks one of the columns, or one is of a kind that no
            array has.
    """
    who = name or "read_parquet"
    files = expand(who, paths)
    schemas = [parquet_schema(who, path, columns) for path in files]
    names = tuple(schemas[0].columns)
    for path, schema in zip(files, schemas, strict=True):
        schemas[0].check(f"file {str(path)!r}", schema.empty(), origin="the first file")
    reader = ParquetReader(
        files,
        names,
        dict(fill or {}),
        make_batching(who, batch_size, epoch_every),
    )
    return read_from(
        flow,
        reader,
        kind="read_parquet",
        num_shards=num_shards,
        placement=placement,
        schema=schemas[0],
        name=name,
    )


@dataclass(frozen=True, slots=True)
class TextReader:
    """Reads lines of files; see `read_text`."""

    paths: tuple[Path, ...]
    encoding: str
    batching: Batching

    def close(self) -> None:
        """Do nothing: files are closed with the pieces."""

    def pieces(self, shard: Shard, position: tuple[int, int]) -> Pieces:
        """Read the lines of one shard, from byte `position[0]` on."""
        at, number = position
        for part in share_of(self.paths, shard.index, shard.num_shards):
            if part.base + part.stop <= at:
                continue
            for found in lines_of(part, at):
                start = found.start - part.base
                for lines, end in cut_lines(found, self.batching.batch_size):
                    payload = decoded(lines, found.path, start, self.encoding)
                    yield self.batching.piece(payload, number, end)
                    start = end - part.base
                    number += 1
