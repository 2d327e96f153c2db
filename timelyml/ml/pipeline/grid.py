"""Lays the order of each rank out in slots of equal length, with explicit bubbles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from timelyml.ml.pipeline.actions import Action, Row, made_by, needed_by

Program: TypeAlias = list[Row]
"""The rows of one rank, while they are put together."""


def spread(
    programs: Sequence[Program], num_stages: int, starts: Sequence[tuple[int, int]]
) -> list[Program]:
    """Lay programs out in slots of equal length, with bubbles where a rank must wait.

    Args:
        programs: For each rank its rows; bubbles in them keep a slot of their own.
        num_stages: How many stages there are.
        starts: For each rank an index into its program, and the first slot in which
            that row may stand.
    """
    grid: list[Program] = [[] for _ in programs]
    positions = [0] * len(programs)
    made: set[Action] = set()
    slot = 0
    while any(p < len(rows) for p, rows in zip(positions, programs, strict=True)):
        fresh: set[Action] = set()
        for rank, program in enumerate(programs):
            position = positions[rank]
            if position == len(program):
                continue
            row = program[position]
            needs = {v for action in row for v in needed_by(action, num_stages)}
            index, first_slot = starts[rank]
            if needs <= made and (position != index or slot >= first_slot):
                grid[rank].append(row)
                fresh.update(map(made_by, row))
                positions[rank] += 1
            else:
                grid[rank].append(())
        made |= fresh
        slot += 1
    return grid
