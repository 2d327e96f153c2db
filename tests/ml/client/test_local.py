"""`ml.local`: calls on slices of worker processes, compared with plain JAX."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import operator
import os
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

from tests.ml.client import plain
from timelyml.errors import (
    ComputationError,
    ConfigError,
    DeadlineError,
    HandleError,
    RunStoppedError,
    SliceError,
    WireError,
)
from timelyml.ml.client import Client, Handle, local
from timelyml.ml.client.local import LocalLink
from timelyml.ml.controller.messages import Fetch
from timelyml.ml.functions import jit
from timelyml.runtime.environment import worker_environment
from timelyml.testing.leftovers import eventually

TIMEOUT_S = 60.0
NUM_STEPS = 5


@pytest.fixture(scope="module")
def client():
    with local(islands=2, devices_per_island=4) as client:
        yield client


@pytest.fixture
def make_slice(client):
    slices = []

    def make(size=2, **options):
        slices.append(client.slice({"data": size}, **options))
        return slices[-1]

    yield make
    for each in slices:
        each.close()


def plain_jax(tmp_path, num_devices, num_steps):
    path = tmp_path / "plain.npz"
    environment = worker_environment(os.environ, num_devices=num_devices)
    root = str(Path(__file__).parents[3])
    environment["PYTHONPATH"] = root
    command = [
        sys.executable,
        plain.__file__,
        str(path),
        str(num_devices),
        str(num_steps),
    ]
    subprocess.run(command, env=environment, check=True, timeout=TIMEOUT_S)
    return dict(np.load(path))


def gated(path):
    """A function whose computation takes until a file is there."""

    def wait(x):
        while not Path(path).exists():
            threading.Event().wait(0.002)
        return np.asarray(x)

    def f(x):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return f


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_training_gives_the_bits_of_plain_jax(make_slice, tmp_path, num_devices):
    slice_ = make_slice(num_devices)
    whole, cut = slice_.sharding(P()), slice_.sharding(P("data"))
    run = jit(plain.step, slice=slice_, in_shardings=(whole, cut), out_shardings=whole)
    weights, batch = plain.inputs()

    weights, batch = slice_.client.put(weights, whole), slice_.client.put(batch, cut)
    losses = []
    for _ in range(NUM_STEPS):
        weights, loss = run(weights, batch)
        losses.append(loss)
    found = {"losses": np.stack(losses), **jax.device_get(weights)}

    expected = plain_jax(tmp_path, num_devices, NUM_STEPS)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_128_chained_calls_with_a_collective_in_each(make_slice):
    slice_ = make_slice(4)
    f = jit(lambda x: x / x.sum(), slice=slice_, out_shardings=P("data"))
    x = slice_.client.put(
        np.arange(1.0, 9.0, dtype=np.float32), slice_.sharding(P("data"))
    )
    for _ in range(128):
        x = f(x)
    np.testing.assert_allclose(np.asarray(x).sum(), 1.0, rtol=1e-6)


def test_calls_run_ahead_of_a_computation_that_takes_long(make_slice, tmp_path):
    slice_ = make_slice(1)
    path = tmp_path / "go"
    slow = jit(gated(path), slice=slice_)
    fast = jit(lambda x: x + 1, slice=slice_)

    x = slow(np.float32(1.0))
    for _ in range(100):
        x = fast(x)
    with pytest.raises(DeadlineError, match=r"float32\[\]"):
        x.result(timeout_s=0.2)
    assert not x.is_ready()
    path.touch()

    assert float(x) == 101.0


def test_a_client_runs_ahead_by_a_bounded_number_of_calls(client, tmp_path):
    cluster = client._link._cluster
    bounded = Client(LocalLink(cluster, owns_cluster=False), max_unfinished_calls=4)
    slice_ = bounded.slice({"data": 1})
    path = tmp_path / "go"
    slow, fast = jit(gated(path), slice=slice_), jit(lambda x: x + 1, slice=slice_)
    x = slow(np.float32(0.0))
    progress = [x]

    def call_on():
        for _ in range(10):
            progress.append(fast(progress[-1]))

    thread = threading.Thread(target=call_on)
    thread.start()
    assert eventually(lambda: len(progress) == 4, TIMEOUT_S)
    thread.join(0.5)
    assert thread.is_alive()
    assert len(progress) == 4
    path.touch()
    thread.join(TIMEOUT_S)

    assert float(progress[-1]) == 10.0
    bounded.close()


def raising(x):
    def callback(x):
        raise ValueError("no such luck")

    return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def raising_below_zero(x):
    def callback(x):
        if x.min() < 0:
            raise ValueError("below zero")
        return np.asarray(x)

    return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def raising_in_a_loop(x):
    def body(x, _):
        return raising_below_zero(x), None

    return jax.lax.scan(body, x, None, length=2)[0]


def raising_in_a_loop_of_unknown_length(x):
    return jax.lax.while_loop(
        lambda state: state[0] < 2,
        lambda state: (state[0] + 1, raising_below_zero(state[1])),
        (0, x),
    )[1]


def raising_in_a_loop_that_zeros_would_not_end(x):
    return jax.lax.while_loop(
        lambda x: x.sum() < 0, lambda x: raising_below_zero(x) - 1, x
    )


def raising_in_the_condition_of_a_loop(x):
    return jax.lax.while_loop(
        lambda state: raising_below_zero(state).sum() < -99, lambda state: state + 1, x
    )


def raising_for_each_shard(x):
    mesh = jax.sharding.get_abstract_mesh()
    specs = {"in_specs": P("data"), "out_specs": P("data")}
    return jax.shard_map(raising_below_zero, mesh=mesh, **specs)(x)


def raising_in_a_branch(x):
    return jax.lax.cond(x.sum() < 0, raising_below_zero, jax.jit(lambda x: x + 0), x)


def raising_beside(x):
    jax.debug.print("as it is: {}", x)
    jax.debug.callback(lambda x: 1 / (x.min() >= 0).astype(int).item(), x)
    return x + 0


def returning_too_little(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: x if x.min() >= 0 else x[1:], shape, x)


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (raising_below_zero, r"_local.py:\d+ in callback.*ValueError: below zero"),
        (raising_in_a_loop, r"_local.py:\d+ in callback.*ValueError: below zero"),
        (
            raising_in_a_loop_of_unknown_length,
            r"_local.py:\d+ in callback.*ValueError: below zero",
        ),
        (
            raising_in_a_loop_that_zeros_would_not_end,
            r"_local.py:\d+ in callback.*ValueError: below zero",
        ),
        (
            raising_in_the_condition_of_a_loop,
            r"_local.py:\d+ in callback.*ValueError: below zero",
        ),
        (raising_for_each_shard, r"_local.py:\d+ in callback.*ValueError: below zero"),
        (raising_in_a_branch, r"_local.py:\d+ in callback.*ValueError: below zero"),
        (raising_beside, r"_local.py:\d+ in <lambda>.*ZeroDivisionError"),
        (returning_too_little, r"got float32\[3\]; expected float32\[4\]"),
    ],
)
def test_a_callback_that_raises_on_several_devices_costs_its_call_and_no_worker(
    make_slice, fun, message
):
    slice_ = make_slice(2)
    calls = jit(lambda x: fun(x) + x.sum(), slice=slice_, in_shardings=P("data"))
    double = jit(lambda x: x * 2, slice=slice_)
    inputs = [np.full(4, value, np.float32) for value in (1, -1, 2, 3, -2, 4)]
    found = [double(calls(x)) for x in inputs]
    for x, each in zip(inputs, found, strict=True):
        if x[0] < 0:
            with pytest.raises(ComputationError, match=message):
                each.result(timeout_s=TIMEOUT_S)
        else:
            np.testing.assert_array_equal(each.result(TIMEOUT_S), x * 10)


def test_what_a_callback_returns_that_it_was_not_to_is_said_for_one_device_too(
    make_slice,
):
    calls = jit(returning_too_little, slice=make_slice(1))
    with pytest.raises(ComputationError, match=r"Expected: \(4,\), Actual: \(3,\)"):
        calls(np.full(4, -1, np.float32)).result(timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_callbacks_take_and_return_elements_of_64_bits(make_slice, num_devices):
    def callback(x):
        return np.asarray(x) + 1e-12  # lost if either way has 32 bits

    with jax.enable_x64(True):
        calls = jit(
            lambda x: jax.pure_callback(callback, jax.typeof(x), x),
            slice=make_slice(num_devices),
        )
        found = calls(np.ones(4, np.float64)).result(timeout_s=TIMEOUT_S)
    np.testing.assert_array_equal(found, np.ones(4) + 1e-12)


def test_what_a_callback_returns_in_64_bits_is_cut_as_jax_cuts_it(make_slice):
    calls = jit(
        lambda x: jax.pure_callback(np.float64, jax.typeof(x), x),
        slice=make_slice(2),
    )
    found = calls(np.ones(4, np.float32)).result(timeout_s=TIMEOUT_S)
    np.testing.assert_array_equal(found, np.ones(4, np.float32))


def test_what_is_raised_beside_a_rule_for_derivatives_fails_its_call_too(make_slice):
    fun = jax.custom_jvp(raising_below_zero)
    fun.defjvp(lambda primals, tangents: (fun(*primals), *tangents))
    slice_ = make_slice(2)
    calls = jit(fun, slice=slice_, in_shardings=P("data"))
    for value in (1, -1, 2):
        x = np.full(4, value, np.float32)
        if value < 0:
            with pytest.raises(ComputationError, match="below zero"):
                calls(x).result(timeout_s=TIMEOUT_S)
        else:
            np.testing.assert_array_equal(calls(x).result(TIMEOUT_S), x)


def test_an_error_is_the_fate_of_what_depends_on_it_and_of_nothing_else(make_slice):
    slice_, other = make_slice(1), make_slice(2)
    fail = jit(raising, slice=slice_)
    double = jit(lambda x: x * 2, slice=slice_)
    elsewhere = jit(lambda x: x + 1, slice=other)
    add = jit(lambda x, y: x + y, slice=slice_)

    good = double(np.ones(4, np.float32))
    bad = fail(np.ones(4, np.float32))
    worse = add(double(bad), good)
    far = elsewhere(bad)
    better = double(good)

    for each in (bad, worse, far):
        with pytest.raises(
            ComputationError, match=r"'raising' failed.*no such luck"
        ) as e:
            np.asarray(each)
        assert "test_local.py" in e.value.where
    with pytest.raises(ComputationError, match="no such luck"):
        add(worse, good).block_until_ready()  # it is known by now
    np.testing.assert_array_equal(better, np.full(4, 4.0))
    np.testing.assert_array_equal(double(good), np.full(4, 4.0))


def test_a_failed_check_is_an_error_with_its_line_and_its_values(make_slice):
    slice_ = make_slice(2)

    def positive(x):
        checkify.check(jnp.all(x > 0), "too small: {least}", least=x.min())
        return x + 1

    f = jit(positive, slice=slice_)
    np.testing.assert_array_equal(f(np.ones(2, np.float32)), [2.0, 2.0])
    with pytest.raises(ComputationError, match=r"too small: -3\.0"):
        f(np.array([1.0, -3.0], np.float32)).block_until_ready()


def test_a_donated_handle_is_dead_at_once(make_slice):
    slice_ = make_slice(2)
    step = jit(lambda x: x + 1, slice=slice_, donate_argnums=0)
    first = x = slice_.client.put(np.zeros(4, np.float32), slice_.sharding(P("data")))
    for _ in range(50):
        x = step(x)

    assert first.is_deleted()
    with pytest.raises(HandleError, match="donated to '<lambda>'"):
        np.asarray(first)
    with pytest.raises(HandleError, match="donated"):
        step(first)
    np.testing.assert_array_equal(x, np.full(4, 50.0))


def test_results_that_are_donated_at_once_are_still_counted_and_right(make_slice):
    slice_ = make_slice(2)
    step = jit(lambda x, y: (x + 1, y + x), slice=slice_, donate_argnums=(0, 1))
    zeros = np.zeros(4, np.float32), np.zeros(4, np.float32)
    for _ in range(10):
        x, y = slice_.client.put(zeros, slice_.sharding(P("data")))
        for _ in range(60):
            x, y = step(x, y)
        np.testing.assert_array_equal(x, np.full(4, 60.0))
        np.testing.assert_array_equal(y, np.full(4, 1770.0))


def test_donating_what_others_still_use_copies_it(make_slice, tmp_path):
    slice_, other = make_slice(2), make_slice(1)
    path = tmp_path / "go"
    step = jit(lambda x: x + 1, slice=slice_, donate_argnums=0)
    slow = jit(gated(path), slice=slice_)
    elsewhere = jit(lambda x: x * 10, slice=other)

    x = slow(np.ones(4, np.float32))
    far = elsewhere(x)  # is sent there once it is computed
    stepped = step(x)
    path.touch()

    np.testing.assert_array_equal(far, np.full(4, 10.0))
    np.testing.assert_array_equal(stepped, np.full(4, 2.0))


def test_values_are_what_they_were_when_they_were_put(make_slice):
    slice_ = make_slice(2)
    array = np.arange(4096.0, dtype=np.float32)
    x = slice_.client.put(array, slice_.sharding(P("data")))
    y = jit(lambda x: x + 0, slice=slice_)(array)
    array[:] = -1.0

    np.testing.assert_array_equal(x, np.arange(4096.0))
    np.testing.assert_array_equal(y, np.arange(4096.0))


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4", "bool"],
)
@pytest.mark.parametrize("shape", [(), (0, 4), (4, 8)])
def test_values_of_every_kind_come_back(make_slice, dtype, shape):
    slice_ = make_slice(2)
    value = (np.arange(np.prod(shape)).reshape(shape) % 2).astype(jnp.dtype(dtype))
    spec = P("data") if shape else P()
    x = slice_.client.put(value, slice_.sharding(spec))
    y = jit(lambda x: x, slice=slice_)(x)

    for found in (np.asarray(x), np.asarray(y)):
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value)
        assert not found.flags.writeable


def test_typed_keys_come_and_go(make_slice):
    slice_ = make_slice(2)
    keys = jax.random.split(jax.random.key(3), 4)
    x = slice_.client.put(keys, slice_.sharding(P("data")))
    drawn = jit(jax.vmap(jax.random.normal), slice=slice_)(x)
    folded = jit(lambda keys: jax.random.fold_in(keys[0], 1), slice=slice_)(x)

    np.testing.assert_array_equal(drawn, jax.vmap(jax.random.normal)(keys))
    same = jax.random.fold_in(keys[0], 1)
    assert jnp.array_equal(
        jax.random.key_data(folded.result()), jax.random.key_data(same)
    )
    assert jnp.array_equal(jax.random.key_data(x.result()), jax.random.key_data(keys))


@pytest.mark.parametrize("source", ["island-0", "island-1"])
@pytest.mark.parametrize(
    ("before", "after"), [(P("data"), P(None, "data")), (P(), P("data"))]
)
def test_arguments_move_to_where_a_computation_wants_them(
    client, make_slice, source, before, after
):
    here, there = make_slice(2, island=source), make_slice(4, island="island-0")
    value = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    x = client.put(value, here.sharding(before))
    f = jit(lambda x: x * 2, slice=there, in_shardings=after, out_shardings=after)
    back = jit(lambda x: x + 1, slice=here, in_shardings=before, out_shardings=after)

    y = f(x)
    assert y.sharding.spec == after
    np.testing.assert_array_equal(y, value * 2)
    np.testing.assert_array_equal(back(y), value * 2 + 1)
    np.testing.assert_array_equal(f(back(f(x))), value * 4 + 2)


def test_a_handle_behaves_as_an_array(make_slice):
    slice_ = make_slice(1)
    put = slice_.client.put
    x, three = put((np.arange(3, dtype=np.int32), np.int32(3)), slice_.sharding())

    assert (x.shape, x.dtype, x.ndim, x.size, len(x)) == ((3,), np.int32, 1, 3, 3)
    assert (int(three), float(three), bool(three), complex(three)) == (3, 3.0, True, 3)
    assert list(range(10))[three] == 3
    assert [int(each) for each in x] == [0, 1, 2]
    assert x[1] == 1
    np.testing.assert_array_equal(jax.device_get({"a": x})["a"], [0, 1, 2])
    tree = jax.tree.map(lambda leaf: leaf.block_until_ready(), [x, three])
    assert tree == [x, three]
    assert asyncio.run(awaited(three)) == 3
    assert "int32[3]" in repr(x)
    assert (f"{three:.2f}", f"{x}") == ("3.00", repr(x))
    assert (three.item(), x.item(1), x.tolist()) == (3, 1, [0, 1, 2])
    np.testing.assert_array_equal(np.asarray(x, np.float64), [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(jnp.asarray(x) + 1, [1, 2, 3])


async def awaited(handle):
    return await handle


def test_coroutines_wait_for_values_without_threads_and_may_give_up(
    make_slice, tmp_path
):
    slice_, other = make_slice(1, island="island-0"), make_slice(1, island="island-1")
    slow = jit(gated(tmp_path / "go"), slice=slice_)
    large = slice_.client.put(np.ones(1 << 14, np.float32), other.sharding())
    double = jit(lambda x: x * 2, slice=other)

    async def main():
        late = [slow(np.float32(number)) for number in range(40)]
        waiting = [asyncio.ensure_future(awaited(each)) for each in late]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(awaited(late[0]), 0.05)
        assert (await double(large)).sum() == 2 << 14  # whatever else is waited for
        large.delete()
        with pytest.raises(HandleError, match="deleted"):
            await large
        names = [each.name for each in threading.enumerate()]
        assert not any(name.startswith("asyncio") for name in names)
        (tmp_path / "go").touch()
        return await asyncio.gather(*waiting)

    assert asyncio.run(main()) == list(range(40))


def test_a_coroutine_hears_why_its_value_will_never_be_there(client, make_slice):
    bad = jit(raising, slice=make_slice(1))(np.ones(4, np.float32))
    with pytest.raises(ComputationError, match="no such luck"):
        asyncio.run(awaited(bad))
    other = client.another()
    theirs = other.slice({"data": 1})
    theirs.suspend()
    never = jit(lambda x: x + 1, slice=theirs)(np.float32(1))

    async def main():
        waiting = asyncio.ensure_future(awaited(never))
        await asyncio.sleep(0)
        other.close()
        await waiting

    with pytest.raises(RunStoppedError, match="closed"):
        asyncio.run(main())


@pytest.mark.parametrize(("size", "num_asked"), [(1024, 0), (1025, 1)])
def test_results_of_up_to_4_kib_come_without_being_asked_for(
    client, make_slice, monkeypatch, size, num_asked
):
    f = jit(lambda x: x + 1, slice=make_slice(1))
    sent, send = [], client._link.send
    monkeypatch.setattr(client._link, "send", lambda x: (sent.append(x), send(x)))
    np.testing.assert_array_equal(f(np.ones(size, np.float32)), np.full(size, 2))
    assert sum(isinstance(each, Fetch) for each in sent) == num_asked


def test_what_a_handle_cannot_do_it_says(make_slice):
    slice_ = make_slice(1)
    x = slice_.client.put(np.arange(3.0), slice_.sharding())
    scalar = slice_.client.put(1.5, slice_.sharding())
    for convert in (float, int, bool, complex):
        with pytest.raises(TypeError, match="expected a single element"):
            convert(x)
    with pytest.raises(TypeError, match="cannot be an index"):
        [1, 2][scalar]
    with pytest.raises(TypeError, match="has no length"):
        len(scalar)
    with pytest.raises(TypeError, match="has no length"):
        iter(scalar)
    for same in (1.5, np.ones(3), jnp.ones(3)):
        with pytest.raises(TypeError, match=r"with a .*; compare its elements"):
            operator.eq(x, same)
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"float32\[3\] cannot be copied"):
            copied({"x": x})
    x.delete()
    with pytest.raises(HandleError, match="deleted"):
        np.asarray(x)


def test_what_no_island_has_is_refused_with_what_there_is(client):
    with pytest.raises(SliceError, match="island-1"):
        client.slice({"data": 5})
    with pytest.raises(SliceError, match="abacus"):
        client.slice({"data": 1}, kind="abacus")
    with pytest.raises(SliceError, match="atlantis"):
        client.slice({"data": 1}, island="atlantis")
    for axes in (2, {}, {"data": 0}, {"data": "2"}):
        with pytest.raises(ConfigError, match="impossible shape"):
            client.slice(axes)
    for demand in ({"memory_bytes": 1.5}, {"memory_bytes": -1}, {"adjacent": 3}):
        with pytest.raises(ConfigError, match=r"a slice .* got .*expected"):
            client.slice({"data": 1}, **demand)


def test_slices_have_up_to_three_axes_and_neighbours_where_they_are_demanded(client):
    slice_ = client.slice({"data": 2, "row": 1, "model": 2}, island="island-0")
    f = jit(
        lambda x: x - x.mean(), slice=slice_, in_shardings=P("data", "row", "model")
    )
    x = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    np.testing.assert_array_equal(f(x), x - x.mean())
    slice_.close()

    client.resources.withdraw(["0:1"], timeout_s=TIMEOUT_S)
    try:
        apart = client.slice({"data": 3}, island="island-0")
        assert apart.devices == ((0, 0), (0, 2), (0, 3))
        beside = client.slice({"data": 2}, island="island-0", adjacent=True)
        assert beside.devices == ((0, 2), (0, 3))
        with pytest.raises(SliceError, match=r"in time.* neighbours"):
            client.slice({"data": 3}, island="island-0", adjacent=True, timeout_s=0)
    finally:
        client.resources.restore(["0:1"])
    for axes in ({"a": 2, "b": 2}, dict.fromkeys("abcd", 1)):
        with pytest.raises(SliceError, match=r"never be given|impossible shape"):
            client.slice(axes, adjacent=True)
    for each in (apart, beside):
        each.close()


def test_clients_of_other_settings_share_a_worker(client, make_slice):
    mine = make_slice(4, island="island-0")
    x = np.float64([1, 2, 3, 4]) / 3
    key = np.uint32(7)

    def fun(x, seed):
        drawn = jax.random.normal(jax.random.key(seed), x.shape, x.dtype)
        return x / 3 + drawn, x @ x

    def settings(prng_impl, *, x64):
        stack = contextlib.ExitStack()
        stack.enter_context(jax.enable_x64(x64))
        stack.enter_context(jax.default_prng_impl(prng_impl))
        stack.enter_context(jax.default_matmul_precision("highest" if x64 else None))
        return stack

    with client.another() as other:
        theirs = other.slice({"data": 4}, island="island-0")
        assert theirs.devices == mine.devices
        wide, narrow = (("rbg", True), theirs), (("threefry2x32", False), mine)
        functions = {
            slice_.name: jit(fun, slice=slice_) for _, slice_ in (wide, narrow)
        }
        for (impl, x64), slice_ in (wide, narrow, wide):
            with settings(impl, x64=x64):
                found = functions[slice_.name](x, key)
                expected = jax.jit(fun)(x, key)
            for one, other_one in zip(found, expected, strict=True):
                assert one.dtype == (np.float64 if x64 else np.float32)
                # Four devices sum in another order.
                np.testing.assert_allclose(one, other_one, rtol=1e-14 if x64 else 1e-6)


def test_a_slice_waits_for_memory_that_another_one_reserves(client, make_slice):
    all_of_it = 3 << 30
    first = client.slice({"data": 4}, island="island-0", memory_bytes=all_of_it)
    with pytest.raises(SliceError, match="in time"):
        client.slice(
            {"data": 4}, island="island-0", memory_bytes=all_of_it, timeout_s=0.1
        )
    found = []
    thread = threading.Thread(
        target=lambda: found.append(
            make_slice(4, island="island-0", memory_bytes=all_of_it)
        )
    )
    thread.start()
    thread.join(0.2)
    assert not found
    first.close()
    thread.join(TIMEOUT_S)

    assert found[0].island == "island-0"


def test_options_that_make_no_sense_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="'islands' cannot work; got 0"):
        local(islands=0)
    with pytest.raises(ConfigError, match="'policy' cannot work; got 'lottery'"):
        local(policy="lottery")
    with pytest.raises(ConfigError, match=r"'mesh' cannot work; got .-2, -1"):
        local(devices_per_island=2, mesh=(-2, -1))
    with pytest.raises(ConfigError, match="got 3 for 2 hosts"):
        local(devices_per_island=3, hosts_per_island=2)
    with pytest.raises(
        ConfigError, match="'memory_bytes_per_device' cannot work; got 0"
    ):
        local(memory_bytes_per_device=0)
    with pytest.raises(ConfigError, match="'host_memory_bytes' cannot work; got -1"):
        local(host_memory_bytes=-1)
    with pytest.raises(ConfigError, match="'paced_s' cannot work; got 3"):
        local(paced_s=3)
    with pytest.raises(ConfigError, match=r"paced_s\['f'\].* cannot work; got -1"):
        local(paced_s={"f": -1})
    with pytest.raises(ConfigError, match="'delay_s' cannot work; got nan"):
        local(delay_s=float("nan"))
    with pytest.raises(TypeError, match=r"ml\.local has no option 'island'"):
        local(island=2)


def test_a_client_with_an_impossible_weight_is_refused(client):
    with pytest.raises(ConfigError, match="impossible weight; got 0"):
        client.another(weight=0)


def test_what_is_no_count_name_or_handle_is_refused_at_the_call(client):
    with pytest.raises(ConfigError, match="got hosts='x'"):
        client.resources.reform("island-0", hosts="x")
    with pytest.raises(HandleError, match="got 5 as its name"):
        client.publish(5, {})
    with pytest.raises(HandleError, match="cannot be cancelled; got 5"):
        client.cancel(5)


def test_put_wants_a_sharding_of_its_own_slices(client, make_slice):
    slice_ = make_slice(2)
    with pytest.raises(ConfigError, match="put needs a sharding of a slice"):
        client.put(np.ones(2), P("data"))
    with pytest.raises(ConfigError, match="multiple of 2"):
        client.put(np.ones(3), slice_.sharding(P("data")))
    with pytest.raises(ConfigError, match="axes data"):
        client.put(np.ones(3), slice_.sharding(P("model")))


def test_another_client_has_its_own_handles_and_leaves_nothing_behind(client):
    core = client._link._service._core
    other = client.another()
    slice_ = other.slice({"data": 2})
    f = jit(lambda x: x + 1, slice=slice_)
    x = f(f(np.ones(2, np.float32)))
    x.block_until_ready()
    mine = client.slice({"data": 2})
    with pytest.raises(HandleError, match="another client"):
        jit(lambda x: x, slice=mine)(x)
    mine.close()
    number = other._number
    assert core.buffers.directory.of_client(number)
    other.close()
    with pytest.raises(Exception, match="closed"):
        np.asarray(f(x))

    assert not core.buffers.directory.of_client(number)
    assert slice_.name not in core.slices


def test_dropped_handles_free_their_buffers(client, make_slice):
    core = client._link._service._core
    slice_ = make_slice(1)
    f = jit(lambda x: x + 1, slice=slice_)
    before = len(core.buffers.directory)
    x = np.float32(0)
    for _ in range(600):
        x = f(x)
    assert float(x) == 600.0
    assert isinstance(x, Handle)
    del x
    client._releases.flush()
    client.slice({"data": 1}).close()  # an answer that comes after all of that

    assert len(core.buffers.directory) <= before


def test_what_nobody_understands_ends_the_client_that_said_it_and_no_other(
    client, make_slice
):
    other = client.another()
    theirs = other.slice({"data": 1})
    other.send("nonsense")
    with pytest.raises(WireError, match=r"put out; got 'nonsense'"):
        np.asarray(jit(lambda x: x + 1, slice=theirs)(np.float32(1)))
    f = jit(lambda x: x + 1, slice=make_slice(1))
    assert float(f(np.float32(1))) == 2.0


def test_a_slice_that_was_given_back_cannot_be_used(client):
    slice_ = client.slice({"data": 1})
    slice_.close()
    x = client.put(np.ones(2, np.float32), slice_.sharding())
    with pytest.raises(SliceError, match="is not there"):
        x.result()
    with pytest.raises(SliceError, match="is not there"):
        np.asarray(jit(lambda x: x + 1, slice=slice_)(np.float32(1)))


def test_what_calls_that_run_ahead_took_may_be_deleted_at_once(make_slice):
    s = make_slice()
    add = jit(lambda x: x + 1, slice=s)
    x = s.client.put(np.zeros(2, np.float32), s.sharding(P("data")))
    kept = []
    for number in range(600):
        before, x = x, add(x)
        if not number % 3:
            before.delete()  # sent before, collected or about to be
        if not number % 50:
            kept.append((number, add(x)))
    for number, each in kept:
        np.testing.assert_array_equal(each, np.full(2, number + 2, np.float32))
    np.testing.assert_array_equal(x, np.full(2, 600, np.float32))


def test_calls_that_run_far_ahead_give_each_value_that_somebody_holds(make_slice):
    slice_ = make_slice()
    cut = slice_.sharding(P("data"))
    step = jit(lambda x: x + x.mean(), slice=slice_, out_shardings=cut)
    first = x = slice_.client.put(np.float32([0, 2]), cut)
    held = []
    for number in range(400):
        x = step(x if number % 50 else first)
        if number % 7 == 0:
            held.append((number % 50, x))
    for count, value in held:
        wanted = np.float32([0, 2])
        for _ in range(count + 1):
            wanted = wanted + wanted.mean()
        np.testing.assert_array_equal(np.asarray(value), wanted)


def test_a_cancelled_call_leaves_those_alone_that_travel_with_it(
    client, make_slice, monkeypatch
):
    monkeypatch.setattr("timelyml.ml.client.ahead.MIN_UNDER_WAY", 0)
    slice_ = make_slice(1)
    double, add = (jit(f, slice=slice_) for f in (lambda x: x * 2, lambda x: x + 1))
    x = client.put(np.ones(2, np.float32), slice_.sharding())

    def calls():
        client._inbox.pace_s = client._inbox.call_s = 1e-4
        mine, other = double(x), add(x)
        return mine, add(mine), other

    for _ in range(2):  # what comes again is one program
        jax.block_until_ready(calls())
    slice_.suspend()
    *cancelled, other = calls()
    client.cancel(cancelled[0])
    slice_.resume()
    for each in cancelled:
        with pytest.raises(RunStoppedError, match="a call was cancelled"):
            each.result(timeout_s=TIMEOUT_S)
    np.testing.assert_array_equal(other.result(TIMEOUT_S), [2.0, 2.0])


def test_a_failed_handle_goes_with_its_last_reference_although_it_was_read(make_slice):
    fail = jit(raising, slice=make_slice(1))

    def read():
        bad = fail(np.ones(4, np.float32))
        with contextlib.suppress(ComputationError):
            bad.result(timeout_s=TIMEOUT_S)
        return weakref.ref(bad)

    gc.disable()
    try:
        assert read()() is None
    finally:
        gc.enable()
