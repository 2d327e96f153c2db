"""Generators of pipeline schedules: who computes what, in which order.

Each returns a plan of computations alone; `lowering` writes out the transfers. Rows
are slots of equal length, with bubbles where a rank has to wait; GPipe and 1F1B are
written without bubbles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from timelyml.errors import ScheduleError
from timelyml.ml.pipeline.actions import Action, Op, Schedule
from timelyml.ml.pipeline.grid import Program, spread
from timelyml.ml.pipeline.placement import loop_placement, place, v_placement


def gpipe(
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int = 1,
    placement: str = "loop",
) -> Schedule:
    """Run every forward, then every backward.

    The simplest order, and the one that holds the most: all microbatches are live at
    once. With several stages a rank it runs breadth first, one stage after another.

    Source:
        GPipe (Huang et al., 2019); breadth-first for more stages (Lamy-Poirier, 2022).
    """
    _check("gpipe", num_ranks, num_microbatches, stages_per_rank)
    homes = place("gpipe", placement, num_ranks, stages_per_rank)
    programs: list[Program] = []
    for rank in range(num_ranks):
        stages = [s for s, home in enumerate(homes) if home == rank]
        program: Program = []
        for stage in stages:
            program += _rows(stage, Op.FORWARD, num_microbatches)
        for stage in reversed(stages):
            program += _rows(stage, Op.BACKWARD, num_microbatches)
        programs.append(program)
    return _schedule("gpipe", homes, num_microbatches, programs)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Alternate forwards and backwards as soon as the first gradient is there.

    As fast as GPipe, but stage `s` of `S` holds only `min(M, S - s)` microbatches.

    Source:
        PipeDream-Flush (Narayanan et al., 2021), the non-interleaved schedule.
    """
    _check("1f1b", num_ranks, num_microbatches, 1)
    homes = loop_placement(num_ranks)
    programs: list[Program] = []
    for rank in range(num_ranks):
        warm = min(num_ranks - 1 - rank, num_microbatches)
        forwards = _rows(rank, Op.FORWARD, num_microbatches)
        backwards = _rows(rank, Op.BACKWARD, num_microbatches)
        program = forwards[:warm]
        for forward, backward in zip(forwards[warm:], backwards, strict=False):
            program += [forward, backward]
        programs.append(program + backwards[num_microbatches - warm :])
    return _schedule("1f1b", homes, num_microbatches, programs)


def interleaved_1f1b(
    num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2
) -> Schedule:
    """Cut the model finer, several stages a rank in a loop, for a smaller bubble.

    Microbatches go round in groups of at least `num_ranks`, as even as they can be,
    so any number of microbatches will do. Costs memory: each rank holds up to
    `(V - 1) * group + 2 * (S - 1 - rank) + 1` stage activations.

    Source:
        Interleaved 1F1B (Narayanan et al., 2021). There the number of microbatches
        must be a multiple of the number of ranks; here groups may be uneven.
    """
    _check("interleaved 1f1b", num_ranks, num_microbatches, stages_per_rank)
    loop = _Loop(num_ranks, num_microbatches, stages_per_rank)
    programs: list[Program] = []
    starts: list[tuple[int, int]] = []
    for rank in range(num_ranks):
        forwards = loop.forwards(rank)
        backwards = loop.backwards(rank, Op.BACKWARD)
        warm = loop.warm_up(rank, lead=2)
        program = forwards[:warm]
        for forward, backward in zip(forwards[warm:], backwards, strict=False):
            program += [forward, backward]
        for backward in backwards[len(forwards) - warm :]:
            program += [(), backward]  # a pair's slots, though its forward is gone
        programs.append(program)
        # Align the ranks: steady state begins when the first gradient comes by.
        starts.append((warm, len(loop.homes) + 2 * (num_ranks - 1 - rank)))
    return _schedule(
        "interleaved 1f1b",
        loop.homes,
        num_microbatches,
        spread(programs, len(loop.homes), starts),
    )


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Split backward, and fill 1F1B's bubbles with gradients of weights.

    Peak memory is that of 1F1B's first rank on every rank.

    Source:
        ZB-H1 (Qi et al., 2023).
    """
    return _zero_bubble("zb-h1", num_ranks, num_microbatches, 1)


def interleaved_zero_bubble(
    num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2
) -> Schedule:
    """Interleave several stages a rank, with backward split in two.

    Wants channels about half as deep as there are ranks: see `needed_depth`.

    Source:
        ZB-H1 (Qi et al., 2023) over the loop of interleaved 1F1B; uneven groups of
        microbatches as in `interleaved_1f1b`.
    """
    return _zero_bubble(
        "interleaved zero-bubble", num_ranks, num_microbatches, stages_per_rank
    )


def _zero_bubble(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> Schedule:
    _check(name, num_ranks, num_microbatches, stages_per_rank)
    loop = _Loop(num_ranks, num_microbatches, stages_per_rank)
    programs: list[Program] = []
    starts: list[tuple[int, int]] = []
    for rank in range(num_ranks):
        forwards = loop.forwards(rank)
        inputs = loop.backwards(rank, Op.INPUT)
        weights = loop.backwards(rank, Op.WEIGHT)
        warm = loop.warm_up(rank, lead=1)
        program = forwards[:warm]
        for step, gradient in enumerate(inputs):
            program += [*forwards[warm + step : warm + step + 1], gradient]
            # Rank r keeps r weight gradients back, to work on while it would wait.
            program += weights[step - rank : step - rank + 1] if step >= rank else []
        program += weights[max(len(inputs) - rank, 0) :]
        programs.append(program)
        starts.append((warm, warm + num_ranks - 1))
    return _schedule(
        name,
        loop.homes,
        num_microbatches,
        spread(programs, len(loop.homes), starts),
    )


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Lay two stages a rank in a V, so that memory is even and the bubble small.

    Written for at least `2 * num_ranks - 1` microbatches; with fewer, the surplus is
    left out, which keeps the order valid.

    Source:
        ZB-V (Qi et al., 2023), the hand-written schedule for equal times.
    """
    _check("zbv", num_ranks, num_microbatches, 2)
    homes = v_placement(num_ranks)
    planned = max(num_microbatches, 2 * num_ranks - 1)
    programs: list[Program] = []
    for rank in range(num_ranks):
        program: Program = [(a,) for a in _v_order(rank, num_ranks, planned)]
        programs.append([r for r in program if r[0].microbatch < num_microbatches])
    starts = [(0, 0)] * num_ranks
    return _schedule(
        "zbv", homes, num_microbatches, spread(programs, len(homes), starts)
    )


