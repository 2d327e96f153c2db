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
from examples.moe_routing import dense, flow, judging, model, program, resuming
from examples.moe_routing.__main__ import main
from tests.examples.orders import run_in_order
from tests.examples.small import SIZES, TINY
from timelyml import Cluster

ROOT = Path(__file__).parents[2]
STEPS = 3
# Float32 sums in another order, amplified by Adam over a few steps.
TOLERANCE = 1e-4
TIMEOUT_S = 100


@pytest.fixture(scope="module")
def corpus(text):
    return load_corpus(text, **SIZES)


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
    # by step and layer
    assert (counts.sum(axis=2) == settings.tokens * settings.top_k).all()
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


def test_a_stopped_run_gives_the_weights_of_the_steps_it_did(corpus, tmp_path):
    settings = replace(TINY, steps=10_000)
    checkpoints = resuming.checkpoints_at(tmp_path, 10, settings, corpus, resumed=None)
    graph = flow.build(settings, corpus, checkpoints=checkpoints)
    with Cluster(workers=2, mode="threads") as cluster:
        run = cluster.start(graph, timeout_s=TIMEOUT_S)
        while len(run.batches(flow.REPORT)) < STEPS:
            assert not run.done(), run.result()
            run.record.wait_until(lambda: False, 0.01)
        run.request_stop()
        result = run.result()
    steps = len(result.batches(flow.REPORT))
    assert STEPS <= steps < settings.steps
    check_agrees(result, settings, corpus, steps=steps)
    saved, _ = resuming.read(tmp_path)
    assert saved.step == steps
    ours = optree.tree_leaves(flow.weights_of(settings, result))
    kept = optree.tree_leaves(resuming.weights_in(saved, settings))
    assert [a.tobytes() for a in kept] == [a.tobytes() for a in ours]


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 1, "layers": 2, "replicate": (0, 3)},
        pytest.param({"top_k": 4}, marks=pytest.mark.slow),
        {"num_experts": 7, "top_k": 3, "data_shards": 1, "expert_shards": 7},
        pytest.param({"data_shards": 4, "expert_shards": 1}, marks=pytest.mark.slow),
    ],
)
def test_other_shapes_of_the_layer_agree_with_dense_jax(changes, corpus):
    settings = replace(TINY, **changes)
    graph = flow.build(settings, corpus, steps=STEPS)
    check_agrees(run_in_order(graph, 7), settings, corpus)


def test_experts_without_tokens_are_skipped_and_agree_with_dense_jax(
    corpus, monkeypatch
):
    drawn = model.init_layer

    def indifferent(settings, index):
        layer = drawn(settings, index)
        layer["moe"]["router"] *= 0  # all experts tie, and the first ones are taken
        return layer

    monkeypatch.setattr(model, "init_layer", indifferent)
    graph = flow.build(TINY, corpus, steps=1)
    result = run_in_order(graph, 3)
    (counts,) = learnt(result)[3]
    assert (counts == [TINY.tokens, TINY.tokens, 0, 0]).all()
    check_agrees(result, TINY, corpus, steps=1)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_resumed_run_goes_on_with_the_same_bits_on_other_workers(
    corpus, tmp_path, num_workers
):
    checkpoints = resuming.checkpoints_at(tmp_path, 2, TINY, corpus, resumed=None)
    run_in_order(flow.build(TINY, corpus, steps=2, checkpoints=checkpoints), 1)
    whole = run_in_order(flow.build(TINY, corpus, steps=5), 2)

    checkpoint, settings = resuming.read(tmp_path)
    graph = flow.build(settings, corpus, steps=5, resume=checkpoint)
    resumed = run_in_order(graph, 3, num_workers=num_workers)

    *ours, weights = learnt(resumed)[:4], learnt(resumed)[4:]
    *first, expected = learnt(whole)[:4], learnt(whole)[4:]
    for got, all_of_it in zip(ours[0], first[0], strict=True):
        assert got.tobytes() == all_of_it[2:].tobytes()
    for got, wanted in zip(weights, expected, strict=True):
        assert got.tobytes() == wanted.tobytes()


