"""Parquet files, by row groups; pyarrow is loaded where it is used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from timelyml.errors import ConfigError, PayloadError, SchemaError
from timelyml.exchange import slice_rows
from timelyml.io.batching import Batching
from timelyml.operators.columns import Columns
from timelyml.operators.readers import Pieces
from timelyml.operators.schema import Schema
from timelyml.runtime.shard import Shard


def parquet_schema(operator: str, path: Path, columns: Sequence[str] | None) -> Schema:
    """Return the columns of a file that are to be read.

    Raises:
        ConfigError: pyarrow is not installed.
        SchemaError: A column is not there, or of a kind that no array has.
    """
    fields = _parquet(operator).read_schema(path)
    names = fields.names if columns is None else list(columns)
    found = {}
    for name in names:
        if name not in fields.names:
            raise SchemaError(
                f"file {str(path)!r} lacks a column; got columns {fields.names}; expected "
                f"{name!r} among them; correct the name",
                column=name,
                path=str(path),
            )
        found[name] = _spec_of(path, name, fields.field(name).type)
    return Schema(found)


@dataclass(frozen=True, slots=True)
class ParquetReader:
    """Reads row groups of files; see `read_parquet`."""

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    fill: dict[str, Any]
    batching: Batching

    def close(self) -> None:
        """Do nothing: files are closed with the pieces."""

    def pieces(self, shard: Shard, position: tuple[int, int]) -> Pieces:
        """Read the row groups of one shard, from row `position[0]` of them on."""
        done, (at, number) = 0, position
        for path, index, rows in self._share(shard):
            if done + rows <= at:
                done += rows
                continue
            payload = self._read(shard.operator, path, index)
            size = self.batching.batch_size or max(rows, 1)
            for start in range(0, rows, size):
                stop = min(start + size, rows)
                if done + stop > at:
                    part = slice_rows(payload, start, stop)
                    yield self.batching.piece(part, number, done + stop)
                    number += 1
            done += rows

    def _share(self, shard: Shard) -> Iterator[tuple[Path, int, int]]:
        """Yield the row groups of a shard, with their rows: every nth of all."""
        parquet = _parquet(shard.operator)
        number = 0
        for path in self.paths:
            with parquet.ParquetFile(path) as file:
                metadata = file.metadata
            for index in range(metadata.num_row_groups):
                if number % shard.num_shards == shard.index:
                    yield path, index, metadata.row_group(index).num_rows
                number += 1

    def _read(self, operator: str, path: Path, index: int) -> Columns:
        with _parquet(operator).ParquetFile(path) as file:
            # Threads of its own would take the cores of other workers.
            table = file.read_row_group(
                index, columns=list(self.names), use_threads=False
            )
        return {
            name: _as_array(path, name, table.column(name), self.fill.get(name))
            for name in self.names
        }


def _parquet(operator: str) -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"operator {operator!r} needs pyarrow to read Parquet; got {error}; expected "
            f"it to be installed; pip install 'timelyml[arrow]'",
            operator=operator,
        ) from error


def _spec_of(path: Path, name: str, kind: Any) -> Any:
    """Return the dtype and shape that the values of a column have as an array."""
    types = importlib.import_module("pyarrow").types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind):
        return np.str_
    if types.is_fixed_size_list(kind):
        dtype = _spec_of(path, name, kind.value_type)
        if not isinstance(dtype, tuple):
            return dtype, (kind.list_size,)
    elif types.is_date32(kind):
        return np.dtype("M8[D]")
    elif types.is_primitive(kind) and not (
        types.is_time(kind) or types.is_interval(kind)  # numpy has nothing like them
    ):
        return np.dtype(kind.to_pandas_dtype())
    raise SchemaError(
        f"file {str(path)!r} has a column {name!r} that is no array; got {kind}; expected "
        f"numbers, text, times, or lists of one length; leave it out with columns=",
        column=name,
        path=str(path),
    )


def _as_array(path: Path, name: str, column: Any, fill: Any) -> npt.NDArray[Any]:
    pyarrow = importlib.import_module("pyarrow")
    types = pyarrow.types
    array = column.combine_chunks()
    if isinstance(array, pyarrow.ChunkedArray):  # of several chunks, or of none
        array = pyarrow.concat_arrays(array.chunks) if array.num_chunks else array
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count and fill is not None:
        array = array.fill_null(fill)
    is_float = types.is_floating(array.type)
    if array.null_count and not is_float:
        raise PayloadError(
            f"file {str(path)!r} has missing values in column {name!r}; got "
            f"{array.null_count} of them in a column of {array.type}; expected none; "
            f"pass fill={{{name!r}: ...}}, or leave it out with columns=",
            column=name,
            path=str(path),
        )
    if types.is_string(array.type) or types.is_large_string(array.type):
        return np.array(array.to_pylist(), np.str_) if len(array) else np.empty(0, "U1")
    if types.is_fixed_size_list(array.type):
        flat = array.flatten().to_numpy(zero_copy_only=False)
        return np.asarray(flat).reshape(len(array), array.type.list_size)
    return np.asarray(array.to_numpy(zero_copy_only=False))
