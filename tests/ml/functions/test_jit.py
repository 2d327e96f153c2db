"""`JitFunction`: what it traces once, what it refuses, and whom it asks to run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.ml.functions import cases
from tests.ml.functions.fakes import Client, Slice, Value
from timelyml.errors import ConfigError, HandleError, TraceError
from timelyml.ml.functions import ArrayType, JitFunction, jit, recorder, recording


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def slice_(client):
    return Slice(client)


def ones(*shape):
    return np.ones(shape, np.float32)


def test_a_call_gives_the_tree_of_the_function_with_the_clients_values(client, slice_):
    f = jit(cases.train, slice=slice_, in_shardings=(None, P("data"), P("data"), None))
    state, loss = f(cases.model(), ones(64, 16), ones(64, 8), 0.1)
    assert isinstance(state, cases.Model)
    assert state.name == "model"
    assert state.weights["inner"].type == ArrayType((16, 32), "float32", 4)
    assert loss.type.shape == ()
    (call,) = client.calls
    assert call.slice is slice_
    assert [each.shape for each in call.operands[:2]] == [(16, 32), (32, 8)]


def test_results_are_arguments_with_their_shardings(client, slice_):
    double = jit(lambda x: x * 2, slice=slice_, in_shardings=P("data"))
    add = jit(lambda x, y: x + y, slice=slice_)
    add(double(ones(8)), double(ones(8)))
    assert client.calls[-1].computation.in_specs == (("data",), ("data",))


def test_tracing_happens_once_for_equal_arguments(client, slice_):
    num_traced = []

    @jit(slice=slice_, static_argnames="scale")
    def f(x, scale=1):
        num_traced.append(1)
        return x * scale

    f(ones(4))
    first = len(num_traced)
    f(ones(4) * 3)
    assert len(num_traced) == first
    for args, kwargs in (
        ([ones(5)], {}),
        ([ones(4), 2], {}),
        ([ones(4)], {"scale": 2}),
        ([Value(slice_, ArrayType((4,), "float32", 4), ("data",))], {}),
    ):
        before = len(num_traced)
        f(*args, **kwargs)
        assert len(num_traced) > before


def test_a_call_like_the_last_is_what_tracing_it_anew_would_give(client, slice_):
    @jit(slice=slice_, static_argnames="scale", in_shardings=P("data"))
    def f(x, y=None, scale=1):
        return x * scale if y is None else x * scale + y

    def made_anew(*args, **kwargs):
        return jit(
            f.function, slice=slice_, static_argnames="scale", in_shardings=P("data")
        )(*args, **kwargs)

    x, wide = (f(ones(size)) for size in (8, 16))
    calls = [([x], {}), ([x], {}), ([x], {"scale": 3}), ([x], {}), ([wide], {})]
    calls += [
        ([x, x], {}),
        ([x, x], {}),
        ([x], {"y": x}),
        ([x, ones(8)], {}),
        ([x], {}),
    ]
    for args, kwargs in calls:
        f(*args, **kwargs)
        made_anew(*args, **kwargs)
        got, expected = client.calls[-2:]
        assert got.computation.identity == expected.computation.identity
        assert [id(each) for each in got.operands] == [
            id(each) for each in expected.operands
        ]
    with jax.enable_x64(True):
        f(x)
    assert client.calls[-1].computation.settings.x64
    with pytest.raises(HandleError, match="another client"):
        f(Value(Slice(Client()), x.type, x.spec))


def test_settings_of_the_caller_travel_with_the_call(client, slice_):
    f = jit(jnp.sin, slice=slice_)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        f(np.ones(3))
    f(np.ones(3))
    wide, narrow = [call.computation for call in client.calls]
    assert wide.settings.x64
    assert wide.settings.matmul_precision == "highest"
    assert wide.out_types[0].dtype == "float64"
    assert narrow.out_types[0].dtype == "float32"


def test_a_recorder_takes_calls_instead_of_the_client(client, slice_):
    other = Client()
    f = jit(jnp.sin, slice=slice_)
    with recording(other):
        assert recorder() is other
        f(ones(3))
    assert recorder() is None
    f(ones(3))
    assert (len(other.calls), len(client.calls)) == (1, 1)


def test_a_value_of_another_client_is_refused(slice_):
    def f(x):
        return x

    foreign = Value(Slice(Client()), ArrayType((4,), "float32", 4), ())
    with pytest.raises(HandleError, match="'f' is called with a value of another"):
        jit(f, slice=slice_)(foreign)


@pytest.mark.parametrize("bad", ["text", object(), b"bytes"])
def test_what_is_no_array_is_refused_with_its_type(slice_, bad):
    with pytest.raises(TraceError, match=f"got a {type(bad).__name__}"):
        jit(lambda x: x, slice=slice_)(bad)


def test_a_static_argument_that_cannot_be_hashed_is_refused(slice_):
    f = jit(lambda x, n: x, slice=slice_, static_argnums=1)
    with pytest.raises(TraceError, match=r"cannot be hashed; got .*\(1, \[2\]\)"):
        f(ones(3), [2])


def test_a_call_from_within_a_traced_function_is_refused(slice_):
    f = jit(jnp.sin, slice=slice_)
    with pytest.raises(TraceError, match="while JAX traces another function"):
        jax.jit(f)(1.0)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"static_argnums": "x"}, "static_argnums .*int"),
        ({"donate_argnames": (1,)}, "donate_argnames .*str"),
    ],
)
def test_malformed_options_are_refused(slice_, options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        jit(jnp.sin, slice=slice_, **options)


@pytest.mark.parametrize("bad", [3, JitFunction])
def test_only_functions_can_be_compiled(slice_, bad):
    function = jit(jnp.sin, slice=slice_) if bad is JitFunction else bad
    with pytest.raises(ConfigError, match="not a function"):
        jit(function, slice=slice_)


@pytest.mark.parametrize("wrong", [None, "a", {"data": 2}])
def test_what_is_no_slice_is_refused_at_once(wrong):
    with pytest.raises(ConfigError, match="no slice to run on"):
        jit(jnp.sin, slice=wrong)


def test_a_compiled_function_looks_like_its_own(slice_):
    @jit(slice=slice_)
    def documented(x):
        """Says so."""
        return x

    assert documented.__doc__ == "Says so."
    assert repr(documented) == "JitFunction('documented' on 'slice')"
