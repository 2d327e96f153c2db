"""Where the batches of the training steps come from: this process's text, or Bytewax.

Either way one step is one epoch, and a batch is the same function of seed and step, so
training gives the same bits. Bytewax reads and tokenises the text in a process of its
own, as the paper runs input pipelines on TensorFlow executors (Pathways, appendix C).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.corpus import Corpus
from examples.moe_routing.config import Settings
from timelyml.graph import Broadcast, Exchange, GraphBuilder, InputSpec, StreamRef
from timelyml.io import bytewax
from timelyml.ml.firing import Firing, Rule, add_firing_operator
from timelyml.operators.sources import source
from timelyml.progress import epoch_of

FEED = "text"
CREDIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TextFeed:
    """A Bytewax dataflow that reads the training text and sends a batch per step.

    Attributes:
        settings: Seed and sizes of the batches.
        read: Reads the text; called in the Bytewax process.
        digest: Of the training text that the driver knows.
        credit_bytes: Batches that may wait before Bytewax does.
    """

    settings: Settings
    read: Callable[[], Corpus]
    digest: str
    credit_bytes: int = CREDIT_BYTES

    def build(self, steps: range, send: Callable[[Any], None]) -> Any:
        """Build the dataflow: the text and the number of each step, then its tokens."""
        import bytewax.operators as op  # noqa: PLC0415  only that process needs it
        from bytewax.dataflow import Dataflow  # noqa: PLC0415
        from bytewax.inputs import DynamicSource, StatelessSourcePartition  # noqa: PLC0415

        feed = self

        class Steps(StatelessSourcePartition[Any]):
            def __init__(self) -> None:
                self._corpus = feed.corpus()
                self._steps = iter(steps)

            def next_batch(self) -> list[Any]:
                return [(self._corpus, next(self._steps))]

        class Text(DynamicSource[Any]):
            def build(self, _step: str, _index: int, _count: int) -> Steps:
                return Steps()

        flow = Dataflow("moe_routing")
        send(op.map("tokenise", op.input("read", flow, Text()), feed.tokens))
        return flow

    def corpus(self) -> Corpus:
        """Read the text.

        Raises:
            ValueError: It is not what the driver read.
        """
        corpus = self.read()
        if corpus.train.digest != self.digest:
            raise ValueError(
                f"the training text has changed; got digest {corpus.train.digest}; "
                f"expected {self.digest}, as it was when training began; start again"
            )
        return corpus

    def tokens(self, item: tuple[Corpus, int]) -> dict[str, NDArray[Any]]:
        """Give the whole batch of a step; each row also names the step and itself."""
        corpus, step = item
        batch = self.settings.batch
        rows = batch_of(corpus, self.settings, step)
        return {**rows, "step": np.full(batch, step), "row": np.arange(batch)}


def joined(rows: Mapping[str, NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Give sequences with the byte that comes after them, `(sequences, window + 1)`."""
    return np.concatenate([rows["context"], rows["target"][:, None]], axis=1)


def batch_of(
    corpus: Corpus, settings: Settings, step: int, shard: int = 0, num_shards: int = 1
) -> dict[str, NDArray[np.uint8]]:
    """Give one shard's sequences of a step, and what comes after each of their bytes."""
    drawn = corpus.step_batch(
        step,
        batch=settings.batch,
        seed=settings.seed,
        shard=shard,
        num_shards=num_shards,
    )
    tokens = joined(drawn)
    return {"context": tokens[:, :-1].copy(), "target": tokens[:, 1:].copy()}


def add_batches(
    builder: GraphBuilder,
    settings: Settings,
    corpus: Corpus,
    *,
    steps: range,
    feed: TextFeed | None = None,
) -> StreamRef:
    """Add the operators that give each data shard its part of each step's batch.

    Args:
        builder: Of the dataflow.
        settings: Seed and sizes of the batches.
        corpus: Text to train on; travels with the graph, unless there is a feed.
        steps: A batch for each, an epoch for each.
        feed: Takes the place of `corpus`.
    """
    run: Callable[[Firing], None]
    if feed is None:
        clock = functools.partial(_tick, steps)
        up = source(builder, clock, regular=True, num_shards=1, name="clock")
        pact: Broadcast | Exchange = Broadcast(dense=True)
        run = _LookedUp(settings, corpus, steps.start)
    else:
        up = bytewax(
            builder,
            functools.partial(feed.build, steps),
            columns=True,
            regular=True,
            credit_bytes=feed.credit_bytes,
            name=FEED,
        )
        pact = Exchange(functools.partial(_data_shard_of, settings), dense=True)
        run = _Fed(settings, steps.start)
    (batches,) = add_firing_operator(
        builder,
        "batches",
        [InputSpec(up, pact)],
        [Rule((0,), run, outputs=(0,))],
        num_outputs=1,
        num_shards=settings.data_shards,
        regular=True,
    )
    return batches


def _tick(steps: range, shard: int, num_shards: int) -> Iterator[list[int]]:
    """Yield the number of each step: one epoch each, from the only shard."""
    del shard, num_shards
    return ([step] for step in steps)


def _data_shard_of(settings: Settings, rows: Any, num_shards: int) -> NDArray[np.intp]:
    del num_shards
    shards: NDArray[np.intp] = rows["row"] // settings.shard_batch
    return shards


@dataclass(frozen=True, slots=True)
class _LookedUp:
    """Looks up each data shard's part of a step's batch."""

    settings: Settings
    corpus: Corpus
    first: int
    """The step that the first epoch is."""

    def __call__(self, firing: Firing) -> None:
        """Send the shard's batch."""
        step, shard = self.first + epoch_of(firing.time), firing.shard
        part = shard.index, shard.num_shards
        firing.send(0, batch_of(self.corpus, self.settings, step, *part))


@dataclass(frozen=True, slots=True)
class _Fed:
    """Passes on what came of a step's batch."""

    settings: Settings
    first: int

    def __call__(self, firing: Firing) -> None:
        """Send the shard's batch.

        Raises:
            ValueError: It is not the batch of the step.
        """
        rows = firing.inputs[0].rows
        step = self.first + epoch_of(firing.time)
        size = self.settings.shard_batch
        if len(rows["step"]) != size or (rows["step"] != step).any():
            raise ValueError(
                f"{FEED} gave another batch; got steps {np.unique(rows['step'])} in "
                f"{len(rows['step'])} rows; expected step {step} in {size}"
            )
        firing.send(0, {name: rows[name] for name in ("context", "target")})