@pytest.fixture(scope="module")
def figures(tmp_path_factory, text):
    """What a run of the program printed as JSON, and where it saved its model."""
    directory = tmp_path_factory.mktemp("run")
    options = "--small --json --verify --steps 6 --workers 2 --layers 1 --every 4"
    options += f" --experts 4 --d-model 16 --batch 8 --data {text}"
    options += f" --picture {directory / 'load.png'} --trace {directory / 'trace'}"
    options += f" --checkpoints {directory / 'saved'}"
    done = subprocess.run(
        [sys.executable, "-m", "examples.moe_routing", *options.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"directory": directory}


def test_the_program_prints_one_json_object_and_saves_a_picture(figures):
    assert figures["verify"]["passed"]
    assert figures["steps"] == len(figures["losses"]) == 6
    assert 0 < figures["held_out_bits_per_byte"] < 12
    assert np.shape(figures["expert_shares"]) == (1, figures["num_experts"])
    assert figures["bytes_between_workers"] > 0
    assert figures["compiled_sizes"] > 0
    assert sum(figures["shares_of_time"].values()) == pytest.approx(1, abs=1e-3)
    assert figures["shares_of_time"]["model"] > 0
    assert Path(figures["picture"]).exists()
    names = [path.name for path in (figures["directory"] / "saved").iterdir()]
    assert sorted(names) == ["step-000000004.checkpoint", "step-000000006.checkpoint"]


def invoked(*options):
    program = typer.Typer()
    program.command()(main)
    return CliRunner(env={"COLUMNS": "400"}).invoke(program, options)


def test_a_model_that_was_saved_continues_a_text(figures):
    saved = str(figures["directory"] / "saved")
    options = "--checkpoints", saved, "--generate", "import ", "--length", "12"

    first, again = (json.loads(invoked(*options, "--json").stdout) for _ in range(2))

    assert first == again
    assert first["step"] == 6
    checkpoint, settings = resuming.read(Path(saved))
    weights = resuming.weights_in(checkpoint, settings)
    text = judging.generate(settings, weights, b"import ", num_bytes=12)
    assert first["text"] == text.decode(errors="replace")


def test_resuming_says_what_cannot_go_on(figures, tmp_path):
    saved = figures["directory"] / "saved"
    torn = tmp_path / "step-000000009.checkpoint"
    torn.write_bytes((saved / "step-000000006.checkpoint").read_bytes()[:-5])
    for directory, more, said in (
        (saved, (), "--resume has nothing to do; got step 6 of 6"),
        (saved, ("--layers", "2"), "--resume goes on with layers 1; got 2"),
        (tmp_path, (), "checkpoint is torn or damaged"),
        (tmp_path / "none", (), "checkpoint cannot be read"),
    ):
        done = invoked("--resume", "--checkpoints", str(directory), *more)
        assert done.exit_code == 2
        assert said in " ".join(done.stderr.split())


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
        ("--d-model 36", "--d-model is uneven; got 36; expected a multiple of 8"),
        ("--expert-shards 3", "--experts is uneven; got 8; expected a multiple of 3"),
        (
            "--replicate 8",
            "--replicate is out of range; got 8; expected an integer, 0 to",
        ),
        ("--replicate 1 --expert-shards 1", "--replicate has no second shard; got 1"),
        ("--resume", "--resume needs a trained model; got no --checkpoints"),
        ("--generate x", "--generate needs a trained model; got no --checkpoints"),
        ("--trace .", "--trace is there already; got '.'"),
        ("--checkpoints used", "checkpoints of another run are in the way"),
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
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "step-000000001.checkpoint").touch()
    monkeypatch.chdir(tmp_path)
    done = invoked(*options.split())
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_the_source_of_the_text_is_printed_as_it_is(tmp_path, corpus, capsys):
    long = tmp_path / "[bold]a name that is longer than a line of the terminal[red]"
    settings = replace(TINY, steps=1)
    program.run(
        flow.Job(settings, replace(corpus, source=str(long))),
        workers=1,
        mode="threads",
        picture=tmp_path / "[b]picture.png",
        verify=False,
        as_json=False,
    )
    out = capsys.readouterr().out
    assert f"held out, from {long}\n" in out
    assert str(tmp_path / "[b]picture.png") in out
