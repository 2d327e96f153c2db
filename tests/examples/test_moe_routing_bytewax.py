"""The mixture-of-experts example learns the same from text that Bytewax tokenises."""

import functools
import importlib.util
import os
import signal
import time
from dataclasses import replace

import numpy as np
import optree
import pytest
import typer

from examples.corpus import load_corpus
from examples.moe_routing import __main__ as program
from examples.moe_routing import flow
from examples.moe_routing.inputs import TextFeed
from tests.examples.small import SIZES, TINY
from timelyml import Cluster
from timelyml.errors import PeerError
from timelyml.testing import eventually

STEPS = 3
WITHIN_S = 15.0
TIMEOUT_S = 100
MAX_EPOCHS_AHEAD = 4
ENDLESS = replace(TINY, steps=1_000_000)
STEP_BYTES = 8 * (8 + 8 + 8 + 8)

needs_bytewax = pytest.mark.skipif(
    importlib.util.find_spec("bytewax") is None, reason="no wheels for this Python"
)


@pytest.fixture(scope="module")
def read(text):
    return functools.partial(load_corpus, text, **SIZES)


class Watched:
    """A feed that tells, in a file, its process and how many batches it has made."""

    def __init__(self, settings, read, path, **options):
        feed = TextFeed(settings, read, read().train.digest, **options)
        self.credit_bytes = feed.credit_bytes
        self._feed = feed
        self._path = path

    def build(self, steps, send):
        import bytewax.operators as op

        path, num_made = self._path, 0

        def note(rows):
            nonlocal num_made
            num_made += 1
            path.with_suffix(".new").write_text(f"{os.getpid()} {num_made}")
            path.with_suffix(".new").rename(path)
            return rows

        return self._feed.build(steps, lambda stream: send(op.map("n", stream, note)))

    def told(self):
        """The process, and how many batches it has made."""
        assert eventually(self._path.exists, TIMEOUT_S)
        process, num_made = self._path.read_text().split()
        return int(process), int(num_made)


def learnt(result):
    """All that a run learnt, as bytes."""
    reports = [record for _, record in result.batches(flow.REPORT)]
    losses = [np.concatenate([report["loss"] for report in reports])]
    leaves = optree.tree_leaves(flow.weights_of(TINY, result))
    return [np.ascontiguousarray(leaf).tobytes() for leaf in losses + leaves]


def wait_for_steps(run, num_steps):
    while len(run.batches(flow.REPORT)) < num_steps:
        assert not run.done(), run.result()
        run.record.wait_until(lambda: False, 0.01)


@needs_bytewax
def test_either_input_gives_the_same_bits(cluster, read):
    corpus = read()
    feed = TextFeed(TINY, read, corpus.train.digest)

    results = [
        cluster.cluster.run(
            flow.build(TINY, corpus, steps=STEPS, feed=each), timeout_s=TIMEOUT_S
        )
        for each in (None, feed)
    ]

    local, fed = map(learnt, results)
    assert local == fed


@needs_bytewax
def test_batches_that_are_sent_in_pieces_are_put_together(read):
    corpus = read()
    feed = TextFeed(TINY, read, corpus.train.digest, credit_bytes=STEP_BYTES // 2)

    with Cluster(workers=2, mode="threads") as cluster:
        results = [
            cluster.run(
                flow.build(TINY, corpus, steps=STEPS, feed=each), timeout_s=TIMEOUT_S
            )
            for each in (None, feed)
        ]

    local, fed = map(learnt, results)
    assert local == fed


@needs_bytewax
def test_a_run_that_is_stopped_gives_the_weights_of_whole_steps(read):
    corpus = read()
    feed = TextFeed(ENDLESS, read, corpus.train.digest)

    with Cluster(workers=2, mode="threads") as cluster:
        run = cluster.start(flow.build(ENDLESS, corpus, feed=feed), timeout_s=TIMEOUT_S)
        wait_for_steps(run, STEPS)
        run.request_stop()
        fed = run.result()
        steps = len(fed.batches(flow.REPORT))
        local = cluster.run(flow.build(ENDLESS, corpus, steps=steps))

    assert steps >= STEPS
    assert learnt(fed) == learnt(local)


@needs_bytewax
def test_bytewax_waits_for_a_trainer_that_is_slower(read, tmp_path):
    feed = Watched(ENDLESS, read, tmp_path / "made", credit_bytes=4 * STEP_BYTES)

    with Cluster(workers=2, mode="threads") as cluster:
        run = cluster.start(
            flow.build(ENDLESS, read(), feed=feed),
            timeout_s=TIMEOUT_S,
            max_epochs_ahead=MAX_EPOCHS_AHEAD,
        )
        wait_for_steps(run, STEPS)
        _, num_made = feed.told()
        num_learnt = len(run.batches(flow.REPORT))
        run.cancel()

    # In training, on the link, and what each end has in hand.
    assert num_made <= num_learnt + MAX_EPOCHS_AHEAD + 4 + 2


@needs_bytewax
def test_a_killed_process_ends_training_with_its_name_within_seconds(read, tmp_path):
    feed = Watched(ENDLESS, read, tmp_path / "made")

    with Cluster(workers=2, mode="threads") as cluster:
        run = cluster.start(flow.build(ENDLESS, read(), feed=feed))
        wait_for_steps(run, STEPS)
        process, _ = feed.told()
        killed = time.monotonic()
        os.kill(process, signal.SIGKILL)
        with pytest.raises(PeerError, match="process 0 of 'text' was killed by SIGK"):
            run.result(timeout_s=20)

    assert time.monotonic() - killed < WITHIN_S


@needs_bytewax
def test_text_that_has_changed_meanwhile_is_refused(read):
    feed = TextFeed(TINY, read, digest="another")

    with (
        Cluster(workers=1, mode="inline") as cluster,
        pytest.raises(ValueError, match="the training text has changed; got digest"),
    ):
        cluster.run(flow.build(TINY, read(), feed=feed), timeout_s=TIMEOUT_S)


def test_the_program_says_what_it_lacks_without_bytewax(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "bytewax" else find(name),
    )

    with pytest.raises(
        typer.BadParameter, match="needs Bytewax, which is not installed"
    ):
        program.main(input_from="bytewax")
