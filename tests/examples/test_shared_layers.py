"""The example of shared layers: what it refuses, and that it equals one program."""

from __future__ import annotations

import numpy as np
import pytest

from examples.corpus import load_corpus
from examples.shared_layers import model, training
from examples.shared_layers.__main__ import ALLOWED, main
from examples.shared_layers.config import Settings
from tests.examples.commands import refusal_of
from timelyml.errors import TraceError

TINY = Settings(
    steps=3, pretraining_steps=1, rows=4, layers=1, d_model=16, length=8, rate=0.5
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for index in range(12):
        letters = rng.integers(97, 123, 400).astype(np.uint8)
        letters[::7] = 10
        (directory / f"{index}.txt").write_bytes(bytes(letters))
    window = TINY.length + 1
    return load_corpus(directory, window=window, train_bytes=4096, held_out_bytes=512)


def test_two_clients_learn_what_one_program_does_in_two_calls_a_step(corpus):
    trained = training.train(TINY, corpus)
    assert training.off_reference(TINY, corpus, trained) <= ALLOWED
    assert trained.shared_calls == 2 * TINY.steps
    for losses in trained.losses.values():
        assert len(set(losses)) == TINY.steps  # or nothing was learnt


def test_a_client_that_fails_ends_the_others(corpus, monkeypatch):
    def broken(params, hidden, labels):
        raise ValueError("no such loss")

    weights = training.init(TINY, corpus)
    monkeypatch.setattr(training, "init", lambda *_: weights)
    monkeypatch.setattr(model, "loss_of", broken)
    with pytest.raises(TraceError, match="no such loss"):
        training.train(TINY, corpus)


def test_kinds_of_bytes():
    text = b"a1 \n;"
    assert [model.kind_of(byte) for byte in text] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rows", "0"], "--rows is out of range; got 0"),
        (["--d-model", "12"], "a multiple of 8, twice the number of heads"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(arguments, says):
    assert says in refusal_of(main, arguments)
