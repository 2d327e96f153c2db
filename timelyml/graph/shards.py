"""Checks that shard counts, pacts and placements fit together."""

from __future__ import annotations

from dataclasses import replace

from timelyml.errors import GraphError, ShardCountError
from timelyml.graph.pact import Gather, Pact, Pipeline
from timelyml.graph.placement import (
    PLACEMENT_RULE,
    Placement,
    is_placement,
    settled,
)
from timelyml.graph.spec import OperatorSpec
from timelyml.graph.text import shards_text


def check_shard_count(num_shards: int | None, *, who: str) -> None:
    """Refuse a shard count that is not None or a positive integer."""
    if num_shards is None:
        return
    if isinstance(num_shards, bool) or not isinstance(num_shards, int):
        raise ShardCountError(
            f"{who} has no valid num_shards; got {num_shards!r}; expected an integer; "
            f"pass 1 or more, or leave it out",
            num_shards=repr(num_shards),
        )
    if num_shards < 1:
        raise ShardCountError(
            f"{who} has too few shards; got {num_shards}; expected 1 or more; "
            f"pass 1 or more, or leave it out",
            num_shards=num_shards,
        )


def check_edge(pact: Pact, producer: OperatorSpec, consumer: OperatorSpec) -> None:
    """Refuse a pipeline between different shard counts and a gather beyond the last.

    A pipeline between a fixed count and one per worker is refused too, although
    it could fit by chance: whether a graph is valid must not depend on the cluster.
    """
    source, target = producer.name, consumer.name
    from_shards, to_shards = producer.num_shards, consumer.num_shards
    if isinstance(pact, Pipeline) and from_shards != to_shards:
        raise ShardCountError(
            f"operator {target!r} cannot be pipelined after {source!r}; got "
            f"{shards_text(from_shards)} of {source!r} and {shards_text(to_shards)} of "
            f"{target!r}; expected equal counts; exchange, broadcast or gather instead",
            source=source,
            target=target,
            source_shards=from_shards,
            target_shards=to_shards,
        )
    if isinstance(pact, Gather) and to_shards is not None and pact.shard >= to_shards:
        raise ShardCountError(
            f"operator {target!r} has no shard to gather {source!r} on; got shard "
            f"{pact.shard}; expected less than {to_shards}; name an existing shard",
            source=source,
            target=target,
            shard=pact.shard,
            target_shards=to_shards,
        )


def check_operator(spec: OperatorSpec) -> None:
    """Refuse an operator that would never run, or that cannot be placed as asked."""
    if spec.num_inputs == 0 and not spec.is_source:
        raise GraphError(
            f"operator {spec.name!r} would never run; got no inputs; expected at least "
            f"one, or a source; add an input or declare is_source",
            operator=spec.name,
        )
    check_placement(spec)


def check_placement(spec: OperatorSpec, num_workers: int | None = None) -> None:
    """Refuse a placement that does not fit the operator or, once known, the workers."""
    who = f"operator {spec.name!r}"
    if spec.placement is not None and not is_placement(spec.placement):
        raise GraphError(
            f"{who} cannot be placed; got placement={spec.placement!r}; expected "
            f"{PLACEMENT_RULE}; correct it, or leave it out",
            operator=spec.name,
        )
    if spec.placement is not None and spec.num_shards is not None:
        spec.placement.check(spec.num_shards, num_workers, who=who)


def resolved(
    spec: OperatorSpec, num_workers: int, placement: Placement | None
) -> OperatorSpec:
    """Return an operator as it is on so many workers; see `Graph.resolve`."""
    num_shards = spec.num_shards or num_workers
    spec = replace(spec, num_shards=num_shards)
    check_placement(spec, num_workers)
    rule = spec.placement or placement
    if rule is None:
        return spec
    who = f"operator {spec.name!r}"
    rule.check(num_shards, num_workers, who=who)
    table = settled(rule, num_shards, num_workers, who=who)
    return spec if table is rule else replace(spec, placement=table)
