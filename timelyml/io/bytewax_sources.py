"""Streams from the sources of Bytewax, or from objects of their shape.

Each shard lists the partitions that it sees and tells all others, on an edge from
the operator to itself; then every shard knows which are its own: each partition is
read by one shard that sees it, and none has many more than another. Where a
partition stands is state; after a change of shards it moves with the partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timelyml.errors import ConfigError, GraphError
from timelyml.graph import Broadcast, GraphBuilder, Placement, StreamRef
from timelyml.io.bytewax_positions import POSITIONS, Live, Position
from timelyml.io.bytewax_reading import EpochRule, ShardReader
from timelyml.io.bytewax_shapes import (
    Shape,
    check_partition,
    describe,
    list_partitions,
    noting,
    source_shape,
)
from timelyml.operators import OperatorBuilder
from timelyml.operators.checks import check_optional_count
from timelyml.operators.schema import SCHEMA, Guards, SchemaLike, as_schema, declare
from timelyml.progress import Timestamp
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard

EPOCH_INTERVAL_S = 10.0
"""How long an epoch is where nothing is said, as in Bytewax."""

Listing = tuple[int, list[str], dict[str, Any]]
"""A shard, the partitions that it sees, and the positions that it kept."""


def read(
    flow: GraphBuilder,
    source: Any,
    *,
    epoch_every: int | None = None,
    epoch_interval_s: float | None = None,
    num_shards: int | None = None,
    placement: Placement | None = None,
    schema: SchemaLike | None = None,
    name: str | None = None,
) -> StreamRef:
    """Make a stream of what a source of Bytewax reads.

    A source has the methods of `FixedPartitionedSource` (hence also those of
    `SimplePollingSource`) or of `DynamicSource`; Bytewax need not be installed. Every
    `next_batch` is one block; one that is an array, or a dict of arrays, is columns.
    A partition ends with StopIteration; any other exception fails the run, also
    `AbortExecution`, and no partition is closed then, as in Bytewax.

    Args:
        flow: The dataflow.
        source: Shipped to the workers, so what it captures must pickle.
        epoch_every: Batches of a shard per epoch. A shard whose partitions fall
            silent ends its epoch early, so that it does not hold back the others.
        epoch_interval_s: Seconds per epoch; default: 10, as in Bytewax, unless
            `epoch_every` is given.
        num_shards: Default: the dataflow's.
        placement: Which worker holds which shard.
        schema: Columns of what it reads; default: the first block of a shard fixes
            them, if it is columns.
        name: Shown in traces and errors, the step id of the source's partitions, and
            the key of their positions; default: "read".

    Raises:
        GraphError: `source` has not the shape of a source.
        ConfigError: An option is out of range.
    """
    who = name or "read"
    shape = source_shape(who, source)
    check_optional_count(who, "epoch_every", epoch_every)
    if epoch_interval_s is not None and not epoch_interval_s > 0:
        raise ConfigError(
            f"operator {who!r} has option 'epoch_interval_s' out of range; got "
            f"{epoch_interval_s!r}; expected a number above 0; correct the option",
            operator=who,
            option="epoch_interval_s",
        )
    if epoch_every is None and epoch_interval_s is None:
        epoch_interval_s = EPOCH_INTERVAL_S
    declared = as_schema(schema)
    rule = EpochRule(epoch_every, epoch_interval_s)
    reading = _Reading(source, rule, Guards("source", declared))
    builder = OperatorBuilder(
        flow,
        "read",
        name=name,
        is_source=True,
        states=("state", POSITIONS, SCHEMA),
        num_shards=num_shards,
        placement=placement,
    )
    if shape is Shape.DYNAMIC:
        builder.add_output()
        (out,) = builder.build(reading.logic(reading.start_dynamic))
        return declare(out, declared)
    loop_name = None if name is None else f"partitions of {name}"
    listings = flow.feedback(None, by=1, name=loop_name)
    builder.add_input(listings.stream, Broadcast())
    out_port, listings_port = builder.add_output({}), builder.add_output({})
    refs = builder.build(reading.logic(reading.start_fixed))
    listings.connect(refs[listings_port])
    return declare(refs[out_port], declared)


@dataclass(frozen=True, slots=True)
class _Reading:
    """The callbacks of one source; shipped with it."""

    source: Any
    rule: EpochRule
    guards: Guards

    def logic(self, on_start: Any) -> Logic:
        return Logic(
            on_start=on_start,
            on_batch=self.hear_listing,
            on_notify=self.open_partitions,
            on_activate=_read_on,
            on_message=_obey,
        )

    def start_dynamic(self, shard: Shard) -> None:
        reader = self._new_reader(shard)
        with noting(f"while {shard.operator!r} was built for shard {shard.index}"):
            partition = self.source.build(shard.operator, shard.index, shard.num_shards)
        check_partition(shard.operator, partition, "next_batch")
        reader.open(f"of shard {shard.index}", partition, Position())
        shard.activate()

    def start_fixed(self, shard: Shard) -> None:
        """Tell every shard what this one sees."""
        self._new_reader(shard)
        kept = {key: p.value for key, p in shard.state_of(POSITIONS).items()}
        parts = list_partitions(shard.operator, self.source)
        listing: Listing = (shard.index, parts, kept)
        shard.output(1).send(0, [listing])

    def hear_listing(self, shard: Shard, delivery: Delivery) -> None:
        shard.notify_at(delivery.time, outputs=())
        reader: ShardReader = shard.state["live"]
        reader.listings += delivery.payload

    def open_partitions(self, shard: Shard, _: Timestamp) -> None:
        """Open the partitions that fall to this shard, now that all have been heard."""
        reader: ShardReader = shard.state["live"]
        if reader.is_over:  # the run is being stopped
            return
        owners = assign(reader.listings)
        if not owners:
            raise GraphError(
                f"source {shard.operator!r} lists no partitions; got "
                f"{describe(self.source)} with none on {shard.num_shards} shards; "
                f"expected at least one; check that what it reads exists",
                source=shard.operator,
            )
        positions = shard.state_of(POSITIONS)
        kept = {key: v for _, _, known in reader.listings for key, v in known.items()}
        for part, owner in owners.items():
            if owner != shard.index:
                positions.pop(part, None)  # it is with its owner now
                continue
            what = f"partition {part!r} of {shard.operator!r}"
            with noting(f"while {what} was built"):
                partition = self.source.build_part(shard.operator, part, kept.get(part))
            check_partition(shard.operator, partition, "next_batch")
            position = positions[part] = Position(kept.get(part))
            reader.open(part, partition, position)
        shard.activate()

    def _new_reader(self, shard: Shard) -> ShardReader:
        capability = shard.initial_capability()
        check = self.guards.of(shard).check
        reader = ShardReader(shard.operator, self.rule, capability, shard.now(), check)
        shard.state["live"] = reader
        return reader


def assign(listings: list[Listing]) -> dict[str, int]:
    """Return which shard reads which partition: one that sees it, and evenly.

    Partitions that few shards see choose first; each takes the shard with the
    fewest so far. So shards that all see the same get equally many, up to one.

    >>> assign([(0, ["a", "b", "c"], {}), (1, ["a", "b", "c"], {})])
    {'a': 0, 'b': 1, 'c': 0}
    >>> assign([(0, ["a", "b", "c"], {}), (1, ["c"], {})])
    {'a': 0, 'b': 0, 'c': 1}
    """
    seen_by: dict[str, list[int]] = {}
    load = {shard: 0 for shard, _, _ in listings}
    for shard, parts, _ in sorted(listings, key=lambda listing: listing[0]):
        for part in parts:
            seen_by.setdefault(part, []).append(shard)
    owners: dict[str, int] = {}
    for part in sorted(seen_by, key=lambda part: (len(seen_by[part]), part)):
        owner = min(seen_by[part], key=lambda shard: (load[shard], shard))
        owners[part] = owner
        load[owner] += 1
    return dict(sorted(owners.items()))


def _read_on(shard: Shard) -> None:
    reader: Live = shard.state["live"]
    assert isinstance(reader, ShardReader)  # noqa: S101  for the type checker
    reader.turn(shard)


def _obey(shard: Shard, body: tuple[Any, ...]) -> None:
    if body[0] == "stop":
        reader: ShardReader = shard.state["live"]
        reader.end()
