"""What the controller makes of the news of how many rows go where: a matrix of counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from timelyml.errors import ComputationError
from timelyml.ml.controller import flow_loops
from timelyml.ml.controller.flow_frames import Frame, needs, within
from timelyml.ml.programs.flows import Scatter
from timelyml.ml.programs.sparse import Matrix
from timelyml.runtime.failure import pack_error


class Run(flow_loops.Run, Protocol):
    """The run of a flow that a routing is part of; `flow_runs` has it."""

    def scatter(self, frame: Frame, step: Scatter, matrix: Matrix) -> None:
        """Move rows as a matrix says, and go on."""


class Scattered:
    """A routing that waits for its matrix."""

    def __init__(self, run: Run, frame: Frame, step: Scatter) -> None:
        self._run = run
        self._frame = frame
        self._step = step
        pieces = [frame.env[name] for name in step.matrix]
        when_all_known(run.when_known, pieces, self._go)

    def _go(self, news: Any) -> None:
        run, frame, step = self._run, self._frame, self._step
        found = matrix_of(step, news, frame.where)
        if isinstance(found, bytes):
            run.use(frame, needs(step))
            run.give(frame, step, run.failed(step.values, found))
        else:
            run.scatter(frame, step, found)


def matrix_of(step: Scatter, news: Sequence[Any] | bytes, where: str) -> Matrix | bytes:
    """Return the matrix of a routing, or the packed error of one that cannot be done.

    Args:
        step: The routing.
        news: Pieces of the matrix, row by row, and last the largest destination; or why
            there are none, packed.
        where: In which run of which loop, and the like.
    """
    if isinstance(news, bytes):
        return news
    pieces = [np.asarray(each).ravel() for each in news]
    told = np.concatenate(pieces).astype(np.int64)
    matrix = told[:-1].reshape(step.shape)
    refusal = _refusal(step, matrix, int(told[-1]), where)
    return matrix if refusal is None else pack_error(refusal)


def when_all_known(
    when_known: Callable[[int, Callable[[Any], None]], None],
    numbers: Sequence[int],
    reader: Callable[[Any], None],
    found: tuple[Any, ...] = (),
) -> None:
    """Call with the values of several buffers, or with the packed error of one.

    Args:
        when_known: Calls with the value of one, or its packed error, once that came.
        numbers: The buffers.
        reader: What is called.
        found: The values of the first of them.
    """
    if len(found) == len(numbers):
        reader(found)
        return

    def take(news: Any) -> None:
        if isinstance(news, bytes):
            reader(news)
        else:
            when_all_known(when_known, numbers, reader, (*found, news))

    when_known(numbers[len(found)], take)


def _refusal(
    step: Scatter, matrix: Any, worst: int, where: str
) -> ComputationError | None:
    """Return the error of rows that have no place where they go, if there are some."""
    if step.max_rows is None:
        return None  # what comes back was there
    who = f"{within(step.place, where)} cannot send rows"
    slice_name, num_shards = step.values[0].slice, step.shape[1]
    if worst >= num_shards:
        return ComputationError(
            f"{who}; got destination {worst}; expected a shard of slice {slice_name!r}, "
            f"below {num_shards}, or a negative number to drop the row",
            function="route",
            where=step.place,
        )
    counts = matrix.sum(0)
    if counts.max() <= step.max_rows:
        return None
    shard = int(counts.argmax())
    return ComputationError(
        f"{who}; got {counts[shard]} for shard {shard} of slice {slice_name!r}; expected "
        f"at most {step.max_rows}, as max_rows says; raise max_rows, or drop rows with "
        f"a negative destination",
        function="route",
        where=step.place,
    )
