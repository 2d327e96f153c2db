"""Three clients of one cluster: one for each task, and one that has the shared layers.

They meet by names. In each step a task publishes its rows, the owner of the shared layers
runs those of all tasks in one call and publishes what comes out, and gradients go back
the same way. When one of them fails, the cluster is closed, and with it the others.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from examples.corpus import Corpus
from examples.pipeline import model as transformer
from examples.pipeline.config import Settings as TransformerSettings
from examples.shared_layers import model
from examples.shared_layers.config import HEADS, Settings
from examples.shared_layers.model import TASKS
from timelyml import ml

TIMEOUT_S = 300.0
"""How long a client waits for another one."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run gave.

    Attributes:
        losses: Of each task, by step.
        shared_calls: How often the shared layers ran, either way.
        seconds: From the second step on, in which nothing compiles.
    """

    losses: dict[str, list[float]]
    shared_calls: int
    seconds: float


def figures_of(settings: Settings, trained: Trained) -> dict[str, Any]:
    """Return what a run comes to, by name."""
    return {
        "steps": settings.steps,
        "shared_calls": trained.shared_calls,
        "rows_per_shared_call": settings.rows * len(trained.losses),
        "steps_per_s": (settings.steps - 1) / trained.seconds,
        "first_loss": {name: each[0] for name, each in trained.losses.items()},
        "last_loss": {name: each[-1] for name, each in trained.losses.items()},
    }


def init(settings: Settings, corpus: Corpus) -> tuple[list[Any], list[Any]]:
    """Give the weights of the shared blocks, pretrained, and new ones of each task.

    The blocks have learnt to predict bytes, in one program, on batches that no task sees.
    """
    sizes = TransformerSettings(
        layers=settings.layers,
        d_model=settings.d_model,
        heads=HEADS,
        seed=settings.seed,
        stages=1,
        islands=1,
    )
    rng = np.random.default_rng([settings.seed, 2])
    embedding, *blocks, _ = transformer.init(sizes)
    scale = np.float32(settings.d_model**-0.5)
    tasks = [
        {
            "table": embedding["table"],
            "classify": scale
            * rng.standard_normal((settings.d_model, task.num_classes), np.float32),
        }
        for task in TASKS
    ]
    weights: Any = (blocks, tasks[:1])
    for step in range(settings.pretraining_steps):
        batches = [batch_of(corpus, settings, 0, settings.steps + step)]
        weights, _ = model.reference_step(HEADS, settings.rate, weights, batches)
    return jax.tree.map(np.asarray, weights[0]), tasks


def batch_of(
    corpus: Corpus, settings: Settings, number: int, step: int
) -> tuple[Any, Any]:
    """Give tokens `(rows, length) int32` and labels `(rows,) int32` of a task."""
    drawn = corpus.step_batch(
        step * len(TASKS) + number, batch=settings.rows, seed=settings.seed
    )
    context = drawn["context"].astype(np.int32)
    classes = np.asarray(TASKS[number].classes, np.int32)
    return context[:, :-1], classes[context[:, -1]]


def reference(settings: Settings, corpus: Corpus) -> dict[str, list[float]]:
    """Train both tasks by one JAX program; give the losses."""
    weights: Any = init(settings, corpus)
    losses: dict[str, list[float]] = {task.name: [] for task in TASKS}
    for step in range(settings.steps):
        batches = [batch_of(corpus, settings, i, step) for i in range(len(TASKS))]
        weights, found = model.reference_step(HEADS, settings.rate, weights, batches)
        for task, loss in zip(TASKS, found, strict=True):
            losses[task.name].append(float(loss))
    return losses


def off_reference(settings: Settings, corpus: Corpus, trained: Trained) -> float:
    """Tell how far losses are off those of one program, relative to their largest."""
    expected = reference(settings, corpus)
    return max(
        abs(a - b) / max(map(abs, expected[name]))
        for name, losses in trained.losses.items()
        for a, b in zip(losses, expected[name], strict=True)
    )


def train(settings: Settings, corpus: Corpus) -> Trained:
    """Train both tasks by clients of their own.

    Raises:
        TimelyError: What the first client that failed failed with.
    """
    blocks, tasks = init(settings, corpus)
    with ml.local() as client, ThreadPoolExecutor(len(TASKS) + 1) as pool:
        owner: Future[tuple[int, float]] = pool.submit(
            _own, client.another(), blocks, settings
        )
        runs = [
            pool.submit(_learn, client.another(), number, params, settings, corpus)
            for number, params in enumerate(tasks)
        ]
        every: list[Future[Any]] = [owner, *runs]
        over, _ = wait(every, return_when=FIRST_EXCEPTION)
        for each in over:
            if (error := each.exception()) is not None:
                client.close()  # or the others would wait for what never comes
                raise error
        calls, seconds = owner.result()
        losses = {
            task.name: run.result() for task, run in zip(TASKS, runs, strict=True)
        }
    return Trained(losses, calls, seconds)


class _Counted:
    """A compiled function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.calls = 0
        self._function = function

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self._function(*args)


