"""Checks and normal forms of the summaries that a graph is built from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from timelyml.errors import GraphError
from timelyml.graph.spec import Summaries
from timelyml.graph.text import summary_text
from timelyml.progress import Summary


def compose(who: str, first: Summary, second: Summary) -> Summary:
    """Return the effect of one summary after the other.

    Raises:
        GraphError: No time survives it, because it advances too far.
    """
    both = first.followed_by(second)
    if both is None:
        raise GraphError(
            f"{who} never has a time left; got {summary_text(first)} followed by "
            f"{summary_text(second)}; expected coordinates below 2**63; advance less",
            who=who,
        )
    return both


def inner_summaries(
    operator: str,
    given: Sequence[Sequence[Iterable[Summary]]] | None,
    shape: tuple[int, int],
    depth: int,
) -> Summaries:
    """Return an operator's summaries by input and output, as minimal elements.

    Raises:
        GraphError: Their shape is not (inputs, outputs), or they change the scope.
    """
    num_inputs, num_outputs = shape
    if given is None:
        return (((Summary.identity(depth),),) * num_outputs,) * num_inputs
    rows = tuple(tuple(minimal(paths) for paths in row) for row in given)
    if len(rows) != num_inputs or any(len(row) != num_outputs for row in rows):
        got = [len(row) for row in rows]
        raise GraphError(
            f"operator {operator!r} has summaries of the wrong shape; got rows of "
            f"{got}; expected {num_inputs} inputs by {num_outputs} outputs; give one "
            f"row an input, with one set an output",
            operator=operator,
            got=got,
        )
    for row in rows:
        for paths in row:
            for summary in paths:
                _check_stays(f"operator {operator!r}", summary, depth)
    return rows


def loop_summary(loop: str, depth: int, by: int, summary: Summary | None) -> Summary:
    """Return what one round of a loop does to time.

    Raises:
        GraphError: It goes backwards or changes the scope.
    """
    if summary is not None:
        _check_stays(f"loop {loop!r}", summary, depth)
        return summary
    if by < 0:
        raise GraphError(
            f"loop {loop!r} cannot go backwards; got by={by}; expected 0 or more; "
            f"advance by 1",
            loop=loop,
            by=by,
        )
    return Summary.advance(depth, by=by) if by else Summary.identity(depth)


def minimal(summaries: Iterable[Summary]) -> tuple[Summary, ...]:
    """Return the minimal ones, each once, in an order that depends on nothing else."""
    found: list[Summary] = []
    for summary in summaries:
        if not any(other.less_equal(summary) for other in found):
            found = [other for other in found if not summary.less_equal(other)]
            found.append(summary)
    return tuple(sorted(found, key=lambda each: (each.keep, each.add, each.append)))


def _check_stays(who: str, summary: Summary, depth: int) -> None:
    """Refuse a summary that does not take times of a depth to times of that depth."""
    if not 1 <= summary.keep <= depth + 1 or summary.target_depth != depth:
        raise GraphError(
            f"{who} has a summary that changes the scope; got {summary_text(summary)}; "
            f"expected {depth + 1} coordinates; enter and leave by the builder",
            who=who,
            depth=depth,
        )
