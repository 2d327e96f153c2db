"""State of operators: it belongs to (operator, shard, name), never to a worker.

Operators see a dictionary per declared name. The runtime serialises, moves,
measures and discards it without their help; nothing here knows what an operator
is. Snapshots and migration are built on `export_shard` and `install_shard`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from timelyml.errors import GraphError, InvariantError, StateLimitError

StateKey = tuple[int, int, str]  # (operator, shard, name)
DEFAULT_NAME = "state"

ACTIVATIONS_PER_LOOK = 8  # at most: measuring costs as much as there is state
BATCHES_PER_LOOK = 32  # an activation may take in many
_ODD_BYTES = 64  # of an object that does not tell its size


class StateStore:
    """The state that one worker holds for one run, by (operator, shard, name)."""

    def __init__(self) -> None:
        self._cells: dict[StateKey, dict[Any, Any]] = {}

    def declare(self, operator: int, shard: int, names: Iterable[str]) -> None:
        """Make an empty dictionary for each name, unless it is already there."""
        for name in names:
            self._cells.setdefault((operator, shard, name), {})

    def cell(
        self, operator: int, shard: int, name: str, operator_name: str
    ) -> dict[Any, Any]:
        """Return the dictionary of (operator, shard, name).

        Raises:
            GraphError: The operator never declared `name`.
        """
        cell = self._cells.get((operator, shard, name))
        if cell is None:
            declared = sorted(
                n for o, s, n in self._cells if (o, s) == (operator, shard)
            )
            msg = (
                f"operator {operator_name!r} has no state of that name; got {name!r}; "
                f"expected one of {declared}; declare it with states="
            )
            raise GraphError(msg, operator=operator_name, state=name)
        return cell

    def export_shard(
        self, operator: int, shard: int, encode: Callable[[Any], bytes]
    ) -> dict[str, bytes]:
        """Serialise all state of one shard, by name; the state stays in place."""
        return {
            name: encode(cell)
            for (owner, index, name), cell in self._cells.items()
            if (owner, index) == (operator, shard)
        }

    def install_shard(
        self,
        operator: int,
        shard: int,
        exported: dict[str, bytes],
        decode: Callable[[bytes], Any],
    ) -> None:
        """Put exported state in place of what one shard has.

        Raises:
            InvariantError: A name was not declared by the operator here.
        """
        for name, data in exported.items():
            cell = self._cells.get((operator, shard, name))
            if cell is None:
                msg = (
                    f"operator {operator} shard {shard} did not declare state {name!r}; "
                    f"got it from elsewhere; expected the same graph on both sides; "
                    f"install it where it was made"
                )
                raise InvariantError(msg, operator=operator, shard=shard)
            cell.clear()
            cell.update(decode(data))

    def size_bytes(self, operator: int) -> int:
        """Approximate memory of one operator's state on this worker."""
        return sum(
            sum(_size_of(key) + _size_of(value) for key, value in cell.items())
            for (owner, _, _), cell in self._cells.items()
            if owner == operator
        )

    def check_limit(self, operator: int, limit_bytes: int, who: str) -> None:
        """Check how much state an operator keeps on this worker.

        Args:
            operator: Its index.
            limit_bytes: The most that it may keep.
            who: The operator, for people.

        Raises:
            StateLimitError: It keeps more.
        """
        size = self.size_bytes(operator)
        if size > limit_bytes:
            msg = (
                f"{who} keeps too much state; got {size} bytes; expected at most "
                f"{limit_bytes}; discard what is no longer needed or raise "
                "state_limit_bytes"
            )
            raise StateLimitError(msg, size_bytes=size, limit_bytes=limit_bytes)

    def num_entries(self, operator: int) -> int:
        """Entries of one operator's state on this worker, over all its shards."""
        return sum(
            len(cell)
            for (owner, _, _), cell in self._cells.items()
            if owner == operator
        )


class StateLimit:
    """Looks now and then whether operators keep too much state on this worker."""

    def __init__(self, store: StateStore, limit_bytes: int) -> None:
        self._store = store
        self._limit_bytes = limit_bytes
        self._looked_at: dict[int, tuple[float, float]] = {}

    def look(self, operator: int, name: str, metrics: Mapping[str, float]) -> None:
        """Measure an operator's state, if much was done since that was done last.

        Args:
            operator: Its index.
            name: Its name.
            metrics: Its activations and batches so far.

        Raises:
            StateLimitError: It keeps more than the limit.
        """
        activations, batches = metrics["activations"], metrics["batches_in"]
        before = self._looked_at.get(operator, (0, 0))
        if (
            activations - before[0] >= ACTIVATIONS_PER_LOOK
            or batches - before[1] >= BATCHES_PER_LOOK
        ):
            self._looked_at[operator] = activations, batches
            self._store.check_limit(operator, self._limit_bytes, f"operator {name!r}")


def _size_of(value: Any) -> int:
    """Bytes of a value; arrays count their data, containers what they hold, once."""
    total = 0
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        try:
            size, held = _size_and_held(item)
        except Exception:  # noqa: BLE001  attributes of an odd object may raise anything
            size, held = _ODD_BYTES, []
        if held:
            if id(item) in seen:
                continue
            seen.add(id(item))
        total += size
        waiting += held
    return total


def _size_and_held(value: Any) -> tuple[int, list[Any]]:
    """Return the bytes of a value without what it holds, and that."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes), []
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):  # arrays of other libraries
        return nbytes, []
    size = sys.getsizeof(value, _ODD_BYTES)
    if isinstance(value, dict):
        return size, [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return size, list(value)
    if (fields := getattr(value, "__dataclass_fields__", None)) is not None:
        return size, [getattr(value, name, None) for name in fields]
    return size, []
