from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import TimeError
from timelyml.progress import TIME_LIMIT, Summary, Timestamp

from .oracles import before, depths, summaries, times


@st.composite
def paths(draw: st.DrawFn) -> tuple[Timestamp, Timestamp, list[Summary]]:
    """Two times of one depth, and three summaries that follow one another."""
    sizes = [draw(depths) for _ in range(4)]
    steps = [draw(summaries(a, b)) for a, b in itertools.pairwise(sizes)]
    return draw(times(sizes[0])), draw(times(sizes[0])), steps


def in_full(summary: Summary, time: Timestamp) -> Timestamp:
    result = summary.results_in(time)
    assert result is not None
    return result


def then(first: Summary, second: Summary) -> Summary:
    composed = first.followed_by(second)
    assert composed is not None
    return composed


@given(paths())
def test_followed_by_is_composition(
    path: tuple[Timestamp, Timestamp, list[Summary]],
) -> None:
    time, _, (first, second, third) = path
    stepwise = in_full(third, in_full(second, in_full(first, time)))
    assert in_full(then(then(first, second), third), time) == stepwise
    assert then(then(first, second), third) == then(first, then(second, third))


@given(paths())
def test_summaries_are_monotone(
    path: tuple[Timestamp, Timestamp, list[Summary]],
) -> None:
    a, b, (summary, _, _) = path
    assert not before(a, b) or before(in_full(summary, a), in_full(summary, b))


@given(depths.flatmap(lambda depth: st.tuples(st.just(depth), times(depth))))
def test_the_identity_changes_nothing(sample: tuple[int, Timestamp]) -> None:
    depth, time = sample
    identity = Summary.identity(depth)
    assert identity.is_identity
    assert identity.target_depth == depth
    assert identity.results_in(time) == time
    assert Summary.enter(depth).followed_by(Summary.leave(depth + 1)) == identity
    assert not Summary.advance(depth).is_identity


def same_ends() -> st.SearchStrategy[tuple[int, Summary, Summary]]:
    ends = st.tuples(depths, depths)
    return ends.flatmap(
        lambda pair: st.tuples(st.just(pair[0]), summaries(*pair), summaries(*pair))
    )


@given(same_ends())
def test_less_equal_is_the_order_of_all_results(
    sample: tuple[int, Summary, Summary],
) -> None:
    depth, a, b = sample
    # Constants are at most 2, so the coordinates 0 and 3 tell all cases apart.
    samples = itertools.product((0, 3), repeat=depth + 1)
    starts: list[Timestamp] = [c if depth else c[0] for c in samples]
    everywhere = all(before(in_full(a, t), in_full(b, t)) for t in starts)
    assert a.less_equal(b) == everywhere


def test_scopes_and_feedback_have_the_summaries_of_their_names() -> None:
    assert Summary.enter(0).results_in(4) == (4, 0)
    assert Summary.enter(1).results_in((4, 2)) == (4, 2, 0)
    assert Summary.leave(2).results_in((4, 2, 7)) == (4, 2)
    assert Summary.leave(1).results_in((4, 2)) == 4
    assert Summary.advance(1, by=3).results_in((4, 2)) == (4, 5)
    assert Summary.advance(0).results_in(4) == 5


def test_what_overflows_is_dropped() -> None:
    last = TIME_LIMIT - 1
    assert Summary.advance(0).results_in(last) is None
    assert Summary.advance(0).results_in(last - 1) == last
    assert Summary.advance(1).results_in((0, last)) is None
    far = Summary.advance(0, by=last)
    assert far.followed_by(Summary.advance(0)) is None
    assert Summary.enter(0).followed_by(Summary.advance(1, by=last)) == Summary(
        1, (0,), (last,)
    )
    at_end = Summary(1, (0,), (last,))
    assert at_end.followed_by(Summary.advance(1)) is None


@pytest.mark.parametrize(
    ("keep", "add", "append"),
    [(0, (), (1,)), (2, (0,), ()), (1, (-1,), ()), (1, (0,), (TIME_LIMIT,))],
)
def test_a_malformed_summary_cannot_be_made(
    keep: int, add: tuple[int, ...], append: tuple[int, ...]
) -> None:
    with pytest.raises(TimeError, match="summary is malformed"):
        Summary(keep, add, append)


def test_summaries_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TimeError, match="do not compose"):
        Summary.identity(0).followed_by(Summary.identity(1))
    with pytest.raises(TimeError, match="no order"):
        Summary.identity(0).less_equal(Summary.enter(0))
    with pytest.raises(TimeError, match="does not fit its timestamp"):
        Summary.identity(1).results_in(3)
