"""Functions that are traced without devices and run on them, with what they take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

from timelyml.ml.functions import LogicalMesh, Options, Settings

MESHES = {
    1: LogicalMesh(("data", "model"), (1, 1)),
    2: LogicalMesh(("data", "model"), (2, 1)),
    4: LogicalMesh(("data", "model"), (2, 2)),
    8: LogicalMesh(("data", "model"), (4, 2)),
}


@dataclass(frozen=True)
class Case:
    """A function, its arguments by a function, and how it is compiled."""

    fun: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    options: Options = field(default_factory=Options)
    settings: Settings = field(default_factory=Settings)
    axis_type: str = "auto"

    def mesh(self, num_devices):
        """The mesh that it runs on."""
        mesh = MESHES[num_devices]
        return replace(mesh, axis_types=(self.axis_type,) * 2)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weights", "step"],
    meta_fields=["name"],
)
@dataclass(frozen=True)
class Model:
    """Weights with a name that is no array."""

    weights: dict[str, Any]
    step: Any
    name: str = "model"


def drawn(*shape, dtype=np.float32):
    rng = np.random.default_rng(sum(shape))
    return rng.standard_normal(shape).astype(dtype)


def model():
    weights = {"inner": drawn(16, 32), "outer": drawn(32, 8)}
    return Model(weights, np.int32(0))


def loss_of(weights, x, y):
    hidden = jax.nn.gelu(x @ weights["inner"])
    return ((hidden @ weights["outer"] - y) ** 2).mean()


def train(state, x, y, rate):
    loss, grads = jax.value_and_grad(loss_of)(state.weights, x, y)
    weights = jax.tree.map(lambda w, g: w - rate * g, state.weights, grads)
    return Model(weights, state.step + 1, state.name), loss


def summed(x):
    def local(x):
        return jax.lax.psum(x.sum(0), "data")

    return jax.shard_map(local, in_specs=P("data"), out_specs=P())(x)


def constrained(x, w):
    y = jax.lax.with_sharding_constraint(x @ w, P("data", "model"))
    return y.sum(), y


def explicit(x, w):
    y = jnp.dot(x, w, out_sharding=P("data", "model"))
    return y, jax.sharding.reshard(y, P()).sum(0)


def noise(key, x):
    first, second = jax.random.split(key)
    return x + jax.random.normal(first, x.shape), second


def narrow(x):
    low = x.astype(jnp.float8_e4m3fn)
    return low, (low.astype(jnp.bfloat16) * 3).sum(0)


def power(x, n):
    if n == 0:  # of a static argument Python may ask
        return x
    return power(x, n - 1) * x


def scanned(x):
    def step(carry, row):
        carry = jnp.tanh(carry + row)
        return carry, carry.sum()

    return jax.lax.scan(step, x[0], x)


def wide(x):
    return jnp.cumsum(x) / 3, jnp.arange(5)


def asks_host(x, scale):
    def on_host(x):
        return np.sin(x, dtype=np.float32) * scale

    rows = jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return Model({"rows": rows * 2}, x.sum())


def guarded(x, limit):
    checkify.check(jnp.max(x) < limit, "{big} is too large, {}", x[0], big=jnp.max(x))
    return x * 2


def raises_on_host(x):
    def on_host(x):
        raise LookupError("no such row")  # the user's line

    return jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


CASES = {
    "train": Case(
        train,
        lambda: (model(), drawn(64, 16), drawn(64, 8), 0.1),
        Options(
            in_shardings=(
                Model({"inner": P(None, "model"), "outer": P("model")}, P()),
                P("data"),
                P("data"),
                None,
            ),
            donate_argnums=(0,),
        ),
    ),
    "open": Case(
        train,
        lambda: (model(), drawn(64, 16), drawn(64, 8), 0.1),
        Options(in_shardings=(None, P("data"), P("data"), None)),
    ),
    "summed": Case(summed, lambda: (drawn(16, 5),), Options(in_shardings=P("data"))),
    "constrained": Case(constrained, lambda: (drawn(8, 16), drawn(16, 8))),
    "explicit": Case(
        explicit,
        lambda: (drawn(8, 16), drawn(16, 8)),
        Options((P("data"), P(None, "model"))),
        axis_type="explicit",
    ),
    "noise": Case(
        noise,
        lambda: (jax.random.key(7), drawn(8, 8)),
        Options(in_shardings=(None, P("data")), out_shardings=(P("data"), P())),
    ),
    "other generator": Case(
        noise,
        lambda: (jax.random.key(7, impl="rbg"), drawn(8, 8)),
        Options(in_shardings=(None, P("data"))),
        Settings(prng_impl="rbg"),
    ),
    "narrow": Case(narrow, lambda: (drawn(8, 8),), Options(in_shardings=P("data"))),
    "static": Case(
        power, lambda: (drawn(8, 3), 3), Options(P("data"), static_argnames=("n",))
    ),
    "scanned": Case(scanned, lambda: (drawn(9, 8),), Options(P(None, "data"))),
    "wide": Case(
        wide,
        lambda: (drawn(16, dtype=np.float64),),
        settings=Settings(x64=True),
    ),
    "precise": Case(
        constrained,
        lambda: (drawn(8, 16), drawn(16, 8)),
        settings=Settings(matmul_precision="highest"),
    ),
    "asks host": Case(
        asks_host,
        lambda: (drawn(8, 8), 3),
        Options((P("data"),), static_argnums=(1,)),
    ),
    "guarded": Case(guarded, lambda: (drawn(8), 100.0), Options((P("data"), None))),
}
