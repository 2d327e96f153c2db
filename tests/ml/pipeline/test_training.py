"""Pipelines on slices train as the golden files say, and as the model in one piece."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from tests.ml.pipeline import llama
from timelyml import ml
from timelyml.ml.pipeline import peak_by_stage
from timelyml.testing.leftovers import Leftovers

LOSS_ERROR = 1e-5  # ten times the error of an independent derivation, over five steps
WEIGHT_ERROR = 5.5e-6
SGD = optax.sgd(0.5)
NUM_MICROBATCHES = 8
RANKS = {"gpipe": 2, "interleaved": 2, "interleaved-zb": 2, "zbv": 2}
RANKS |= {"1f1b": 4, "zb-h1": 4}
"""With four stages; schedules with one stage a rank need as many ranks."""


@pytest.fixture(scope="module")
def client():
    before = Leftovers.now()
    quickly = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with ml.local(environment=quickly) as client:
        yield client
    before.check_gone(sockets=False)


@pytest.fixture(scope="module")
def slices(client):
    """Four slices of one device: whatever the schedule, each function compiles once."""
    return [client.slice({"data": 1}) for _ in range(4)]


@pytest.fixture(scope="module")
def pipelines(slices):
    """The model in four stages, on two and on four ranks."""
    return {
        ranks: ml.pipeline(
            [llama.stage] * 4,
            slices=slices[:ranks],
            schedule="gpipe",
            num_microbatches=NUM_MICROBATCHES,
        )
        for ranks in (2, 4)
    }


@pytest.fixture(scope="module")
def init():
    return llama.golden("init")


def worst(ours, theirs):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(np.abs(np.asarray(a) - b).max()) for a, b in pairs)


def trained(step, params, batches):
    state, losses = step.init(params), []
    for tokens in batches:
        state, loss = step(state, tokens, tokens)
        losses.append(loss)
    return state, [float(each) for each in losses]


@pytest.mark.parametrize(
    "schedule",
    [
        "zb-h1",
        "zbv",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gpipe", "1f1b", "interleaved", "interleaved-zb")
        ),
    ],
)
def test_losses_weights_and_peaks_are_as_they_should_be(pipelines, init, schedule):
    pipe = pipelines[RANKS[schedule]].with_schedule(schedule)
    step = pipe.train_step(llama.loss_fn, SGD)
    curve = llama.golden("curve")
    state, norms, losses = step.init(llama.stages_of(init, 4)), [], []
    record = ml.PipelineRecord()
    before = llama.stages_of(init, 4)
    for tokens in init["tokens"]:
        state, loss = step(state, tokens, tokens, record=record)
        after = jax.tree.map(np.asarray, state.params)
        moved = jax.tree.map(lambda a, b: (a - b) / 0.5, before, after)
        norms.append(np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(moved))))
        losses.append(float(loss))
        before = after
    np.testing.assert_allclose(losses, curve["losses_sgd"], atol=LOSS_ERROR)
    np.testing.assert_allclose(norms, curve["grad_norm_sgd"], rtol=1e-4)
    assert worst(before, llama.stages_of(curve, 4, "final_")) < WEIGHT_ERROR
    peaks = dict(enumerate(peak_by_stage(pipe.schedule)))
    assert record.peak_live == peaks
    assert all(record.peak_bytes[stage] >= peaks[stage] for stage in peaks)
    assert len(record.timeline().spans) == sum(
        action.op.is_compute for rank in pipe.schedule.rows for (action,) in rank
    )


def test_gradients_of_the_first_step_are_those_of_the_file(pipelines, init):
    step = pipelines[4].with_schedule("zb-h1").train_step(llama.loss_fn, SGD)
    state, _ = step(step.init(llama.stages_of(init, 4)), *2 * [init["tokens"][0]])
    gradients = jax.tree.map(
        lambda a, b: (a - np.asarray(b)) / 0.5, llama.stages_of(init, 4), state.params
    )
    expected = llama.stages_of(llama.golden("step0_grads"), 4, "grad_")
    assert worst(gradients, expected) < 7.4e-5


@pytest.mark.slow
def test_adamw_gives_the_losses_of_the_file(pipelines, init):
    pipe = pipelines[4].with_schedule("zb-h1")
    adamw = optax.adamw(1e-2, eps=1e-8, weight_decay=0.01)
    step = pipe.train_step(llama.loss_fn, adamw)
    _, losses = trained(step, llama.stages_of(init, 4), init["tokens"])
    # Adam divides by small square roots, which magnifies what is rounded.
    expected = llama.golden("curve")["losses_adamw"]
    np.testing.assert_allclose(losses, expected, atol=1e-4)


@pytest.mark.parametrize("schedule", ["interleaved-zb", "zbv"])
def test_the_loss_is_divided_once_by_all_that_counts(pipelines, init, schedule):
    curve = llama.golden("curve")
    step = pipelines[2].with_schedule(schedule).train_step(llama.loss_fn, SGD)
    params = llama.stages_of(init, 4)
    state, loss = step(step.init(params), init["tokens"][0], curve["uneven_labels"])
    moved = jax.tree.map(lambda a, b: (a - np.asarray(b)) / 0.5, params, state.params)
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(moved)))
    assert float(loss) == pytest.approx(curve["uneven_loss_global"], abs=LOSS_ERROR)
    assert norm == pytest.approx(curve["uneven_gradnorm_global"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 4])
def test_on_several_islands_every_schedule_gives_the_curve(init, num_stages):
    curve = llama.golden("curve")
    with ml.local(islands=num_stages) as client:
        slices = [
            client.slice({"data": 1}, island=f"island-{rank}")
            for rank in range(num_stages)
        ]
        for ranks in (num_stages, num_stages // 2):
            many = ml.pipeline(
                [llama.stage] * num_stages,
                slices=slices[:ranks],
                schedule="gpipe",
                num_microbatches=NUM_MICROBATCHES,
            )
            one_each = ("gpipe", "1f1b", "zb-h1")
            two_each = ("gpipe", "interleaved", "interleaved-zb", "zbv")
            for schedule in one_each if ranks == num_stages else two_each:
                pipe = many.with_schedule(schedule)
                step = pipe.train_step(llama.loss_fn, SGD)
                params = llama.stages_of(init, num_stages)
                state, losses = trained(step, params, init["tokens"])
                expected = llama.stages_of(curve, num_stages, "final_")
                np.testing.assert_allclose(
                    losses, curve["losses_sgd"], atol=LOSS_ERROR, err_msg=schedule
                )
                assert worst(state.params, expected) < WEIGHT_ERROR, schedule
