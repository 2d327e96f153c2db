"""Arrays in memory that another process lends, as JAX takes them: without a copy."""

from __future__ import annotations

import gc

import jax
import numpy as np

from tests.exchange.test_lending import lending, send, until_free


def test_an_array_of_jax_keeps_the_memory_that_it_aliases(tmp_path):
    rows = np.arange(1 << 18, dtype=np.float32)
    with lending(tmp_path) as (one, two):
        got = send(one, two, rows)
        where = got.__array_interface__["data"][0]
        alias = jax.device_put(got).block_until_ready()
        assert alias.unsafe_buffer_pointer() == where
        del got
        two._lending.rest()
        assert one.receive() == []
        assert one._lending.used_bytes == rows.nbytes
        more = jax.jit(lambda values: values + 1, donate_argnums=0)(alias)
        assert np.array_equal(more, rows + 1)
        del alias
        gc.collect()  # JAX lets go of what it aliased when it next looks
        until_free(one, two)
