"""What a client hears of compiling: errors of XLA, where and of which call."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from timelyml import ml
from timelyml.errors import ProgramError, TraceError
from timelyml.testing.leftovers import eventually

TIMEOUT_S = 60.0
X = np.ones(4, np.float32)


def unknown(x):
    """What JAX exports and XLA refuses."""
    return jax.ffi.ffi_call("no_such_target", x)(x)


def half(x, *, by):
    return x["a"] * 2 + by


def is_known(client):
    return eventually(lambda: client._computations._refused, TIMEOUT_S)


def test_an_error_of_xla_names_the_call_and_comes_at_the_next_one(client):
    s = client.slice({"x": 2})
    f = ml.jit(unknown, slice=s)
    first = f(X)  # the line that is named
    with pytest.raises(
        TraceError, match=r"'unknown', called at .*cannot be comp"
    ) as at:
        first.result(TIMEOUT_S)
    assert at.value.where.endswith("first = f(X)  # the line that is named")
    assert at.value.host == str(s.devices[0][0])
    assert is_known(client)
    with pytest.raises(TraceError, match=r"'unknown', called at .*line that is named"):
        f(X)
    assert float(ml.jit(lambda x: x.sum(), slice=s)(X)) == 4  # others go on


def test_a_program_raises_at_its_next_call_what_xla_refuses(client):
    s = client.slice({"x": 1})
    f, double = ml.jit(unknown, slice=s), ml.jit(lambda x: x * 2, slice=s)

    @ml.program
    def both(x):
        return f(x), double(x)  # the line of the program

    bad, good = both(X)
    np.testing.assert_array_equal(good, X * 2)
    with pytest.raises(TraceError, match="line of the program"):
        bad.result(TIMEOUT_S)
    assert is_known(client)
    with pytest.raises(TraceError, match="line of the program"):
        both(X)


def test_a_function_can_be_looked_at_stage_by_stage_as_in_jax(client):
    s = client.slice({"x": 2})
    f = ml.jit(half, slice=s, static_argnames="by", in_shardings=P("x"))
    like = {"a": jax.ShapeDtypeStruct((4,), np.float32)}
    traced = f.trace(like, by=3)
    assert (traced.out_info.shape, traced.out_info.sharding.spec) == ((4,), P("x"))
    assert "mul" in str(traced.jaxpr)
    lowered = f.lower(like, by=3)
    assert "stablehlo.multiply" in lowered.as_text()
    assert lowered.cost_analysis()["flops"] >= 8
    compiled = lowered.compile(TIMEOUT_S)
    needs = compiled.memory_analysis()
    assert (needs.argument_bytes, needs.output_bytes) == (8, 8)  # half of it each
    np.testing.assert_array_equal(compiled({"a": X}, by=3), X * 2 + 3)
    with pytest.raises(TraceError, match="'half' is called with what it was not comp"):
        compiled({"a": X}, by=4)


def test_compile_waits_for_what_xla_says(client):
    s = client.slice({"x": 1})
    with pytest.raises(
        TraceError, match=r"called at .*compile\(TIMEOUT_S\), cannot be"
    ):
        ml.jit(unknown, slice=s).lower(X).compile(TIMEOUT_S)
    offline = ml.jit(unknown, slice=ml.OfflineClient().slice({"x": 1})).lower(X)
    assert "no_such_target" in offline.as_text()
    with pytest.raises(ProgramError, match="without a cluster"):
        offline.compile()
