"""A graph as text: one line an operator, the same in every process.

The text holds all of the structure and nothing of the functions, so that two
processes can compare graphs by its digest and name the first line that differs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from timelyml.graph.spec import ChannelSpec, OperatorSpec, ScopeSpec
from timelyml.progress import Summary


def describe(
    name: str,
    operators: Sequence[OperatorSpec],
    channels: Sequence[ChannelSpec],
    scopes: Sequence[ScopeSpec],
) -> str:
    """Return one line for the graph, one a scope and one an operator."""
    incoming: defaultdict[int, list[str]] = defaultdict(list)
    for channel in channels:
        incoming[channel.target.operator].append(_channel_text(channel, operators))
    lines = [f"dataflow {name}"]
    lines += [f"scope {scope_path(_path(scope, scopes), scopes)}" for scope in scopes]
    for spec in operators:
        lines.append(_operator_text(spec, incoming[spec.index], scopes))
    return "\n".join(lines)


def first_difference(mine: str, theirs: str) -> str | None:
    """Return the first line that differs between two descriptions, or None."""
    pairs = zip_longest(mine.splitlines(), theirs.splitlines())
    for number, (here, there) in enumerate(pairs, start=1):
        if here != there:
            return (
                f"line {number}: {_line_or_end(here)} here, {_line_or_end(there)} there"
            )
    return None


def scope_path(path: Sequence[int], scopes: Sequence[ScopeSpec]) -> str:
    """Return the names of the scopes, outermost first: `outer/inner`."""
    return "/".join(scopes[index].name for index in path)


def shards_text(num_shards: int | None) -> str:
    """Return a shard count for people."""
    if num_shards is None:
        return "1 shard per worker"
    return "1 shard" if num_shards == 1 else f"{num_shards} shards"


def summary_text(summary: Summary) -> str:
    """Return where a summary takes a time `(e, i1, i2, ..)`.

    >>> summary_text(Summary.advance(1, by=2))
    '(e, i1+2)'
    """
    names = ["e", *(f"i{depth}" for depth in range(1, summary.keep))]
    kept = [
        f"{coordinate}+{added}" if added else coordinate
        for coordinate, added in zip(names, summary.add, strict=False)
    ]
    return f"({', '.join([*kept, *map(str, summary.append)])})"


def _path(scope: ScopeSpec, scopes: Sequence[ScopeSpec]) -> list[int]:
    path = [scope.index]
    while (parent := scopes[path[0]].parent) is not None:
        path.insert(0, parent)
    return path


def _operator_text(
    spec: OperatorSpec, incoming: Sequence[str], scopes: Sequence[ScopeSpec]
) -> str:
    parts = [f"{spec.index} {spec.name}: {spec.kind}", shards_text(spec.num_shards)]
    if spec.scope:
        parts.append(f"in scope {scope_path(spec.scope, scopes)}")
    parts.append(f"{spec.num_inputs} in, {spec.num_outputs} out")
    if spec.is_source:
        parts.append("source")
    if spec.regular:
        parts.append("regular")
    if spec.states:
        parts.append(f"states {' '.join(spec.states)}")
    if spec.placement is not None:
        parts.append(f"placed {spec.placement.describe()}")
    parts += _inner_texts(spec)
    parts += incoming
    return "; ".join(parts)


def _inner_texts(spec: OperatorSpec) -> list[str]:
    """What the operator does to time, where it is not simply nothing."""
    identity = (Summary.identity(spec.depth),)
    return [
        f"in{i} to out{o} "
        + (" or ".join(sorted(map(summary_text, paths))) if paths else "never")
        for i, row in enumerate(spec.summaries)
        for o, paths in enumerate(row)
        if paths != identity
    ]


def _channel_text(channel: ChannelSpec, operators: Sequence[OperatorSpec]) -> str:
    name = operators[channel.source.operator].name
    text = (
        f"in{channel.target.port} <- {name}.out{channel.source.port} "
        f"by {channel.pact.describe()}"
    )
    if not channel.keeps_time:
        text += f" at {summary_text(channel.summary)}"
    return f"{text}, cyclic" if channel.is_cyclic else text


def _line_or_end(line: str | None) -> str:
    return "nothing" if line is None else repr(line)
