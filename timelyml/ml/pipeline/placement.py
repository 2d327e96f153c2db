"""Which rank holds which stage: in a loop, or there and back again in a V."""

from __future__ import annotations

from collections.abc import Callable

from timelyml.errors import ScheduleError


def loop_placement(num_ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Place stage `s` on rank `s % num_ranks`: the pipeline runs round and round.

    >>> loop_placement(2, 2)
    (0, 1, 0, 1)
    """
    return tuple(s % num_ranks for s in range(num_ranks * stages_per_rank))


def v_placement(num_ranks: int, stages_per_rank: int = 2) -> tuple[int, ...]:
    """Place stages there and back again: every other pass turns round.

    The stages at a turn share a rank, so the loss sits beside the first stage and
    nothing is sent at the turns.

    >>> v_placement(3)
    (0, 1, 2, 2, 1, 0)
    """
    there = tuple(range(num_ranks))
    passes = [
        there if turn % 2 == 0 else there[::-1] for turn in range(stages_per_rank)
    ]
    return tuple(rank for one in passes for rank in one)


def place(
    name: str, placement: str, num_ranks: int, stages_per_rank: int
) -> tuple[int, ...]:
    """Return the placement called 'loop' or 'v', for the schedule called `name`."""
    places: dict[str, Callable[[int, int], tuple[int, ...]]] = {
        "loop": loop_placement,
        "v": v_placement,
    }
    if placement not in places:
        raise ScheduleError(
            f"{name} has an unknown placement; got {placement!r}; expected 'loop' or "
            f"'v'; name one of these",
            reason="placement",
        )
    return places[placement](num_ranks, stages_per_rank)
