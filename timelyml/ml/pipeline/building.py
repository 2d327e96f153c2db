"""`ml.pipeline`: stages on slices, and a schedule over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import optax

from timelyml.errors import ConfigError, ScheduleError
from timelyml.ml.client.slices import Slice
from timelyml.ml.pipeline.actions import Schedule
from timelyml.ml.pipeline.channels import Channels
from timelyml.ml.pipeline.ordering import issue_order
from timelyml.ml.pipeline.schedules import (
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
    zbv,
)
from timelyml.ml.pipeline.state import Layout
from timelyml.ml.pipeline.training import TrainStep
from timelyml.ml.pipeline.tying import Place
from timelyml.ml.pipeline.validate import validate

_ONE_EACH = {"1f1b": one_f_one_b, "zb-h1": zb_h1}
_SEVERAL = {
    "gpipe": gpipe,
    "interleaved": interleaved_1f1b,
    "interleaved-zb": interleaved_zero_bubble,
}
NAMES = (*_SEVERAL, *_ONE_EACH, "zbv")
"""What `ml.pipeline` knows schedules by."""


class Pipeline:
    """A model in stages, where each of them runs, and in which order.

    Attributes:
        schedule: The order, which was proved to run.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @property
    def schedule(self) -> Schedule:
        """The order of actions."""
        return self._layout.schedule

    def with_schedule(
        self, schedule: str | Schedule, num_microbatches: int | None = None
    ) -> Pipeline:
        """Return the same stages in another order; what is compiled is shared.

        Raises:
            ScheduleError: As of `pipeline`.
        """
        if num_microbatches is None:
            num_microbatches = self.schedule.num_microbatches
        num_stages, num_ranks = len(self._layout.stages), len(self._layout.slices[0])
        proved = _proved(schedule, num_stages, num_ranks, num_microbatches)
        changed = replace(self._layout, schedule=proved, order=issue_order(proved))
        return Pipeline(changed)

    def train_step(
        self,
        loss_fn: Callable[..., Any],
        optimiser: optax.GradientTransformation,
        *,
        pad_rows: bool = False,
        clip_norm: float | None = None,
    ) -> TrainStep:
        """Return a function that trains the pipeline by a batch.

        Args:
            loss_fn: `loss_fn(y, target) -> (total, count)` of what the last stage
                returns for a microbatch: a sum over what counts, and how much that is.
                The loss of a step is the sum of all totals divided by that of all
                counts; microbatches may count unequally much.
            optimiser: A transformation of optax that looks at stages one by one.
            pad_rows: Round the rows of microbatches up to a few sizes, with zeros, so that
                a few shapes are compiled whatever the sizes. Stages must then treat rows
                by themselves, and the loss is `loss_fn(y, target, is_row)` with a mask
                `(rows,) bool` of those that are real.
            clip_norm: Clip gradients by the norm of those of all stages, as
                `optax.clip_by_global_norm` does for one program. No stage is updated
                before all have their gradients.

        Raises:
            ConfigError: `clip_norm` is no number above 0.
        """
        return TrainStep(
            self._layout, loss_fn, optimiser, pad_rows=pad_rows, clip_norm=clip_norm
        )


