"""Makespans, bubbles and peaks in closed form, for whoever wants them unsimulated.

`S` ranks, `M` microbatches, `V` stages a rank; times are of one stage, equal on all
stages, and communication costs nothing unless said. Each formula states when it
holds and refuses the rest; inside, the simulator gives exactly the same numbers.
"""

from __future__ import annotations

from fractions import Fraction

from timelyml.errors import ScheduleError
from timelyml.ml.pipeline.simulate import Costs, PerStage


def gpipe_makespan(
    num_ranks: int, num_microbatches: int, costs: Costs | None = None
) -> float:
    """Time GPipe: `(M + S - 1) (F + B)`, and the latency of the way up and down.

    >>> gpipe_makespan(4, 8)
    33
    """
    forward, whole, latency = _undivided(costs)
    steps = num_microbatches + num_ranks - 1
    return steps * (forward + whole) + 2 * (num_ranks - 1) * latency


def one_f_one_b_makespan(
    num_ranks: int, num_microbatches: int, costs: Costs | None = None
) -> float:
    """Time 1F1B: `(M + S - 1) (F + B)`, as GPipe.

    >>> one_f_one_b_makespan(4, 8)
    33
    """
    forward, whole, latency = _undivided(costs)
    _refuse(latency != 0, "1f1b", "communication cost of 0")
    return (num_microbatches + num_ranks - 1) * (forward + whole)


def interleaved_makespan(
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int = 2,
    costs: Costs | None = None,
) -> float:
    """Time interleaved 1F1B: `(V M + S - 1) (F + B)`, or `V S + M - 1` if `M < S`.

    With fewer microbatches than ranks, the first one's way through all stages is what
    takes the time.

    >>> interleaved_makespan(4, 8, 2)
    57
    """
    forward, whole, latency = _undivided(costs)
    _refuse(latency != 0, "interleaved 1f1b", "communication cost of 0")
    few, many = sorted((num_ranks, num_microbatches))
    return (stages_per_rank * many + few - 1) * (forward + whole)


def zb_h1_makespan(
    num_ranks: int, num_microbatches: int, costs: Costs | None = None
) -> float:
    """Time ZB-H1: `M (F + I + W) + (S - 1) max(F + I - W, F, I)`.

    Only `W` up to the shorter of `F` and `I` fits into the bubbles whole. With fewer
    microbatches than ranks it must be so, and the time is `(M + S - 1) (F + I) + W`.

    >>> zb_h1_makespan(4, 8)
    27
    """
    if num_microbatches >= num_ranks:
        return interleaved_zero_bubble_makespan(num_ranks, num_microbatches, 1, costs)
    forward, first, weight, latency = _divided(costs)
    _refuse(latency != 0, "zb-h1", "communication cost of 0")
    fits = weight <= min(forward, first)
    _refuse(not fits, "zb-h1", "weight parts that fit the bubbles, or M >= S")
    return (num_microbatches + num_ranks - 1) * (forward + first) + weight


def interleaved_zero_bubble_makespan(
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int = 2,
    costs: Costs | None = None,
) -> float:
    """Time it: `V M (F + I + W) + (S - 1) max(F + I - W, F, I)`, for `M >= S`.

    >>> interleaved_zero_bubble_makespan(4, 8, 2)
    51
    """
    name = "interleaved zero-bubble"
    forward, first, weight, latency = _divided(costs)
    _refuse(latency != 0, name, "communication cost of 0")
    _refuse(num_microbatches < num_ranks, name, "a microbatch for each rank")
    work = stages_per_rank * num_microbatches * (forward + first + weight)
    wait = max(forward + first - weight, forward, first)
    return work + (num_ranks - 1) * wait


def zbv_makespan(
    num_ranks: int, num_microbatches: int, costs: Costs | None = None
) -> float:
    """Time ZB-V with equal times: `6 M + S - 1`, or `4 M + 4 S - 2` if that is more.

    The second is the way of few microbatches up and down the V.

    >>> zbv_makespan(4, 8)
    51
    """
    forward, first, weight, latency = _divided(costs)
    _refuse(latency != 0, "zbv", "communication cost of 0")
    _refuse(not forward == first == weight, "zbv", "equal times of F, I and W")
    full = 6 * num_microbatches + num_ranks - 1
    return forward * max(full, 4 * num_microbatches + 4 * num_ranks - 2)


def flush_bubble(num_ranks: int, num_microbatches: int) -> Fraction:
    """Return the bubble of GPipe and 1F1B: `(S - 1) / (M + S - 1)`, at any times.

    >>> flush_bubble(4, 8)
    Fraction(3, 11)
    """
    return Fraction(num_ranks - 1, num_microbatches + num_ranks - 1)


