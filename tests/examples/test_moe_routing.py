"""The mixture-of-experts example trains, agrees with dense JAX, and repeats its bits."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import optree
import pytest
import typer
from typer.testing import CliRunner

from examples.corpus import load_corpus
from examples.moe_routing import dense, flow, model, program
from examples.moe_routing.__main__ import main
from examples.moe_routing.config import Settings
from tests.examples.orders import run_in_order
from timelyml import Cluster

ROOT = Path(__file__).parents[2]
STEPS = 3
TINY = Settings(
    num_experts=4,
    d_model=16,
    d_byte=4,
    d_ff=24,
    window=6,
    batch=64,
    steps=20,
    warmup_steps=4,
    learning_rate=1e-2,
    data_shards=2,
)
# Float32 sums in another order, amplified by Adam over a few steps.
TOLERANCE = 1e-4
TIMEOUT_S = 100


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, 5).astype(np.uint8)) for _ in range(30)]
    for index in range(12):
        text = b" ".join(words[word] for word in rng.integers(0, 30, 120))
        (directory / f"{index}.txt").write_bytes(text)
    return load_corpus(directory, window=6, train_bytes=1 << 14, held_out_bytes=1 << 12)


def learnt(result):
    """Losses, counts and weights of a run, as one flat list of arrays."""
    reports = [record for _, record in result.batches(flow.REPORT)]
    return [
        np.concatenate([report[key] for report in reports])
        for key in ("step", "loss", "balance", "counts")
    ] + optree.tree_leaves(flow.weights_of(TINY, result))


def check_agrees(result, settings, corpus, steps=STEPS):
    """Compare with the same model as one dense JAX program."""
    weights, losses = dense.train(settings, corpus, steps=steps)
    steps_seen, ours, _, counts = learnt(result)[:4]
    assert steps_seen.tolist() == list(range(steps))
    assert (counts.sum(axis=1) == settings.batch * settings.top_k).all()
    np.testing.assert_allclose(ours, losses, rtol=TOLERANCE)
    ours = flow.weights_of(settings, result)
    difference, where = dense.largest_difference(ours, weights)
    assert difference < TOLERANCE, where


def test_training_agrees_with_dense_jax(cluster, corpus):
    graph = flow.build(TINY, corpus, steps=STEPS)
    result = cluster.cluster.run(graph, timeout_s=TIMEOUT_S)
    check_agrees(result, TINY, corpus)


def test_ten_orders_of_arrival_give_the_same_bits(corpus):
    graph = flow.build(TINY, corpus, steps=STEPS)
    expected = learnt(run_in_order(graph, 0))
    for seed in range(1, 10):
        mode = "accumulator" if seed % 3 == 0 else "broadcast"
        workers = 1 + seed % 3
        result = run_in_order(graph, seed, num_workers=workers, progress_mode=mode)
        for ours, first in zip(learnt(result), expected, strict=True):
            assert ours.tobytes() == first.tobytes(), f"seed {seed}"


def test_a_stopped_run_gives_the_weights_of_the_steps_it_did(corpus):
    settings = replace(TINY, steps=10_000)
    with Cluster(workers=2, mode="threads") as cluster:
        run = cluster.start(flow.build(settings, corpus), timeout_s=TIMEOUT_S)
        while len(run.batches(flow.REPORT)) < STEPS:
            assert not run.done(), run.result()
            run.record.wait_until(lambda: False, 0.01)
        run.request_stop()
        result = run.result()
    steps = len(result.batches(flow.REPORT))
    assert STEPS <= steps < settings.steps
    check_agrees(result, settings, corpus, steps=steps)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 1},
        {"top_k": 4},
        {"num_experts": 7, "top_k": 3, "data_shards": 1},
        {"data_shards": 4},
    ],
)
def test_other_shapes_of_the_layer_agree_with_dense_jax(changes, corpus):
    settings = replace(TINY, **changes)
    graph = flow.build(settings, corpus, steps=STEPS)
    check_agrees(run_in_order(graph, 7), settings, corpus)


def test_an_expert_without_tokens_is_skipped_and_agrees_with_dense_jax(
    corpus, monkeypatch
):
    drawn = model.init_embed

    def skewed(settings):
        params = dict(drawn(settings))
        params["table"] = np.abs(params["table"])
        params["mix"] = np.abs(params["mix"])  # so that every row is positive
        params["router"] = params["router"].copy()
        params["router"][:, 1] = -1.0  # below all others for any such row
        params["router"][:, 2] = 1.0
        return params

    monkeypatch.setattr(model, "init_embed", skewed)
    graph = flow.build(TINY, corpus, steps=STEPS)
    result = run_in_order(graph, 3)
    counts = learnt(result)[3]
    assert (counts[:, 1] == 0).all()
    assert (counts[:, 2] == TINY.batch).all()
    check_agrees(result, TINY, corpus)


def test_the_program_prints_one_json_object_and_saves_a_picture(tmp_path):
    picture = tmp_path / "routing.png"
    options = "--small --json --verify --steps 6 --batch 64 --workers 2 --data-shards 1"
    command = [sys.executable, "-m", "examples.moe_routing", *options.split()]
    command += ["--picture", str(picture)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["verify"]["passed"]
    assert figures["steps"] == 6
    assert figures["held_out_bits_per_byte"] > 0
    assert len(figures["expert_shares"]) == figures["num_experts"] == 8
    assert figures["bytes_between_workers"] > 0
    assert Path(figures["picture"]).exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--top-k 9", "--top-k is out of range; got 9; expected 1 to 8"),
        ("--top-k 0", "--top-k is out of range; got 0; expected 1 to 8"),
        ("--experts 0", "--experts is out of range; got 0; expected an integer, 1 or"),
        ("--steps 0", "--steps is out of range; got 0"),
        ("--batch -2", "--batch is out of range; got -2"),
        ("--batch 9 --data-shards 2", "--batch is uneven; got 9; expected a multiple"),
        ("--data-shards 0", "--data-shards is out of range; got 0"),
        ("--d-model 0", "--d-model is out of range; got 0"),
        ("--workers 0", "--workers is out of range; got 0"),
        ("--seed -1", "--seed is out of range; got -1; expected an integer, 0 to"),
        ("--picture routing.docx", "--picture has no known format; got 'routing.docx'"),
        ("--picture file/p.png", "--picture cannot be saved; got 'file/p.png'"),
        ("--picture dir.png", "--picture cannot be saved; got 'dir.png': no file that"),
        ("--data nowhere", "'nowhere' does not exist"),
        ("--data empty", "too few files in"),
    ],
)
def test_options_that_cannot_work_end_with_a_sentence(
    options, said, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    (tmp_path / "dir.png").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    program = typer.Typer()
    program.command()(main)
    done = CliRunner(env={"COLUMNS": "400"}).invoke(program, options.split())
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_the_source_of_the_text_is_printed_as_it_is(tmp_path, corpus, capsys):
    long = tmp_path / "[bold]a name that is longer than a line of the terminal[red]"
    settings = replace(TINY, steps=1, window=6)
    program.run(
        settings,
        replace(corpus, source=str(long)),
        workers=1,
        mode="threads",
        read=None,
        picture=tmp_path / "[b]picture.png",
        verify=False,
        as_json=False,
    )
    out = capsys.readouterr().out
    assert f"held out, from {long}\n" in out
    assert str(tmp_path / "[b]picture.png") in out