def pipeline(
    stages: Sequence[Callable[..., Any]],
    *,
    slices: Sequence[Slice] | Sequence[Sequence[Slice]],
    schedule: str | Schedule = "1f1b",
    num_microbatches: int | None = None,
    tied: Sequence[Sequence[Place]] = (),
    batch_axis: str = "data",
) -> Pipeline:
    """Put the stages of a model on slices, to be trained in the order of a schedule.

    Args:
        stages: Pure functions `stage(params, x) -> y`, each on what the one before
            returns: an array, or a tree of them. The first takes the inputs.
        slices: Where each rank is, on one island or several; or for each replica such a
            list. Replicas share out the microbatches and add up their gradients.
        schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zbv", or
            the order itself, with as many stages and ranks. A rank may have several
            stages, in "zbv" two.
        num_microbatches: Parts that a batch is cut into, of each replica; as many as
            the schedule has, if that is given itself.
        tied: Groups of weights that are one, each as `(stage, key)` or
            `(stage, (key, ...))`; the first of a group keeps the optimiser's state.
        batch_axis: The axis of the slices' meshes over which rows of a microbatch are
            cut; those without it hold microbatches whole.

    Raises:
        ScheduleError: The schedule cannot run, or has other stages, ranks or
            microbatches.
        ConfigError: The slices of replicas are not alike in number, or there are none.
    """
    stages = tuple(stages)
    by_replica = _by_replica(slices)
    if not stages:
        raise ConfigError(
            "pipeline has no stages; got an empty list; expected one or more functions",
            option="stages",
        )
    proved = _proved(schedule, len(stages), len(by_replica[0]), num_microbatches)
    return Pipeline(
        Layout(
            stages,
            proved,
            issue_order(proved),
            by_replica,
            batch_axis,
            tuple(tuple(group) for group in tied),
            {},
        )
    )


def _by_replica(slices: Sequence[Any]) -> tuple[tuple[Slice, ...], ...]:
    is_flat = all(isinstance(each, Slice) for each in slices)
    found = (tuple(slices),) if is_flat else tuple(map(tuple, slices))
    sizes = {len(each) for each in found}
    are_slices = all(isinstance(each, Slice) for row in found for each in row)
    if len(sizes) != 1 or sizes == {0} or not are_slices:
        raise ConfigError(
            f"pipeline cannot be placed; got {slices!r:.200}; expected a slice for each "
            f"rank, or for each replica a list of as many; ask the client for slices",
            option="slices",
        )
    return found


def _proved(
    schedule: str | Schedule,
    num_stages: int,
    num_ranks: int,
    num_microbatches: int | None,
) -> Schedule:
    if isinstance(schedule, str):
        if num_microbatches is None:
            raise _unfit(schedule, "no number of microbatches", "num_microbatches=")
        schedule = _named(schedule, num_stages, num_ranks, num_microbatches)
    # Handles wait on their slices until they are asked for, so nothing ever fills up.
    validate(schedule, channels=Channels(depth=None))
    got = schedule.num_stages, schedule.num_ranks
    if got != (num_stages, num_ranks):
        raise _unfit(
            schedule.name,
            f"{got[0]} stages on {got[1]} ranks",
            f"{num_stages} on {num_ranks}, as there are functions and slices",
        )
    if num_microbatches not in (None, schedule.num_microbatches):
        raise _unfit(
            schedule.name,
            f"{schedule.num_microbatches} microbatches",
            f"{num_microbatches}, as num_microbatches= says",
        )
    return schedule.without_bubbles()


def _named(
    name: str, num_stages: int, num_ranks: int, num_microbatches: int
) -> Schedule:
    each, rest = divmod(num_stages, num_ranks)
    if rest or not each:
        raise _unfit(name, f"{num_stages} stages", f"a multiple of {num_ranks} slices")
    if name in _SEVERAL:
        return _SEVERAL[name](num_ranks, num_microbatches, stages_per_rank=each)
    expected = 2 if name == "zbv" else 1
    if name not in NAMES:
        raise _unfit(name, "an unknown name", f"one of {', '.join(NAMES)}")
    if each != expected:
        raise _unfit(name, f"{each} stages for each slice", f"{expected}")
    if name == "zbv":
        return zbv(num_ranks, num_microbatches)
    return _ONE_EACH[name](num_ranks, num_microbatches)


def _unfit(name: str, got: str, expected: str) -> ScheduleError:
    return ScheduleError(
        f"schedule {name!r} does not fit the pipeline; got {got}; expected {expected}; "
        f"choose another schedule, or cut the model otherwise",
        reason="fit",
    )
