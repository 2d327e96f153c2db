"""What a client hears of compiling: errors of XLA, where and of which call."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from timelyml import ml
from timelyml.errors import TraceError
from timelyml.testing.leftovers import eventually

TIMEOUT_S = 60.0
X = np.ones(4, np.float32)


def unknown(x):
    """What JAX exports and XLA refuses."""
    return jax.ffi.ffi_call("no_such_target", x)(x)


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
