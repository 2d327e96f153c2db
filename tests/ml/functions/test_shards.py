"""Which functions are launched shard by shard, and what says that one has no work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from timelyml.ml.functions.shards import shard_of

MESH = AbstractMesh((2,), ("e",))
COUNTS = jax.ShapeDtypeStruct((2,), jnp.int32)
ROWS = jax.ShapeDtypeStruct((4, 3), jnp.float32)
TABLE = np.arange(3, dtype=np.float32)


def over_shards(function):
    return jax.shard_map(function, in_specs=P("e"), out_specs=P("e"), check_vma=False)


def traced(function):
    with use_abstract_mesh(MESH):
        return jax.jit(over_shards(function)).trace(COUNTS, ROWS).jaxpr


def on_some(function):
    """Call a function on rows where there are some, else return zeros."""

    def shard(counts, rows):
        return jax.lax.cond(counts[0] > 0, function, jnp.zeros_like, rows)

    return shard


def test_a_shard_computes_what_it_does_among_the_others():
    shard = shard_of(traced(on_some(lambda rows: rows * TABLE)))
    assert shard.idle == 0
    assert list(map(str, shard.types)) == ["int32[1]", "float32[2,3]"]
    assert shard.in_specs == (("e",), ("e",))
    rows = np.ones((2, 3), np.float32)
    for count, expected in ((0, 0 * TABLE), (2, TABLE)):
        (found,) = shard.function(np.array([count], np.int32), rows)
        np.testing.assert_array_equal(found, np.stack([expected] * 2))


def test_so_does_its_derivative_either_way():
    def forward(counts, rows):
        run = on_some(lambda rows: jnp.tanh(rows) * TABLE)
        return jax.vjp(lambda rows: run(counts, rows), rows)

    def there(counts, rows):
        found, pull = forward(counts, rows)
        return found, *[jnp.atleast_1d(each) for each in jax.tree.leaves(pull)]

    shard = shard_of(traced(there))
    assert shard is not None
    found = shard.function(np.zeros(1, np.int32), np.ones((2, 3), np.float32))
    assert not any(np.asarray(each).any() for each in found)


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: rows + jax.lax.psum(rows, "e"),
        lambda rows: rows + jax.lax.axis_index("e"),
        lambda rows: jax.lax.cond(rows[0, 0] > 0, lambda x: jax.lax.pmax(x, "e"), jnp.sin, rows),
    ],
)  # fmt: skip
def test_what_needs_others_is_run_by_all(function):
    assert shard_of(traced(on_some(function))) is None


@pytest.mark.parametrize(
    "shard",
    [
        lambda counts, rows: rows * counts[0],  # zero times infinity is none
        lambda counts, rows: jnp.where(counts[0] >= 0, rows, 0.0),
        lambda counts, rows: jax.lax.cond(counts[0] > 1, jnp.sin, jnp.cos, rows),
        lambda counts, rows: jnp.where(counts[0] > 0, 0.0, rows),
    ],
)
def test_where_no_rows_may_give_something_all_are_launched(shard):
    assert shard_of(traced(shard)) is None


def test_more_than_shards_alone_is_run_by_all():
    run = on_some(jnp.sin)

    def beside(counts, rows):
        return over_shards(run)(counts, rows) + 1

    with use_abstract_mesh(MESH):
        assert shard_of(jax.jit(beside).trace(COUNTS, ROWS).jaxpr) is None
