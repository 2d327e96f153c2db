"""The pipeline example: what it refuses, its parts, and that it equals one program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from examples.corpus import load_corpus
from examples.pipeline import model, report, training, unpipelined
from examples.pipeline.__main__ import main
from examples.pipeline.config import Settings
from tests.examples.commands import figures_of, refusal_of
from timelyml.ml.pipeline import Action, Op, Span, Timeline, gpipe

TINY = Settings(
    stages=2, microbatches=2, layers=2, d_model=16, heads=2, length=8, batch=4, steps=4
)


@pytest.fixture(scope="module")
def corpus(text):
    window = TINY.length + 1
    return load_corpus(text, window=window, train_bytes=1 << 14, held_out_bytes=1 << 12)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stages", "0"], "--stages is out of range; got 0"),
        (["--stages", "9"], "got 9; expected at most 8: the layers, the embedding"),
        (["--stages", "3", "--schedule", "zbv"], "an even number for zbv"),
        (["--islands", "5"], "--islands does not fit; got 5; expected at most 4"),
        (["--microbatches", "33"], "expected at most 32, the sequences of a batch"),
        (["--d-model", "20"], "a multiple of 8, twice the number of heads"),
        (["--schedule", "none"], "expected one of gpipe, 1f1b"),
        (["--picture", "x.txt"], "--picture has no known format"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(arguments, says):
    assert says in refusal_of(main, arguments)


def test_neighbours_share_an_island_and_ranks_hold_two_stages_where_they_must():
    settings = Settings(stages=8, islands=2, schedule="interleaved-zb")
    assert settings.ranks == 4
    islands = [settings.island_of(rank) for rank in range(4)]
    assert islands == ["island-0", "island-0", "island-1", "island-1"]
    assert Settings(stages=3, islands=2).devices_per_island == 2


def test_the_beginning_of_a_file_does_not_count(corpus):
    inputs, targets = unpipelined.batch_of(corpus, replace(TINY, batch=256), 0)
    assert inputs.shape == targets.shape == (256, TINY.length)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    assert (targets == 0).any()
    logits = np.zeros((256, TINY.length, model.BYTES), np.float32)
    total, count = model.loss_fn(logits, targets)
    assert int(count) == (targets > 0).sum()
    assert float(total) == pytest.approx(int(count) * np.log(256), rel=1e-5)


def test_no_position_sees_what_comes_after_it():
    params = model.init(TINY)
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 256, size=(1, TINY.length))
    changed = tokens.copy()
    changed[0, -1] = tokens[0, -1] % 255 + 1

    def logits(x):
        for layer, weights in zip(model.layers_of(TINY), params, strict=True):
            x = layer(weights, x)
        return np.asarray(x)

    one, other = logits(tokens), logits(changed)
    np.testing.assert_array_equal(one[:, :-1], other[:, :-1])
    assert not np.array_equal(one[:, -1], other[:, -1])


def test_a_picture_is_of_the_step_with_the_middle_bubble(tmp_path):
    def timeline(wait):
        first = Span(0, Action(0, Op.FORWARD, 0), 0.0, 1.0)
        return Timeline(
            2, (first, Span(1, Action(1, Op.FORWARD, 0), 1 + wait, 2 + wait))
        )

    trained = training.Trained(gpipe(2, 1), (1, 1))
    assert report.save_picture(trained, tmp_path / "none.png") is None
    trained.timelines = [timeline(wait) for wait in (5.0, 0.0, 1.0)]
    assert report.median_timeline(trained) == trained.timelines[2]
    saved = report.save_picture(trained, tmp_path / "stages.png")
    assert saved is not None
    assert saved.stat().st_size > 0


def test_speed_leaves_out_what_compiles_and_what_was_timed():
    trained = training.Trained(gpipe(2, 1), (1, 1), num_recorded=1)
    trained.times = [10.0, 20.0, 21.0, 22.0, 99.0]
    per_step = TINY.batch * TINY.length
    assert report.tokens_per_s(TINY, trained) == per_step


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--schedule", "zbv", "--stages", "4", "--tied"],
        ["--schedule", "interleaved", "--stages", "4", "--islands", "1"],
        ["--schedule", "gpipe", "--stages", "3", "--microbatches", "2"],
    ],
)
def test_the_program_equals_the_model_in_one_piece(text, tmp_path, options):
    picture = tmp_path / "stages.png"
    arguments = ["--small", "--verify", "--data", text, "--picture", picture]
    figures = figures_of("pipeline", [*arguments, *options])
    assert figures["verify"]["passed"]
    assert len(figures["losses"]) == figures["steps"]
    assert 0 < figures["bubble"] < 1
    assert figures["peak_live"] == figures["expected_peak_live"]
    assert picture.exists()
