"""When a controller that only watches a run hears of its progress."""

from __future__ import annotations

import itertools

import pytest

from timelyml import Dataflow
from timelyml.progress import Tracker
from timelyml.runtime.build import initial_counts
from timelyml.runtime.progress_link import (
    LARGEST_GAP_S,
    LEAST_GAP_S,
    ProgressLink,
)


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """The progress of one of two workers, whose only input opens epoch after epoch."""

    def __init__(self, *, is_fed: bool = False) -> None:
        flow = Dataflow("watched")
        flow.input("numbers", num_shards=1).collect("seen")
        graph = flow.build().resolve(2)
        tracker = Tracker(graph.reachability(), initial_counts(graph, 2))
        tracker.propagate()
        self.clock = Clock()
        self.told: list[float] = []  # when the controller was
        self._stamps = tracker.pointstamps()
        self._link = ProgressLink(
            0, 1, "broadcast", tracker, self.clock, is_fed=is_fed, has_peers=True
        )

    def close_epochs(self, num_epochs: int, epoch_s: float) -> None:
        for _ in range(num_epochs):
            self.clock.now += epoch_s
            self._change(lambda time: time + 1)

    def end(self) -> None:
        self._change(None)

    def _change(self, step) -> None:
        stamps, self._stamps = self._stamps, []
        for location, time, count in stamps:
            self._link.record(location, time, -count)
            if step is not None:
                self._link.record(location, step(time), count)
                self._stamps.append((location, step(time), count))
        assert self._link.tell_itself()
        self._link.apply()
        self.look()

    def look(self) -> None:
        if self._link.take_for_controller() is not None:
            self.told.append(self.clock.now)

    @property
    def due(self) -> float | None:
        return self._link.controller_due()


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_epochs_that_take_long_are_told_at_once():
    watched = Watched()
    watched.close_epochs(5, epoch_s=1.0)
    assert len(watched.told) == 5


def test_the_faster_epochs_close_the_rarer_the_controller_hears():
    watched = Watched()
    watched.close_epochs(10_000, epoch_s=1e-4)
    assert len(watched.told) < 100
    assert max(gaps(watched.told)) <= LARGEST_GAP_S + 2e-4


def test_after_a_pause_news_is_told_at_once_and_the_gap_is_small_again():
    watched = Watched()
    watched.close_epochs(1_000, epoch_s=1e-4)
    watched.close_epochs(1, epoch_s=1.0)
    assert watched.told[-1] == watched.clock.now
    watched.close_epochs(1, epoch_s=1e-4)
    assert watched.due == pytest.approx(watched.told[-1] + LEAST_GAP_S)


def test_the_end_of_a_run_is_told_at_once():
    watched = Watched()
    watched.close_epochs(1_000, epoch_s=1e-4)
    assert watched.due is None or watched.due > watched.clock.now
    watched.end()
    assert watched.told[-1] == watched.clock.now


def test_a_driver_that_feeds_a_run_hears_of_every_epoch():
    watched = Watched(is_fed=True)
    watched.close_epochs(100, epoch_s=1e-4)
    assert len(watched.told) == 100
