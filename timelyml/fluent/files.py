"""Methods of `Dataflow` that read files; `timelyml.io` is loaded when called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from timelyml.fluent.base import FlowBase, StreamT
from timelyml.graph import Placement
from timelyml.operators.schema import SchemaLike

Paths = str | Path | Iterable[str | Path]


class FileMethods(FlowBase[StreamT]):
    """Where streams begin: in files, whose parts the shards share."""

    def read_text(
        self,
        paths: Paths,
        *,
        encoding: str = "utf-8",
        batch_size: int | None = None,
        epoch_every: int | None = None,
        num_shards: int | None = None,
        placement: Placement | None = None,
        name: str | None = None,
    ) -> StreamT:
        r"""Return a stream of the lines of files; each shard reads a range of the bytes.

        Args:
            paths: One path, a pattern with wildcards, or several.
            encoding: Of the text.
            batch_size: Most lines in one block; default: those of about 256 KiB.
            epoch_every: Blocks per epoch, on each shard. Default: one epoch holds all.
            num_shards: Default: the dataflow's.
            placement: Which worker holds which shard.
            name: Shown in traces and errors.

        >>> import tempfile
        >>> from timelyml import Dataflow
        >>> with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        ...     _ = file.write("to be\nor not\n"), file.flush()
        ...     flow = Dataflow()
        ...     _ = flow.read_text(file.name).collect()
        ...     flow.run()["out"]
        ['to be', 'or not']
        """
        from timelyml import io  # noqa: PLC0415  as in `read`

        return self._stream(
            io.read_text(
                self.builder,
                paths,
                encoding=encoding,
                batch_size=batch_size,
                epoch_every=epoch_every,
                num_shards=num_shards,
                placement=placement,
                name=name,
            )
        )

    def read_csv(
        self,
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
    ) -> StreamT:
        r"""Return a stream of rows: columns if a schema says how, else dicts of text.

        Args:
            paths: One path, a pattern with wildcards, or several.
            schema: Dtypes of the columns to read, by name; default: rows are dicts.
            columns: Names of all columns, for files without a header.
            delimiter: Between fields.
            has_newlines: Whether quoted fields hold ends of lines; files are then read
                whole, each by one shard.
            encoding: Of the text.
            batch_size: Most rows in one block; default: those of about 256 KiB.
            epoch_every: Blocks per epoch, on each shard. Default: one epoch holds all.
            num_shards: Default: the dataflow's.
            placement: Which worker holds which shard.
            name: Shown in traces and errors.

        >>> import tempfile
        >>> from timelyml import Dataflow
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write("user,n\nann,1\nbo,2\n"), file.flush()
        ...     flow = Dataflow()
        ...     rows = flow.read_csv(file.name, schema={"n": "int64"})
        ...     _ = rows.map(lambda row: int(row["n"])).collect()
        ...     flow.run()["out"]
        [1, 2]
        """
        from timelyml import io  # noqa: PLC0415  as in `read`

        return self._stream(
            io.read_csv(
                self.builder,
                paths,
                schema=schema,
                columns=columns,
                delimiter=delimiter,
                has_newlines=has_newlines,
                encoding=encoding,
                batch_size=batch_size,
                epoch_every=epoch_every,
                num_shards=num_shards,
                placement=placement,
                name=name,
            )
        )

    def read_parquet(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        fill: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        epoch_every: int | None = None,
        num_shards: int | None = None,
        placement: Placement | None = None,
        name: str | None = None,
    ) -> StreamT:
        """Return a stream of columns; each shard reads some of the row groups.

        It needs pyarrow, the extra `arrow`.

        Args:
            paths: One path, a pattern with wildcards, or several.
            columns: Names of those to read; default: all.
            fill: By column, what stands for missing values; default: NaN.
            batch_size: Most rows in one block; default: a row group.
            epoch_every: Blocks per epoch, on each shard. Default: one epoch holds all.
            num_shards: Default: the dataflow's.
            placement: Which worker holds which shard.
            name: Shown in traces and errors.

        >>> import tempfile, pyarrow, pyarrow.parquet
        >>> from timelyml import Dataflow
        >>> with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        ...     pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2]}), file.name)
        ...     flow = Dataflow()
        ...     _ = flow.read_parquet(file.name).map(lambda row: int(row["n"])).collect()
        ...     flow.run()["out"]
        [1, 2]
        """
        from timelyml import io  # noqa: PLC0415  as in `read`

        return self._stream(
            io.read_parquet(
                self.builder,
                paths,
                columns=columns,
                fill=fill,
                batch_size=batch_size,
                epoch_every=epoch_every,
                num_shards=num_shards,
                placement=placement,
                name=name,
            )
        )
