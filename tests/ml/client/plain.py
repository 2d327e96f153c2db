"""What plain JAX computes on virtual devices; run in a process with their environment."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def step(weights, batch):
    """One step of gradient descent on a small regression."""

    def loss(weights):
        hidden = jnp.tanh(batch["x"] @ weights["in"])
        return jnp.mean((hidden @ weights["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def inputs():
    rng = np.random.default_rng(7)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    weights = {"in": draw(8, 16), "out": draw(16, 4)}
    return weights, {"x": draw(32, 8), "y": draw(32, 4)}


def train(num_devices, num_steps):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    cut = NamedSharding(mesh, PartitionSpec("data"))
    weights, batch = inputs()
    weights, batch = jax.device_put(weights, whole), jax.device_put(batch, cut)
    run = jax.jit(step, in_shardings=(whole, cut), out_shardings=whole)
    losses = []
    for _ in range(num_steps):
        weights, loss = run(weights, batch)
        losses.append(np.asarray(loss))
    return {"losses": np.stack(losses), **jax.tree.map(np.asarray, weights)}


if __name__ == "__main__":
    path, num_devices, num_steps = sys.argv[1:]
    np.savez(path, **train(int(num_devices), int(num_steps)))
