"""Gradients of programs and of labelled models on a cluster of two islands."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from timelyml import ml
from timelyml.errors import ComputationError, HandleError

nnx = pytest.importorskip("flax.nnx", reason="flax is among the extra `dev`")

FLOAT32 = 1e-5


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


def test_keys_complex_numbers_and_second_derivatives(here):
    def drop(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    def loss(x):
        return jnp.sum(jnp.abs(jnp.sin(x)) ** 2)

    def dot(a, b):
        return jnp.real(jnp.sum(a * b))

    on = [ml.jit(function, slice=here) for function in (drop, loss, dot)]

    def model(drop, loss):
        return lambda x, key: loss(drop(key, drop(key, x)))

    program = ml.program(model(*on[:2]))

    @ml.program
    def along(x, key):
        return on[2](ml.grad(program)(x, key), x)

    x = np.linspace(0.2, 1, 8).reshape(4, 2)
    x, key = np.complex64(x + 1j * x[::-1]), jax.random.key(3)
    gradient = jax.grad(model(drop, loss))
    close(ml.grad(program)(x, key), gradient(x, key))
    real = np.float32(x.real)
    second = jax.grad(lambda x: dot(gradient(x, key), x))(real)
    close(ml.grad(along)(real, key), second)


def test_custom_rules_with_callbacks_run_both_ways_and_fail_by_their_line(here):
    def root(x):
        if np.any(x < 0):
            raise ValueError("negative")
        return np.sqrt(x)

    @jax.custom_vjp
    def rooted(x):
        return jax.pure_callback(root, jax.typeof(x), x)

    @partial(jax.jit, static_argnums=1)
    def forward(x, power):
        y = rooted(x) ** power
        return y, y

    rooted.defvjp(lambda x: forward(x, 1), lambda y, dy: (dy / (2 * y),))
    solved = ml.jit(rooted, slice=here)
    total = ml.jit(lambda x: x.sum(), slice=here)
    gradient = ml.grad(ml.program(lambda x: total(solved(x))))
    close(gradient(np.array([1, 4], np.float32)), [0.5, 0.25])
    with pytest.raises(ComputationError, match="negative"):
        np.asarray(gradient(np.array([1, -4], np.float32)))


class Model(nnx.Module):
    """Two labelled halves, and between them what goes where less has to move."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.narrow = nnx.Linear(8, 2, rngs=rngs)
        self.out = nnx.Linear(2, 3, rngs=rngs)

    def __call__(self, x):
        with jax.named_scope("bottom"):
            x = nnx.gelu(self.embed(x))
        x = self.narrow(self.norm(x))
        with jax.named_scope("top"):
            return self.out(x)


@pytest.fixture(scope="module")
def labelled():
    """The function of a model in nnx, its weights, and data."""
    graph, weights = nnx.split(Model(nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(8, 4)), rng.normal(size=(8, 3))

    def apply(weights, x):
        return nnx.merge(graph, weights)(x)

    return apply, weights, np.float32(x), np.float32(y)


def test_a_labelled_model_of_nnx_has_the_gradients_of_the_whole(
    client, here, there, labelled
):
    apply, weights, x, y = labelled

    def loss_of(weights, x, y):
        return jnp.mean((apply(weights, x) - y) ** 2)

    model = ml.fragments(loss_of, {"bottom": here, "top": there})
    leaves, tree = jax.tree.flatten(weights)
    slices = jax.tree.leaves(ml.homes(model, weights, x, y)[0])
    assert [each is there for each in slices].count(True) == 2  # `out` alone
    placed = [
        client.put(np.asarray(leaf), slice_.sharding())
        for leaf, slice_ in zip(leaves, slices, strict=True)
    ]
    loss, gradients = ml.value_and_grad(model)(jax.tree.unflatten(tree, placed), x, y)
    expected, theirs = jax.value_and_grad(loss_of)(weights, x, y)
    close(loss, expected)
    jax.tree.map(close, jax.tree.leaves(gradients), jax.tree.leaves(theirs))
    on = [gradient.slice for gradient in jax.tree.leaves(gradients)]
    assert on == slices


def test_a_labelled_model_of_nnx_is_trained_as_a_pipeline(
    client, here, there, labelled
):
    apply, weights, x, y = labelled
    cut = ml.named_stages(apply, ("bottom", "top"), weights, x[:4])
    pipe = ml.pipeline(
        cut.stages, slices=[here, there], schedule="1f1b", num_microbatches=2
    )

    def loss_fn(y, target):
        return ((y - target) ** 2).sum(), jnp.float32(y.size)

    step = pipe.train_step(loss_fn, optax.sgd(0.1))
    state = step.init(cut.params_of(jax.tree.map(np.asarray, weights)))
    state, loss = step(state, x, y)
    expected, gradients = jax.value_and_grad(
        lambda weights: jnp.mean((apply(weights, x) - y) ** 2)
    )(weights)
    moved = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
    close(loss, expected)
    jax.tree.map(close, jax.tree.leaves(cut.join(state.params)), jax.tree.leaves(moved))