class _Counter:
    """Hands out the microbatches of each (stage, operation) of a rank in turn."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, Op], int] = {}

    def take(self, stage: int, ops: str) -> Iterator[Action]:
        for op in map(Op, ops):
            microbatch = self.done(stage, op)
            self._next[stage, op] = microbatch + 1
            yield Action(stage, op, microbatch)

    def done(self, stage: int, op: Op) -> int:
        return self._next.get((stage, op), 0)


def _v_order(rank: int, num_ranks: int, planned: int) -> Iterator[Action]:
    there, back = rank, 2 * num_ranks - 1 - rank
    turn = _Counter()
    for _ in range(2 * (num_ranks - rank) - 1):  # fill the way there
        yield from turn.take(there, "F")
    for _ in range(rank):  # ranks near the turn see microbatches return first
        yield from turn.take(back, "F")
        yield from turn.take(there, "F")
    for _ in range(num_ranks - rank):
        yield from turn.take(back, "FIW")
    while turn.done(there, Op.FORWARD) < planned or turn.done(
        back, Op.FORWARD
    ) < turn.done(there, Op.FORWARD):
        if turn.done(there, Op.FORWARD) < planned:
            yield from turn.take(there, "F")
        yield from turn.take(there, "IW")
        yield from turn.take(back, "FIW")
    for _ in range(rank):  # hurry gradients on; weights can wait
        yield from turn.take(there, "I")
        yield from turn.take(back, "I")
    for _ in range(num_ranks - rank):
        yield from turn.take(there, "IW")
    for stage in (back, there):
        while turn.done(stage, Op.WEIGHT) < planned:
            yield from turn.take(stage, "W")


class _Loop:
    """The order in which a loop of stages visits microbatches, in groups.

    All ranks follow the same order, each on its own stages, so what one rank sends
    first its neighbour wants first.
    """

    def __init__(self, num_ranks: int, num_microbatches: int, stages_per_rank: int):
        self.homes = loop_placement(num_ranks, stages_per_rank)
        self._num_ranks = num_ranks
        self._stages_per_rank = stages_per_rank
        # A group shorter than the loop would leave ranks idle between two passes.
        num_groups = max(1, num_microbatches // num_ranks)
        size, longer = divmod(num_microbatches, num_groups)
        self._sizes = [size + (group < longer) for group in range(num_groups)]

    def warm_up(self, rank: int, *, lead: int) -> int:
        """Count the forwards before the first backward; `lead` for each later rank."""
        # All passes but the last of the largest group, or a gradient comes too early.
        passes = (self._stages_per_rank - 1) * max(self._sizes)
        wanted = passes + lead * (self._num_ranks - 1 - rank)
        return min(wanted, self._stages_per_rank * sum(self._sizes))

    def forwards(self, rank: int) -> Program:
        """Return the forwards of `rank`: group by group, pass by pass."""
        return self._visit(range(self._stages_per_rank), rank, Op.FORWARD)

    def backwards(self, rank: int, op: Op) -> Program:
        """Return the backwards of `rank`, with the passes in reverse."""
        return self._visit(range(self._stages_per_rank)[::-1], rank, op)

    def _visit(self, passes: range, rank: int, op: Op) -> Program:
        program: Program = []
        first = 0
        for size in self._sizes:
            for turn in passes:
                stage = turn * self._num_ranks + rank
                program += [(Action(stage, op, first + i),) for i in range(size)]
            first += size
        return program


def _rows(stage: int, op: Op, num_microbatches: int) -> Program:
    return [(Action(stage, op, i),) for i in range(num_microbatches)]


def _schedule(
    name: str, homes: tuple[int, ...], num_microbatches: int, programs: list[Program]
) -> Schedule:
    return Schedule(name, homes, num_microbatches, tuple(map(tuple, programs)))


def _check(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> None:
    counts = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "stages_per_rank": stages_per_rank,
    }
    for what, count in counts.items():
        if count < 1:
            raise ScheduleError(
                f"{name} has too few of something; got {what}={count!r}; expected 1 "
                f"or more; pass a positive count",
                reason="range",
            )


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved 1f1b": interleaved_1f1b,
        "zb-h1": zb_h1,
        "interleaved zero-bubble": interleaved_zero_bubble,
        "zbv": zbv,
    }
)
"""Every generator by name, called with the numbers of ranks and microbatches."""
