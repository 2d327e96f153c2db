"""`compute`: a JAX function as an operator, once per shard and timestamp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from timelyml.errors import ConfigError
from timelyml.graph import Pact, Placement, StreamRef
from timelyml.ml.buckets import bucket_size, cut_rows, num_rows_of, pad_rows
from timelyml.ml.compiled import Compiled, compiled
from timelyml.ml.firing import Blocks, Firing, Rule, add_firing_operator
from timelyml.operators.edges import (
    Routed,
    StreamLike,
    as_input,
    check_stream,
    shards_asked_for,
)
from timelyml.runtime.shard import Shard

Init = Callable[[int], Any]
"""From the index of a shard to its initial state, a pytree of arrays."""

_SHAPES = "shapes"


def compute(
    streams: StreamLike | Sequence[StreamLike],
    fn: Callable[..., Any],
    *,
    init: Init | None = None,
    pact: Pact | Sequence[Pact] | None = None,
    pad: bool = False,
    name: str = "compute",
    num_shards: int | None = None,
    placement: Placement | None = None,
) -> StreamRef:
    """Apply a JAX function to all rows of each timestamp, once they are complete.

    Every shard that received anything at a time calls `fn` once, in time order,
    with the rows of each stream in the order of the shards that sent them; the
    result does not depend on the order of arrival. `fn` is jitted, once per worker.

    Args:
        streams: One or several streams of one scope; each is an argument of `fn`.
            A stream without rows at a time arrives with zero rows, if anything
            did before, and else its shard is not called before it did.
        fn: Pure. Without `init`: from columns to columns. With it: from state and
            columns to state and columns. Columns share their leading axis; records
            that are numbers arrive as one array.
        init: Draws the state of a shard; it lives with the shard from then on.
        pact: How rows reach the shards, one for all streams or one each; default:
            as each is routed, else they stay in the shard that sent them.
        pad: Pad rows with zeros to a bucket, so that XLA compiles few shapes, and
            cut the result to the rows of the first stream. `fn` must then be
            row-wise, or indifferent to zero rows.
        name: Shown in traces and errors; the key of its state in snapshots.
        num_shards: By default that of the first stream.
        placement: Of shards on workers.

    Returns:
        The stream of results, stamped with the times of the rows.

    Raises:
        ConfigError: `fn` or `init` cannot be called, or pacts and streams differ
            in number.
    """
    ups = [streams] if isinstance(streams, (StreamRef, Routed)) else list(streams)
    for up in ups:
        check_stream(name, up)
    pacts = _one_each(name, pact, len(ups))
    if init is not None and not callable(init):
        raise ConfigError(
            f"operator {name!r} cannot draw its state; got {init!r}; expected a "
            "function of the shard's index; pass a function, not its result",
            operator=name,
        )
    apply = _Apply(compiled(fn), has_state=init is not None, pad=pad)
    ports = tuple(range(len(ups)))
    (result,) = add_firing_operator(
        ups[0].builder,
        name,
        [as_input(up, each) for up, each in zip(ups, pacts, strict=True)],
        [Rule(ports, apply, outputs=(0,))],
        num_outputs=1,
        num_shards=shards_asked_for(ups) if num_shards is None else num_shards,
        regular=True,  # where it is told of every time, it answers every time
        placement=placement,
        states=(_SHAPES,),
        on_start=_Start(init) if init is not None else None,
        # Between ports, shapes are learnt in time order too.
        in_order=init is not None or len(ups) > 1,
    )
    return result


@dataclass(frozen=True, slots=True)
class _Start:
    """Puts the initial state of a shard in place."""

    init: Init

    def __call__(self, shard: Shard) -> None:
        if "value" not in shard.state:  # it may be there, from a snapshot
            shard.state["value"] = self.init(shard.index)


@dataclass(frozen=True, slots=True)
class _Apply:
    """Joins the blocks of every port, calls the function, sends what it gives."""

    function: Compiled
    has_state: bool
    pad: bool

    def __call__(self, firing: Firing) -> None:
        columns = [self._columns(firing, port) for port in firing.inputs]
        if any(each is None for each in columns):
            raise ConfigError(
                f"operator {firing.shard.operator!r} has no rows to learn the shape of "
                f"an input from; got ports {sorted(firing.inputs)} at {firing.time!r}; "
                "expected rows on each at the first time; send zero rows over a dense "
                "edge, or concatenate the streams",
                operator=firing.shard.operator,
                time=firing.time,
            )
        count = num_rows_of(columns[0])
        function: Callable[..., Any] = self.function
        if self.pad:
            sizes = tuple(bucket_size(num_rows_of(c)) for c in columns)
            columns = [pad_rows(c, s) for c, s in zip(columns, sizes, strict=True)]
            function = partial(self.function.on_rows, sizes)
        if self.has_state:
            state = firing.shard.state
            state["value"], result = function(state["value"], *columns)
        else:
            result = function(*columns)
        if self.pad:
            firing.shard.report_peak("compiled_sizes", len(self.function.sizes))
        result = jax.tree.map(np.asarray, result)
        firing.send(0, cut_rows(result, count) if self.pad else result)

    def _columns(self, firing: Firing, port: int) -> Any:
        """The rows of a port; none of the known shape where nothing arrived."""
        blocks: Blocks = firing.inputs[port]
        shapes = firing.shard.state_of(_SHAPES)
        if blocks:
            rows = blocks.rows
            if isinstance(rows, list):
                rows = np.asarray(rows)
            if port not in shapes:
                shapes[port] = cut_rows(rows, 0)
            return rows
        return shapes.get(port)


def _one_each(
    name: str, pact: Pact | Sequence[Pact] | None, count: int
) -> tuple[Pact | None, ...]:
    if isinstance(pact, Sequence):
        if len(pact) != count:
            raise ConfigError(
                f"operator {name!r} has pacts for other streams; got {len(pact)}; "
                f"expected {count}; give one for all, or one each",
                operator=name,
            )
        return tuple(pact)
    return (pact,) * count
