"""Gradients of programs on a cluster: a model over two islands, trained."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from timelyml import ml
from timelyml.errors import ComputationError, HandleError

FLOAT32 = 1e-5


@pytest.fixture(scope="module")
def client():
    with ml.local(islands=2, devices_per_island=2) as client:
        yield client


@pytest.fixture(scope="module")
def here(client):
    return client.slice({"x": 2}, island="island-0")


@pytest.fixture(scope="module")
def there(client):
    return client.slice({"x": 1}, island="island-1")


def encode(w, x):
    return jnp.tanh(x @ w)


def loss_of(w, h, y):
    error = h @ w - y
    return jnp.mean(error**2), jnp.abs(error).max()


def close(mine, theirs):
    theirs = np.asarray(theirs)
    difference = np.abs(np.asarray(mine) - theirs).max()
    assert difference <= FLOAT32 * np.abs(theirs).max()


def test_a_model_over_two_islands_learns_as_in_one_program(client, here, there):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 4)), rng.normal(size=(8, 2))
    weights = {"in": rng.normal(size=(4, 6)), "out": rng.normal(size=(6, 2))}
    x, y, weights = jax.tree.map(np.float32, (x, y, weights))
    encoder = ml.jit(encode, slice=here, in_shardings=(P(), P("x")))
    decoder = ml.jit(loss_of, slice=there)
    updates = {
        name: ml.jit(lambda w, g: w - 0.1 * g, slice=slice_, donate_argnums=0)
        for name, slice_ in (("in", here), ("out", there))
    }

    @ml.program
    def model(w, x, y):
        return decoder(w["out"], encoder(w["in"], x), y)

    @ml.program
    def step(w, x, y):
        (loss, worst), gradients = ml.value_and_grad(model, has_aux=True)(w, x, y)
        moved = {name: updates[name](w[name], gradients[name]) for name in w}
        return moved, loss, worst

    def plain(w, x, y):
        return loss_of(w["out"], encode(w["in"], x), y)

    w = {
        name: client.put(weights[name], slice_.sharding())
        for name, slice_ in (("in", here), ("out", there))
    }
    for _ in range(3):
        w, loss, worst = step(w, x, y)
        (expected, most), gradients = jax.value_and_grad(plain, has_aux=True)(
            weights, x, y
        )
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
        close(loss, expected)
        close(worst, most)
    jax.tree.map(close, w, weights)


def test_what_a_program_donates_is_dead_after_its_gradient(client, here, there):
    square = ml.jit(lambda x: x * x, slice=here)
    step = ml.jit(jnp.exp, slice=here, donate_argnums=0)
    total = ml.jit(lambda x, y: (x * y).sum(), slice=there)

    @ml.program
    def f(x):
        return total(square(x), step(x))

    x = np.linspace(-1, 1, 4, dtype=np.float32)
    given = client.put(x, here.sharding(P("x")))
    close(ml.grad(f)(given), (2 * x + x * x) * np.exp(x))
    with pytest.raises(HandleError, match="donated"):
        np.asarray(given)


def test_an_argument_that_changes_nothing_has_a_gradient_of_zeros(client, here):
    total = ml.jit(lambda x: x.sum(), slice=here)
    x = np.ones(4, np.float32)
    unused = client.put(np.ones((2, 2), np.float32), here.sharding(P("x")))
    f = ml.program(lambda x, y, z: total(x))
    one, zeros, none = ml.grad(f, (0, 1, 2))(x, unused, np.ones(3, np.float32))
    np.testing.assert_array_equal(one, x)
    np.testing.assert_array_equal(zeros, np.zeros((2, 2)))
    np.testing.assert_array_equal(none, np.zeros(3))


def test_custom_rules_with_callbacks_run_both_ways_and_fail_by_their_line(here):
    def solve(x):  # all within: what JAX makes of a custom rule does not pickle
        def root(x):
            if np.any(x < 0):
                raise ValueError("negative")
            return np.sqrt(x)

        @jax.custom_vjp
        def rooted(x):
            return jax.pure_callback(root, jax.typeof(x), x)

        def forward(x):
            y = rooted(x)
            return y, y

        rooted.defvjp(forward, lambda y, dy: (dy / (2 * y),))
        return rooted(x)

    solved = ml.jit(solve, slice=here)
    total = ml.jit(lambda x: x.sum(), slice=here)
    gradient = ml.grad(ml.program(lambda x: total(solved(x))))
    close(gradient(np.array([1, 4], np.float32)), [0.5, 0.25])
    with pytest.raises(ComputationError, match="negative"):
        np.asarray(gradient(np.array([1, -4], np.float32)))
