"""A training script of flax and optax, moved to a slice by compiling its step there."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from timelyml.ml.client import Handle, local
from timelyml.ml.functions import jit
from timelyml.ml.programs import program

nnx = pytest.importorskip("flax.nnx", reason="flax is among the extra `dev`")

NUM_STEPS = 3


class Model(nnx.Module):
    """Has parameters, statistics and a stream of random numbers, as flax tells apart."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def updated(model, optimiser, x, y):
    def loss_of(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimiser.update(model, gradients)
    return model, optimiser, loss


def batches():
    rng = np.random.default_rng(0)
    for _ in range(NUM_STEPS):
        yield (
            rng.normal(size=(16, 4)).astype(np.float32),
            rng.normal(size=(16, 2)).astype(np.float32),
        )


def trained(compiled):
    """The script: only what compiles its step differs from place to place."""
    model = Model(nnx.Rngs(0))
    optimiser = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    step = compiled(updated)
    losses = []
    for x, y in batches():
        model, optimiser, loss = step(model, optimiser, x, y)
        losses.append(loss)
    return [f"{loss:.9f}" for loss in losses], bits_of((model, optimiser))


def bits_of(tree):
    """The bytes of all arrays, by their paths; of keys, their words."""
    found = {}
    for path, leaf in jax.tree.flatten_with_path(tree)[0]:
        value = leaf.result() if isinstance(leaf, Handle) else leaf
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(value) if is_key else value)
        found[jax.tree_util.keystr(path)] = (array.dtype, array.tobytes())
    return found


@pytest.fixture(scope="module")
def slice_():
    with local(devices_per_island=1) as client:
        yield client.slice({"data": 1})


@pytest.fixture(scope="module")
def plain():
    return trained(jax.jit)


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_a_script_of_flax_trains_to_the_same_bits_on_a_slice(slice_, plain, donated):
    losses, state = trained(partial(jit, slice=slice_, donate_argnums=donated))

    assert losses == plain[0]
    assert state == plain[1]


def test_steps_of_flax_in_one_program_train_to_the_same_bits(slice_, plain):
    step = jit(updated, slice=slice_)

    @program
    def train(model, optimiser, batches):
        losses = []
        for x, y in batches:
            model, optimiser, loss = step(model, optimiser, x, y)
            losses.append(loss)
        return model, optimiser, losses

    model = Model(nnx.Rngs(0))
    optimiser = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    model, optimiser, losses = train(model, optimiser, list(batches()))

    assert [f"{loss:.9f}" for loss in losses] == plain[0]
    assert bits_of((model, optimiser)) == plain[1]
