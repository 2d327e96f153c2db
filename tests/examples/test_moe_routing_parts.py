"""The parts of the mixture-of-experts example that need no dataflow."""

import json
from dataclasses import replace

import numpy as np
import pytest

from examples.corpus import Text, load_corpus
from examples.moe_routing import dense, judging, model, picture, report
from examples.moe_routing.config import Settings
from examples.moe_routing.ngram import OrderTwo
from tests.examples.small import SIZES, TINY

SETTINGS = replace(TINY, steps=25, learning_rate=2e-2)


@pytest.fixture(scope="module")
def corpus(text):
    return load_corpus(text, **SIZES)


def test_training_and_held_out_text_are_of_different_files(corpus):
    assert len(corpus.train.starts) == 10
    assert len(corpus.held_out.starts) == 2
    held_out = bytes(corpus.held_out.content[8:108])
    assert held_out not in bytes(corpus.train.content)


def test_a_batch_is_cut_the_same_for_any_number_of_shards(corpus):
    whole = corpus.step_batch(3, batch=64, seed=1)
    for num_shards in (2, 4):
        parts = [
            corpus.step_batch(3, batch=64, seed=1, shard=shard, num_shards=num_shards)
            for shard in range(num_shards)
        ]
        for key in whole:
            joined = np.concatenate([part[key] for part in parts])
            assert (joined == whole[key]).all()


def test_contexts_end_where_their_target_begins_and_start_with_zeros(corpus):
    text = corpus.train
    batch = text.batch(np.arange(8))
    assert not batch["context"][0].any()
    first = text.content[8 : 8 + 8]
    assert (batch["target"] == first).all()
    assert (batch["context"][7][1:] == first[:7]).all()


def test_every_byte_of_text_has_one_position(corpus):
    text = corpus.train
    positions = text.positions(np.arange(text.num_bytes))
    assert (np.diff(positions) >= 1).all()
    assert (text.content[positions] != 0).all()
    assert len(text.content) - text.num_bytes == 8 * len(text.starts)


def test_a_single_file_is_split_and_too_little_text_is_refused(tmp_path):
    single = tmp_path / "all.txt"
    single.write_bytes(bytes(range(32, 127)) * 40)
    found = load_corpus(single, window=4, train_bytes=1 << 20, held_out_bytes=1 << 20)
    assert found.train.num_bytes + found.held_out.num_bytes == 95 * 40
    with pytest.raises(ValueError, match="too few files"):
        load_corpus(tmp_path / "none", window=4, train_bytes=100, held_out_bytes=100)


def order_two_by_definition(text, context, target):
    """Witten-Bell, one prediction at a time, from dictionaries of counts."""
    tables = [{}, {}, {}]
    for at in text.positions(np.arange(text.num_bytes)):
        history = tuple(text.content[at - 2 : at].tolist())
        for order, table in enumerate(tables):
            row = table.setdefault(history[2 - order :], {})
            row[int(text.content[at])] = row.get(int(text.content[at]), 0) + 1
    bits = []
    for window, byte in zip(context.tolist(), target.tolist(), strict=True):
        chance = 1 / 256
        for order, table in enumerate(tables):
            row = table.get(tuple(window[len(window) - order :]), {})
            total, kinds = sum(row.values()), len(row)
            if total:
                chance = (row.get(byte, 0) + kinds * chance) / (total + kinds)
        bits.append(-np.log2(chance))
    return np.mean(bits)


def test_the_order_two_model_equals_its_definition(corpus):
    judged = corpus.judged(300, seed=0)
    rival = OrderTwo(corpus.train)
    expected = order_two_by_definition(
        corpus.train, judged["context"], judged["target"]
    )
    got = rival.bits_per_byte(judged["context"], judged["target"])
    assert got == pytest.approx(expected, rel=1e-12)


def test_dense_training_lowers_the_loss(corpus):
    _, losses = dense.train(SETTINGS, corpus)
    assert losses[-1] < losses[0] - 0.3


def params_of(settings=SETTINGS):
    return model.init_all(settings)


def test_a_byte_is_predicted_from_those_before_it_only():
    rng = np.random.default_rng(1)
    context = rng.integers(1, 256, (1, SETTINGS.window)).astype(np.uint8)
    changed = context.copy()
    changed[0, 5] ^= 1

    first, other = (
        np.asarray(dense.logits(SETTINGS, params_of(), each))
        for each in (context, changed)
    )

    assert (first[0, :5] == other[0, :5]).all()
    assert (first[0, 5:] != other[0, 5:]).any(axis=1).all()


