"""A graph as a Mermaid flowchart, for documents and reviews.

Scopes are subgraphs; a dense edge is thick, a sparse one thin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from timelyml.graph.spec import ChannelSpec, OperatorSpec, ScopeSpec
from timelyml.graph.text import shards_text, summary_text


def to_mermaid(
    operators: Sequence[OperatorSpec],
    channels: Sequence[ChannelSpec],
    scopes: Sequence[ScopeSpec],
) -> str:
    """Return the flowchart's source."""
    lines = ["flowchart LR", *_scope_lines(None, operators, scopes, indent="  ")]
    lines += [f"  {_edge(channel)}" for channel in channels]
    return "\n".join(lines)


def _scope_lines(
    scope: int | None,
    operators: Sequence[OperatorSpec],
    scopes: Sequence[ScopeSpec],
    *,
    indent: str,
) -> Iterator[str]:
    """What stands directly in a scope, then the scopes nested in it."""
    for spec in operators:
        if (spec.scope[-1] if spec.scope else None) == scope:
            yield f"{indent}{_box(spec)}"
    for inner in scopes:
        if inner.parent == scope:
            yield f'{indent}subgraph scope{inner.index}["{escaped(inner.name)}"]'
            yield from _scope_lines(
                inner.index, operators, scopes, indent=indent + "  "
            )
            yield f"{indent}end"


def _box(spec: OperatorSpec) -> str:
    title = escaped(spec.name)
    if spec.kind != spec.name:
        title += f"<br/>{escaped(spec.kind)}"
    text = f'"{title}<br/>{shards_text(spec.num_shards)}"'
    return f"op{spec.index}([{text}])" if spec.is_source else f"op{spec.index}[{text}]"


def _edge(channel: ChannelSpec) -> str:
    label = channel.pact.describe()
    if not channel.keeps_time:
        label += f" at {summary_text(channel.summary)}"
    arrow = "==>" if channel.pact.dense else "-->"
    ends = f"op{channel.source.operator}", f"op{channel.target.operator}"
    return f'{ends[0]} {arrow}|"{label}"| {ends[1]}'


def escaped(text: str) -> str:
    """Return text as it may stand in a label."""
    # Mermaid has no backslash escapes; it reads HTML entities without the ampersand
    for character, code in (
        ("#", "#35;"),
        ('"', "#quot;"),
        ("<", "#lt;"),
        (">", "#gt;"),
    ):
        text = text.replace(character, code)
    return text
