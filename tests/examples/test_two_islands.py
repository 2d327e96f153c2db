"""Two islands: what the example refuses, its parts, and that replicas equal one program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.two_islands import overlap
from examples.two_islands.__main__ import main
from examples.two_islands.overlap import Bar
from examples.two_islands.replicas import AXIS, Replicas
from tests.examples.commands import figures_of, refusal_of
from timelyml import ml

STEPS = 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--devices", "0"], "--devices is out of range; got 0"),
        (["--devices", "3", "--hosts", "2"], "got 3; expected a multiple of 2 hosts"),
        (["--batch", "30"], "a multiple of 4, all devices of both islands"),
        (["--chunks", "9"], "at most 8: the layers, the embedding and the head"),
        (["--d-model", "20"], "a multiple of 8, twice the number of heads"),
        (["--picture", "x.txt"], "--picture has no known format"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(arguments, says):
    assert says in refusal_of(main, arguments)


def affine(params, x):
    return jnp.tanh(x @ params["w"])


def loss_fn(y, target):
    return jnp.sum((y - target) ** 2), jnp.float32(y.shape[0])


def test_replicas_on_two_islands_learn_what_one_program_does_and_stay_the_same():
    rng = np.random.default_rng(0)
    params = [{"w": rng.normal(size=(8, 8)).astype(np.float32)} for _ in range(2)]
    x, target = (rng.normal(size=(8, 8)).astype(np.float32) for _ in range(2))
    adam = optax.adam(0.1)

    def whole(params):
        y = affine(params[1], affine(params[0], x))
        return loss_fn(y, target)[0] / len(x)

    expected, state, losses = params, adam.init(params), []
    for _ in range(STEPS):
        loss, gradients = jax.value_and_grad(whole)(expected)
        changes, state = adam.update(gradients, state, expected)
        expected = optax.apply_updates(expected, changes)
        losses.append(float(loss))

    with ml.local(islands=2, devices_per_island=2) as client:
        slices = [client.slice({AXIS: 2}, island=f"island-{each}") for each in (0, 1)]
        replicas = Replicas([affine, affine], params, loss_fn, adam, slices)
        ours, found = replicas.init(), []
        with client.resources.trace() as trace:
            for _ in range(STEPS):
                ours, parts = replicas(
                    ours, replicas.put(x, target), np.float32(len(x))
                )
                found.append(sum(float(each) for each in parts))
            one, other = (replicas.params(ours, replica) for replica in (0, 1))

    np.testing.assert_allclose(found, losses, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    close = {"rtol": 1e-4, "atol": 1e-5}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), one, expected)
    moved = [x for x in overlap.bars_of(trace) if x.what == "transfer"]
    size_bytes = sum(each["w"].nbytes for each in params)
    for island in ("island-0", "island-1"):
        came = sum(each.size_bytes for each in moved if each.island == island)
        assert came == STEPS * size_bytes, "the gradients of the other, once a step"


def test_transfers_are_hidden_as_far_as_their_island_computes_meanwhile():
    bars = [
        Bar("a", "backward", 0.0, 2.0),
        Bar("a", "transfer", 1.0, 2.5, 8),
        Bar("a", "transfer", 2.0, 3.0, 8),
        Bar("b", "backward", 0.0, 9.0),
    ]
    assert overlap.hidden_share(bars) == pytest.approx(1.0 / 2.0)
    assert overlap.hidden_share(bars[:1]) == 0


def test_a_chart_has_a_line_for_what_an_island_computes_and_one_for_what_it_gets():
    bars = [Bar("a", "forward", 0.0, 5.0), Bar("a", "transfer", 5.0, 10.0, 8)]
    assert overlap.text_chart(bars, width=10) == (
        "a computes |FFFFF.....|\na receives |.....TTTTT|\n"
    )


def test_a_picture_is_written_where_it_was_asked_for(tmp_path):
    saved = overlap.save_picture([Bar("a", "update", 0.0, 1.0)], tmp_path / "a.png")
    assert saved.stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--hosts", "2"]])
def test_the_program_equals_one_island_and_one_program(tmp_path, options):
    arguments = ["--small", "--verify", "--picture", tmp_path / "a.png"]
    figures = figures_of("two_islands", [*arguments, *options])
    assert figures["agrees"]
    assert len(set(figures["losses"])) == figures["steps"]
    assert figures["bytes_between_islands"] > 0
    assert (tmp_path / "a.png").exists()
