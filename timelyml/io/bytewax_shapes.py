"""The shapes of Bytewax connectors, known by the names of their methods.

Nothing here needs Bytewax: an object with these methods is a connector. Times of
`next_awake` are aware datetimes of the system's clock, as in Bytewax.

Source:
    Bytewax 0.21 (`bytewax.inputs`, `bytewax.outputs`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from typing import Any, Protocol

from timelyml.errors import GraphError


class SourcePartition(Protocol):
    """What a source is read from; `snapshot` and `close` may be missing."""

    def next_batch(self) -> Iterable[Any]:
        """Return what is there, maybe nothing; raise StopIteration at the end."""

    def next_awake(self) -> datetime | None:
        """Return when to ask again; None: whenever it suits."""


class SinkPartition(Protocol):
    """What a sink writes to; `snapshot` and `close` may be missing."""

    def write_batch(self, items: list[Any], /) -> None:
        """Write some items."""


class Shape(Enum):
    """How a connector is parted."""

    FIXED = "partitions of its own, which it lists and builds one by one"
    DYNAMIC = "one partition for each shard"


def source_shape(who: str, source: Any) -> Shape:
    """Return how a source is parted.

    Raises:
        GraphError: It is no source; says what it looks like.
    """
    if not inspect.isclass(source):
        if _has(source, "list_parts", "build_part") and not _has(source, "part_fn"):
            return Shape.FIXED
        if _has(source, "build"):
            return Shape.DYNAMIC
    raise _no_connector(who, source, "source", "list_parts and build_part, or build")


def sink_shape(who: str, sink: Any) -> Shape:
    """Return how a sink is parted.

    Raises:
        GraphError: It is no sink; says what it looks like.
    """
    if not inspect.isclass(sink):
        if _has(sink, "list_parts", "build_part", "part_fn"):
            return Shape.FIXED
        if _has(sink, "build"):
            return Shape.DYNAMIC
    rule = "list_parts, build_part and part_fn, or build"
    raise _no_connector(who, sink, "sink", rule)


def list_partitions(who: str, connector: Any) -> list[str]:
    """Return the partitions that a connector sees from here, sorted, each once.

    Raises:
        GraphError: It returned something other than strings.
    """
    with noting(f"while {who!r} listed its partitions"):
        listed = connector.list_parts()
        parts = [] if isinstance(listed, str) else list(listed)
    if isinstance(listed, str) or not all(isinstance(part, str) for part in parts):
        raise GraphError(
            f"connector {who!r} lists no partitions; got {listed!r} from list_parts; "
            f"expected a list of strings; return the keys of the partitions",
            connector=who,
        )
    return sorted(set(parts))


def check_partition(who: str, partition: Any, method: str) -> None:
    """Refuse what a connector built unless it has `method`.

    Raises:
        GraphError: It has not.
    """
    if not _has(partition, method):
        raise GraphError(
            f"connector {who!r} built something that is no partition; got "
            f"{partition!r}; expected an object with {method}; "
            f"{'a sink' if method == 'next_batch' else 'a source'} belongs elsewhere",
            connector=who,
        )


def snapshot_of(partition: Any) -> Any:
    """Return where to go on with a partition; None if it does not tell."""
    return partition.snapshot() if _has(partition, "snapshot") else None


def close(partition: Any) -> None:
    """Close a partition, if it can be closed."""
    if _has(partition, "close"):
        partition.close()


@contextmanager
def noting(what: str) -> Iterator[None]:
    """Tell where it was, with whatever is raised inside."""
    try:
        yield
    except StopIteration:
        raise
    except Exception as error:
        error.add_note(what)
        raise


def describe(connector: Any) -> str:
    """Return the type of a connector, for messages."""
    return type(connector).__name__


def _has(value: Any, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)


def _no_connector(who: str, value: Any, kind: str, methods: str) -> GraphError:
    if inspect.isclass(value):
        got, remedy = f"the class {value.__name__}", "make an object of it"
    else:
        got, remedy = describe(value), f"pass a {kind} as Bytewax has them"
    return GraphError(
        f"operator {who!r} needs a {kind}; got {got}; expected an object with "
        f"{methods}; {remedy}",
        operator=who,
        got=got,
    )
