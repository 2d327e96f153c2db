"""Training that was killed goes on from its last checkpoint as if nothing had been."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from examples.corpus import load_corpus
from examples.moe_routing import flow, resuming
from tests.examples.orders import run_in_order
from tests.examples.small import SIZES, TINY
from tests.examples.test_moe_routing import learnt
from timelyml import Cluster
from timelyml.errors import CheckpointError

ROOT = Path(__file__).parents[2]
SETTINGS = replace(TINY, steps=100_000)
DEADLINE_S = 100
MORE = 3
TRAIN = """
import sys
from pathlib import Path
from tests.examples import test_moe_routing_killed as test
test.train(*map(Path, sys.argv[1:]))
"""


def train(text, directory):
    """Train without an end, and tell of each checkpoint."""
    corpus = load_corpus(text, **SIZES)
    saved = resuming.checkpoints_at(directory, 2, SETTINGS, corpus, resumed=None)
    graph = flow.build(SETTINGS, corpus, checkpoints=saved)
    with Cluster(workers=2, mode="threads") as cluster, cluster.start(graph) as run:
        for _, batch in run.results(flow.SAVED):
            for step, _ in batch:
                print(step, flush=True)


@pytest.fixture(scope="module")
def killed(text, tmp_path_factory):
    """The checkpoints of a process that was killed while it trained."""
    directory = tmp_path_factory.mktemp("saved")
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(text), str(directory)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = threading.Timer(DEADLINE_S, process.kill)
    deadline.start()
    try:
        steps = [int(process.stdout.readline()) for _ in range(2)]
    finally:
        process.kill()
        process.stdout.close()
        deadline.cancel()
    assert process.wait() == -signal.SIGKILL
    assert steps == [2, 4]
    return directory


@pytest.mark.parametrize("num_workers", [3])
def test_a_killed_run_goes_on_with_the_same_bits_on_other_workers(
    text, killed, num_workers
):
    corpus = load_corpus(text, **SIZES)
    checkpoint, settings = resuming.read(killed)
    assert checkpoint.step >= 4
    last = checkpoint.step + MORE

    graph = flow.build(settings, corpus, steps=last, resume=checkpoint)
    resumed = learnt(run_in_order(graph, 1, num_workers=num_workers))

    whole = learnt(run_in_order(flow.build(settings, corpus, steps=last), 2))
    for got, expected in zip(resumed[:4], whole[:4], strict=True):
        assert len(got) == MORE
        assert got.tobytes() == expected[checkpoint.step :].tobytes()
    for got, expected in zip(resumed[4:], whole[4:], strict=True):
        assert got.tobytes() == expected.tobytes()


def test_what_is_left_of_a_checkpoint_or_of_another_model_is_refused_by_name(
    text, killed, tmp_path
):
    newest = Path(resuming.read(killed)[0].source)
    half = tmp_path / newest.name
    half.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"torn or damaged; got '{half}'"):
        resuming.read(tmp_path)

    corpus = load_corpus(text, **SIZES)
    checkpoint, settings = resuming.read(killed)
    wider = replace(settings, d_ff=settings.d_ff + 1)
    with pytest.raises(CheckpointError, match=f"{newest.name}' has other parameters"):
        flow.build(wider, corpus, resume=checkpoint)