def _own(client: ml.Client, blocks: Any, settings: Settings) -> tuple[int, float]:
    """Run the shared layers for all tasks, and update them."""
    with client:
        slice_ = client.slice({"data": 1})
        forward = functools.partial(model.shared, HEADS)

        def backward(blocks: Any, parts: Any, cotangents: Any) -> Any:
            _, pull = jax.vjp(forward, blocks, parts)
            gradients, back = pull(cotangents)
            return model.moved(blocks, gradients, settings.rate), back

        ahead = _Counted(ml.jit(forward, slice=slice_))
        back = _Counted(ml.jit(backward, slice=slice_, donate_argnums=0))
        weights = client.put(blocks, slice_.sharding())
        began = time.perf_counter()
        for step in range(settings.steps):
            parts = [_take(client, f"{task.name} rows {step}") for task in TASKS]
            _give(client, "hidden", step, ahead(weights, parts))
            found = [_take(client, f"{task.name} back {step}") for task in TASKS]
            weights, cotangents = back(weights, parts, found)
            _give(client, "gradient", step, cotangents)
            if step == 0:
                jax.tree.leaves(weights)[0].block_until_ready()
                began = time.perf_counter()
        jax.tree.leaves(weights)[0].block_until_ready()
        return ahead.calls + back.calls, time.perf_counter() - began


def _give(client: ml.Client, what: str, step: int, parts: Sequence[Any]) -> None:
    for task, part in zip(TASKS, parts, strict=True):
        client.publish(f"{task.name} {what} {step}", part)


def _take(client: ml.Client, name: str) -> Any:
    """Wait for what another client publishes, and take it from the name."""
    found = client.open(name, timeout_s=TIMEOUT_S)
    client.unpublish(name)
    return found


def _learn(
    client: ml.Client, number: int, params: Any, settings: Settings, corpus: Corpus
) -> list[float]:
    """Train the layers of a task around the shared ones; give its losses."""
    with client:
        slice_, task = client.slice({"data": 1}), TASKS[number]
        enter = ml.jit(model.enter, slice=slice_)
        leave = ml.jit(jax.value_and_grad(model.loss_of, argnums=(0, 1)), slice=slice_)

        def update(params: Any, tokens: Any, back: Any, gradients: Any) -> Any:
            _, pull = jax.vjp(lambda params: model.enter(params, tokens), params)
            (entered,) = pull(back)
            both = jax.tree.map(lambda a, b: a + b, entered, gradients)
            return model.moved(params, both, settings.rate)

        learn = ml.jit(update, slice=slice_, donate_argnums=0)
        weights = client.put(params, slice_.sharding())
        losses = []
        for step in range(settings.steps):
            tokens, labels = batch_of(corpus, settings, number, step)
            client.publish(f"{task.name} rows {step}", enter(weights, tokens))
            hidden = _take(client, f"{task.name} hidden {step}")
            loss, (gradients, cotangent) = leave(weights, hidden, labels)
            client.publish(f"{task.name} back {step}", cotangent)
            back = _take(client, f"{task.name} gradient {step}")
            weights = learn(weights, tokens, back, gradients)
            losses.append(loss)
        return [float(loss) for loss in losses]
