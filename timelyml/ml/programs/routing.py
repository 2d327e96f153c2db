"""`ml.route` and `ml.unroute`: rows that go where their values say, and back.

On the slice where they are, rows are sorted by where they go. How many go from which
shard to which comes to the controller with the news of that, and is told to the hosts of
both slices, which send each other just those rows (the paper's section 6.3).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from timelyml.errors import ConfigError, HandleError, TraceError
from timelyml.ml.functions import (
    ArrayType,
    jit,
    partition_spec,
    recorder,
    spec_of,
)
from timelyml.ml.functions.blame import calling_line
from timelyml.ml.functions.ragged import Layout
from timelyml.ml.programs import packing
from timelyml.ml.programs.batches import Batch
from timelyml.ml.programs.counts import as_count, listed
from timelyml.ml.programs.nodes import Exchange, Sparse, Value
from timelyml.ml.programs.recorder import Recorder
from timelyml.ml.programs.tracing import alone

NUMBERS = itertools.count(1)
"""Of routings that are traced."""


def route(
    values: Any,
    destinations: Any,
    slice: Any,  # noqa: A002 - what users call it
    *,
    max_rows: int | None = None,
) -> Any:
    """Send each row to the shard of a slice that its destination names.

    Rows go from host to host, and only between those where there are any. On each shard
    they lie in the order of the shards where they come from, and of those in theirs.

    Args:
        values: An array, or a tree of arrays of as many rows; or of ragged handles.
        destinations: `(rows,)` integers: a shard of the slice, in row-major order of
            its mesh; a negative one drops the row, for which `unroute` has zeros. There
            is no gradient of them; that of the rows comes back by where these went.
        slice: Where to.
        max_rows: For so many rows a shard gets room; if it is sent more, the results
            fail. None: for all, which takes as much memory on each of its devices.

    Returns:
        A tree like `values` of ragged handles.

    Raises:
        TraceError: Destinations are no integers, or there are not as many as rows.
        HandleError: The slice is another client's.
        ConfigError: `slice` is none, or `max_rows` no count.
    """
    _check_slice(slice)
    room = as_count("route", "max_rows", max_rows, 1)

    def send(values: Any, destinations: Any) -> Any:
        return _Sending("route", values, destinations, slice).sent(room)

    return alone("route", send, values, listed(destinations))


def unroute(results: Any) -> Any:
    """Bring rows back to where `route` took them from, in their order there.

    Args:
        results: A ragged handle that `route` or a function on its results returned, or
            a tree of them.

    Returns:
        A tree like `results` of arrays of as many rows as were routed; zeros in place
        of those that were dropped. Where ragged handles were routed, such again.

    Raises:
        TraceError: They are no ragged handles of one routing.
    """

    def bring(results: Any) -> Any:
        return _bring_back(results)

    return alone("unroute", bring, results)


class _Sending:
    """One routing that is being traced."""

    def __init__(self, name: str, values: Any, destinations: Any, slice_: Any) -> None:
        around = recorder()
        assert isinstance(around, Recorder)  # noqa: S101 - for the type
        self._around = around
        self._batch = Batch.of(name, values)
        self._to = slice_
        self._destinations = self._checked(name, destinations)
        there = self._batch.slice or getattr(self._destinations, "slice", None)
        self._from = slice_ if there is None else there

    def sent(self, max_rows: int | None) -> Any:
        """Record it; return what stands for the rows."""
        batch = self._batch
        num_sources, num_targets = self._from.mesh.size, self._to.mesh.size
        order, matrix, rows = self._packed(num_sources, num_targets)
        to = on_slice(
            self._to,
            "counts",
            packing.arrived(num_sources, num_targets),
            over(self._to),
        )
        counts = to(*matrix)
        num_rows = packing.padded(batch.num_rows, num_sources)
        room = max_rows or num_rows
        found = _exchanged(
            self._around,
            (matrix, rows),
            (self._to, room),
            shape=(num_sources, num_targets),
            is_back=False,
        )
        number = next(NUMBERS)
        layout = Layout(
            counts,
            order,
            tuple(matrix),
            batch.layout,
            number,
            batch.num_rows,
            num_sources,
        )
        return batch.back(found, layout)

    def _packed(self, num_sources: int, num_targets: int) -> Any:
        """Have the rows sorted where they are."""
        whole = over(self._from)
        pack = packing.packed(num_sources, num_targets, whole)
        enter = packing.entered(num_sources)

        def pack_batch(*rows: jax.Array) -> Any:
            counts, padded = enter(*rows)
            return pack(counts, *padded)

        batch = self._batch
        shardings = whole, partition_spec(()), whole
        if batch.layout is None:
            run = on_slice(self._from, "route", pack_batch, shardings)
            return run(self._destinations, *batch.leaves)
        run = on_slice(self._from, "route", pack, shardings)
        return run(batch.layout.counts, self._destinations, *batch.leaves)

    def _checked(self, name: str, destinations: Any) -> Any:
        """Return destinations, without what makes them ragged.

        Raises:
            TraceError: They are none for these rows.
        """
        batch = self._batch
        found = batch.numbers(name, "destinations", destinations)
        client = self._around.client
        if client is not None and self._to.client is not client:
            raise HandleError(
                f"{batch.who} goes to a slice of another client; got {self._to.name!r}; "
                f"expected one of the client whose program this is; publish the rows "
                f"and open them there",
                program=name,
            )
        if isinstance(found, np.ndarray | jax.Array):
            worst = int(np.max(found, initial=0))  # not -1, which no unsigned type has
            if worst >= self._to.mesh.size:
                raise TraceError(
                    f"{batch.who} sends a row to a shard that is not there; got "
                    f"destination {worst}; expected below {self._to.mesh.size}, or "
                    f"negative to drop it",
                    function=name,
                )
            if found.dtype.kind == "i":  # hosts may cut them to fewer bits
                found = found.clip(-1)
        return found


def _bring_back(results: Any) -> Any:
    around = recorder()
    assert isinstance(around, Recorder)  # noqa: S101 - for the type
    batch = Batch.of("unroute", results)
    layout = batch.layout
    if layout is None or layout.order is None:
        what = "arrays" if layout is None else "rows that lie where they were"
        raise TraceError(
            f"{batch.who} cannot bring rows back; got {what}; expected ragged handles "
            f"that route returned, or a function on them; rows of a loop or switch come "
            f"back by themselves",
            function="unroute",
        )
    home = layout.order.slice
    whole = over(home)
    num_targets = batch.slice.mesh.size
    shape = layout.num_sources, num_targets
    num_rows = packing.padded(layout.num_rows, layout.num_sources)
    found = _exchanged(
        around,
        (layout.matrix, batch.leaves),
        (home, num_rows // layout.num_sources),
        shape=shape,
        is_back=True,
    )
    is_even = layout.num_rows == num_rows
    back = on_slice(
        home,
        "unroute",
        packing.put_back(layout.num_rows, whole),
        whole if is_even else None,
    )
    return batch.back(back(layout.order, *found), layout.origin)


def _exchanged(
    around: Recorder,
    operands: tuple[Sequence[Any], Sequence[Any]],
    to: tuple[Any, int],
    *,
    shape: tuple[int, int],
    is_back: bool,
) -> Sequence[Any]:
    """Record an exchange of rows; return what stands for those that arrive.

    Args:
        around: Records it.
        operands: The matrix, and the rows.
        to: The slice where they go, and for how many rows a shard has room there.
        shape: Of the matrix.
        is_back: Which way.
    """
    slice_, room = to
    matrix, rows = (
        tuple(around.operand(each, "route") for each in group) for group in operands
    )
    spec = spec_of(over(slice_))
    values = [
        Value(
            _of_rows(around.value(ref).type, room * slice_.mesh.size), spec, slice_.name
        )
        for ref in rows
    ]
    return around.control(
        Exchange(
            operands=(*matrix, *rows),
            num_pieces=len(matrix),
            shape=shape,
            sparse=Sparse(is_back),
            max_rows=room,
            outputs=tuple(values),
            line=calling_line(),
        )
    )


def over(slice_: Any) -> PartitionSpec:
    """Return the spec of rows that are cut over all axes of a slice."""
    names = tuple(slice_.mesh.axis_names)
    return partition_spec((names[0] if len(names) == 1 else names,))


def on_slice(
    slice_: Any, name: str, function: Callable[..., Any], out_shardings: Any
) -> Callable[..., Any]:
    """Return a function of this package, compiled for a slice."""
    function.__name__ = name
    compiled: Callable[..., Any] = jit(
        function, slice=slice_, out_shardings=out_shardings
    )
    return compiled


def _check_slice(slice_: Any) -> None:
    if not isinstance(getattr(slice_, "mesh", None), AbstractMesh):
        raise ConfigError(
            f"route: no slice to send rows to; got {slice_!r}; expected one that a client "
            f"gave; write ml.route(values, destinations, client.slice(...))",
            option="slice",
        )


def _of_rows(of: ArrayType, num_rows: int) -> ArrayType:
    return ArrayType((num_rows, *of.shape[1:]), of.dtype, of.itemsize)