def interleaved_bubble(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2
) -> Fraction:
    """Return that of interleaved 1F1B for `M >= S`: `(S - 1)/V / (M + (S - 1)/V)`.

    >>> interleaved_bubble(4, 8, 2)
    Fraction(3, 19)
    """
    few = num_microbatches < num_ranks
    _refuse(few, "interleaved 1f1b", "a microbatch for each rank")
    wait = Fraction(num_ranks - 1, stages_per_rank)
    return wait / (num_microbatches + wait)


def zero_bubble_bubble(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 1
) -> Fraction:
    """Return that of the split schedules at equal times: `(S - 1) / (3 V M + S - 1)`.

    Of ZB-H1 with one stage a rank, of interleaved zero-bubble with any, both for
    `M >= S`, and of ZB-V with two, for `2 M >= 3 S - 1`.

    >>> zero_bubble_bubble(4, 8), zero_bubble_bubble(4, 8, 2)
    (Fraction(1, 9), Fraction(1, 17))
    """
    few = num_microbatches < num_ranks
    _refuse(few, "zero-bubble", "a microbatch for each rank")
    work = 3 * stages_per_rank * num_microbatches
    return Fraction(num_ranks - 1, work + num_ranks - 1)


def gpipe_peaks(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 1
) -> tuple[int, ...]:
    """Return the peaks of live activations of GPipe by rank: all microbatches."""
    return (num_microbatches * stages_per_rank,) * num_ranks


def one_f_one_b_peaks(num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """Return those of 1F1B: `min(M, S - s)`.

    >>> one_f_one_b_peaks(4, 8)
    (4, 3, 2, 1)
    """
    return tuple(min(num_microbatches, num_ranks - r) for r in range(num_ranks))


def interleaved_peaks(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2
) -> tuple[int, ...]:
    """Return those of interleaved 1F1B, the largest group of microbatches being `G`.

    `(V - 1) G + 2 (S - 1 - r) + 1`, and never more than all.

    >>> interleaved_peaks(4, 8, 2)
    (11, 9, 7, 5)
    """
    held = (stages_per_rank - 1) * largest_group(num_ranks, num_microbatches)
    everything = stages_per_rank * num_microbatches
    return tuple(
        min(everything, held + 2 * (num_ranks - 1 - rank) + 1)
        for rank in range(num_ranks)
    )


def interleaved_zero_bubble_peaks(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2
) -> tuple[int, ...]:
    """Return those of interleaved zero-bubble: `(V - 1) G + S`; with `V = 1`, ZB-H1's.

    >>> interleaved_zero_bubble_peaks(4, 8, 2), interleaved_zero_bubble_peaks(4, 8, 1)
    ((8, 8, 8, 8), (4, 4, 4, 4))
    """
    held = (stages_per_rank - 1) * largest_group(num_ranks, num_microbatches)
    peak = min(stages_per_rank * num_microbatches, held + num_ranks)
    return (peak,) * num_ranks


def zbv_peaks(num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """Return those of ZB-V: `2 S`, in stages of half the size; fewer if `M` is small.

    >>> zbv_peaks(4, 8)
    (8, 8, 8, 8)
    """
    return tuple(
        min(2 * num_microbatches, 2 * num_ranks, num_microbatches + 1 + rank)
        for rank in range(num_ranks)
    )


def largest_group(num_ranks: int, num_microbatches: int) -> int:
    """Return how many microbatches an interleaved schedule runs in a row, at most."""
    num_groups = max(1, num_microbatches // num_ranks)
    return -(-num_microbatches // num_groups)


def _undivided(costs: Costs | None) -> tuple[float, float, float]:
    costs = Costs() if costs is None else costs
    whole = costs.backward
    if whole is None:
        whole = _uniform(costs.input) + _uniform(costs.weight)
    return _uniform(costs.forward), _uniform(whole), costs.communication


def _divided(costs: Costs | None) -> tuple[float, float, float, float]:
    costs = Costs() if costs is None else costs
    forward, first = _uniform(costs.forward), _uniform(costs.input)
    return forward, first, _uniform(costs.weight), costs.communication


def _uniform(cost: PerStage) -> float:
    if isinstance(cost, tuple):
        _refuse(len(set(cost)) != 1, "the pipeline", "equal times on all stages")
        return cost[0]
    return cost


def _refuse(is_outside: bool, who: str, expected: str) -> None:
    if is_outside:
        raise ScheduleError(
            f"formula of {who} does not hold here; got another case; expected "
            f"{expected}; simulate the schedule instead",
            reason="formula",
        )