def test_held_out_windows_are_judged_on_halves_of_one_file_that_do_not_overlap(corpus):
    rng = np.random.default_rng(2)
    files = [rng.integers(1, 256, size).astype(np.uint8) for size in (400, 3, 300)]
    zeros = np.zeros(SETTINGS.window, np.uint8)
    sizes = np.array([len(file) for file in files])
    text = Text(
        content=np.concatenate([part for file in files for part in (zeros, file)]),
        starts=np.cumsum(sizes) - sizes + SETTINGS.window * np.arange(1, 4),
        firsts=np.cumsum(sizes) - sizes,
        num_bytes=703,
        window=SETTINGS.window,
    )

    windows = judging.judged_windows(SETTINGS, replace(corpus, held_out=text), 1 << 20)

    half = SETTINGS.window // 2
    assert (windows[:, -half - 2 :] > 0).all()  # zeros stand before each file
    ends = [bytes(text.content).find(bytes(each[-half:])) for each in windows]
    assert min(ends) >= SETTINGS.window + 2
    assert min(np.diff(sorted(ends))) >= half
    assert len(windows) > 0.9 * text.num_bytes / half


def test_bits_per_byte_are_the_mean_code_length_of_the_second_halves(corpus):
    windows = judging.judged_windows(SETTINGS, corpus, 41 * 4)
    params, half = params_of(), SETTINGS.window // 2

    bits = []
    for window in windows:
        scores = np.asarray(
            dense.logits(SETTINGS, params, window[None, :-1])[0], np.float64
        )
        for at in range(half, SETTINGS.window):
            chances = np.exp(scores[at] - scores[at].max())
            bits.append(-np.log2(chances[window[at + 1]] / chances.sum()))

    assert len(windows) == 41
    got = judging.bits_per_byte(SETTINGS, params, windows)
    assert got == pytest.approx(np.mean(bits), rel=1e-5)


def test_the_rival_is_judged_on_the_same_bytes(corpus):
    windows = judging.judged_windows(SETTINGS, corpus, 40)
    expected = [
        OrderTwo(corpus.train).bits_per_byte(windows[:, at - 2 : at], windows[:, at])
        for at in range(SETTINGS.window // 2 + 1, SETTINGS.window + 1)
    ]
    got = judging.rival_bits_per_byte(SETTINGS, corpus, windows)
    assert got == pytest.approx(np.mean(expected), rel=1e-12)


def test_generated_text_takes_the_likeliest_byte_or_draws_the_same_by_the_same_seed():
    params, window = params_of(), SETTINGS.window
    text = bytearray(b"ab")
    for _ in range(5):
        seen = (bytes(window) + bytes(text))[-window:]
        context = np.frombuffer(seen, np.uint8)[None]
        text.append(int(dense.logits(SETTINGS, params, context)[0, -1].argmax()))

    likeliest = judging.generate(SETTINGS, params, b"ab", num_bytes=5, temperature=0)
    drawn = [judging.generate(SETTINGS, params, b"ab", num_bytes=20) for _ in range(2)]

    assert b"ab" + likeliest == bytes(text)
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 20


def test_the_largest_difference_is_relative_and_names_its_leaf():
    reference = {"a": np.array([100.0, 1.0]), "b": [np.array([1e-3])]}
    ours = {"a": np.array([101.0, 1.0]), "b": [np.array([1.1e-3])]}
    difference, where = dense.largest_difference(ours, reference)
    assert difference == pytest.approx(0.1)
    assert where == "['b'][0]"


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="--top-k is out of range; got 3"):
        Settings(num_experts=2, top_k=3)
    with pytest.raises(ValueError, match="--batch is uneven; got 10"):
        Settings(batch=10, data_shards=4)
    with pytest.raises(ValueError, match="--checkpoints holds another model"):
        Settings.of({"d_model": 16})
    assert Settings.of(SETTINGS.to_dict()) == SETTINGS


def history():
    found = report.History(SETTINGS)
    for step in range(30):
        counts = np.array([[[40, 40, 40, 8 + step], [32, 32, 32, 32]]])
        found.add(
            {"loss": [2.0 - step / 30], "balance": [0.1], "counts": counts}, step * 0.5
        )
    return found


def test_a_history_gives_shares_speed_and_a_map():
    found = history()
    assert found.shares.sum(axis=1) == pytest.approx([1, 1])
    assert found.tokens_per_s == pytest.approx(64 / 0.5)
    shares = found.shares_over_time(10)
    assert shares.shape == (2, 4, 10)
    drawn = report.heat_map(shares, found.names).splitlines()
    assert len(drawn) == 9
    assert drawn[8].endswith("|")
    assert json.dumps(found.recent_bits)


def test_the_picture_is_text_without_a_plotting_library(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    path = picture.save_picture(history(), tmp_path / "deep" / "routing.png")
    assert path.suffix == ".txt"
    assert "expert   3" in path.read_text()


def test_experts_on_several_shards_are_named_in_the_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    found = history()
    found.settings = replace(SETTINGS, replicate=(2, 2), expert_shards=2)
    assert found.settings.replicate == (2,)
    text = picture.save_picture(found, tmp_path / "routing.png").read_text()
    assert "layer 1 expert 2 x2 |" in text
    assert "layer 1 expert    3 |" in text
