"""Dense edges complete by the set of producers that were heard, not by a number."""

from __future__ import annotations

import pytest

from timelyml.errors import InvariantError, OperatorError
from timelyml.runtime.dense import DenseInput


def _input(num_expected=3):
    return DenseInput(0, "embed", "route", num_expected=num_expected)


def test_an_input_is_complete_when_every_producer_was_heard():
    dense = _input()

    heard = [dense.hear(4, 0, producer) for producer in (2, 0, 1)]

    assert heard == [False, False, True]
    assert dense.is_complete(4, 0)
    assert not dense.is_complete(5, 0)
    assert not dense.is_complete(4, 1)


def test_a_block_that_comes_twice_is_refused_and_not_counted():
    dense = _input()
    dense.hear(4, 0, 1)

    with pytest.raises(
        InvariantError, match=r"'route' shard 0 got a dense block twice"
    ):
        dense.hear(4, 0, 1)

    assert not dense.is_complete(4, 0)


def test_a_producer_that_did_not_fire_is_named_when_the_time_has_passed():
    dense = _input()
    dense.hear(4, 0, 1)

    with pytest.raises(OperatorError, match=r"'embed' did not fire .* got 1 of 3"):
        dense.forget_passed([4])


def test_passed_times_are_forgotten():
    dense = _input(num_expected=1)
    for time in range(1000):
        dense.hear(time, 0, 0)
        dense.forget_passed([time])

    assert dense.open_times() == []
