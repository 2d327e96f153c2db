"""Slices of real workers that stand elsewhere between two computations."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.ml.client.test_failures import TIMEOUT_S
from timelyml.errors import DeadlineError, PlacementError, SliceError
from timelyml.ml.client import local
from timelyml.ml.functions import jit
from timelyml.ml.programs import program
from timelyml.testing.leftovers import Leftovers

STEPS = 40


@pytest.fixture(scope="module")
def client():
    """Three islands, one of them of two processes."""
    before = Leftovers.now()
    with local(islands=3, devices_per_island=4, hosts_per_island=2) as client:
        yield client
    before.check_gone(sockets=False)


def training(slice_):
    """A step with a collective, keys and donation, and what it begins with."""
    cut, whole = slice_.sharding(P("data")), slice_.sharding()

    def step(weights, key, batch):
        key, drawn = jax.random.split(key)
        noise = jax.random.uniform(drawn, weights.shape) / 100
        grad = batch.T @ (batch @ weights - 1) / len(batch)
        return weights - 0.1 * grad + noise, key

    run = jit(
        step,
        slice=slice_,
        in_shardings=(whole, whole, cut),
        out_shardings=(whole, whole),
        donate_argnums=(0, 1),
    )
    batch = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    start = np.zeros(4, np.float32), jax.random.key(3)
    return run, slice_.client.put(start, whole), slice_.client.put(batch, cut)


def trained(slice_, at_step=lambda _: None):
    run, (weights, key), batch = training(slice_)
    for number in range(STEPS):
        at_step(number)
        weights, key = run(weights, key, batch)
    return np.asarray(weights), jax.random.key_data(key.result())


def test_training_gives_the_same_bits_however_its_slice_moves(client):
    """Within a process, to another, to another island, out and in again."""
    expected = trained(client.slice({"data": 2}, island="island-2"))
    slice_ = client.slice({"data": 2}, island="island-0")
    stood = [slice_.devices]
    changes = {
        5: slice_.migrate,
        15: lambda: slice_.migrate(island="island-1"),
        25: lambda: (slice_.suspend(), slice_.resume()),
    }

    def at_step(number):
        if number in changes:
            changes[number]()
            stood.append(slice_.devices)

    found = trained(slice_, at_step)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [host for host, _ in stood[0]] == [0, 0]
    assert [host for host, _ in stood[1]] == [1, 1]
    assert [host for host, _ in stood[2]] in ([2, 2], [3, 3])
    assert slice_.island == "island-1"


def test_a_slice_moves_after_another_on_its_devices_took_its_last_results(client):
    """The call whose result was donated before it was computed comes to its end."""
    mine, other = [client.slice({"x": 4}, island="island-2") for _ in range(2)]
    assert mine.devices == other.devices
    slow = jit(
        lambda x: jax.lax.fori_loop(0, 100, lambda _, y: jnp.sin(y @ y), x), slice=mine
    )
    take = jit(lambda x: x + 1, slice=other, donate_argnums=0)
    x = client.put(np.zeros((200, 200), np.float32), mine.sharding())
    for _ in range(2):  # the second time, nothing is left to be compiled
        assert float(take(slow(x)).result()[0, 0]) == 1.0
    mine.migrate(island="island-1", timeout_s=TIMEOUT_S)
    assert mine.island == "island-1"


def test_values_of_a_gang_over_processes_go_where_it_goes(client):
    slice_ = client.slice({"data": 2, "model": 2}, island="island-0")
    names = "data", "model"
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    specs = [P(*names), P(None, names), P("model"), P()]
    values = [client.put(x + n, slice_.sharding(s)) for n, s in enumerate(specs)]
    total = jit(lambda *values: sum(v.sum() for v in values), slice=slice_)
    before = float(total(*values))
    slice_.migrate(island="island-1")

    assert {host for host, _ in slice_.devices} == {2, 3}
    assert float(total(*values)) == before
    for number, each in enumerate(values):
        np.testing.assert_array_equal(each, x + number)
        assert each.sharding.spec == specs[number]


def test_programs_go_on_over_slices_that_move_under_them(client):
    here = client.slice({"data": 2}, island="island-0")
    there = client.slice({"data": 2}, island="island-1")
    add = jit(lambda x: x + 1, slice=here, in_shardings=P("data"))
    double = jit(lambda x: x * 2, slice=there, in_shardings=P("data"))

    @program
    def f(x):
        return add(double(add(x)))

    x, expected = np.arange(4, dtype=np.float32), np.arange(4, dtype=np.float32)
    stop = threading.Event()
    mover = threading.Thread(target=move_about, args=((here, there), stop))
    mover.start()
    try:
        for _ in range(60):
            x, expected = f(x), (expected + 1) * 2 + 1
            expected = expected % 1000
            x = jit(lambda x: x % 1000, slice=here)(x)
    finally:
        stop.set()
        mover.join(TIMEOUT_S)
    np.testing.assert_array_equal(x, expected)
    assert not mover.is_alive()


def move_about(slices, stop):
    """Move slices from island to island until it is enough, once at the least."""
    while True:
        for each in slices:
            other = {"island-0": "island-2", "island-1": "island-0"}
            each.migrate(island=other.get(each.island, "island-1"))
        if stop.is_set():
            return


def test_a_suspended_slice_waits_and_its_values_stay(client):
    slice_ = client.slice({"data": 2})
    f = jit(jnp.cumsum, slice=slice_)
    x = f(np.ones(4, np.float32))
    slice_.suspend(timeout_s=TIMEOUT_S)
    assert not any(slice_.name in each.slices for each in client.resources.devices())
    (info,) = [each for each in client.objects() if each.label.startswith("output")]
    assert (info.device_bytes, info.host_bytes > 0) == (0, True)
    np.testing.assert_array_equal(x, [1, 2, 3, 4])
    later, put = f(x), client.put(np.float32(5), slice_.sharding())
    with pytest.raises(DeadlineError, match="did not come in time"):
        later.result(timeout_s=0.1)

    slice_.resume(timeout_s=TIMEOUT_S)
    np.testing.assert_array_equal(later, [1, 3, 6, 10])
    assert float(put) == 5


def test_devices_are_withdrawn_and_given_back_while_a_program_runs(client):
    slice_ = client.slice({"data": 2}, island="island-2")
    resources = client.resources
    f = jit(lambda x: x + x.sum(), slice=slice_, donate_argnums=0)
    x = client.put(np.ones(2, np.float32) / 8, slice_.sharding(P("data")))
    for _ in range(3):
        stood = [f"{host}:{index}" for host, index in slice_.devices]
        x = f(f(x))
        resources.withdraw(stood, timeout_s=TIMEOUT_S)
        found = {each.name: each for each in resources.devices()}
        assert not any(found[name].slices or found[name].is_usable for name in stood)
        x = f(x)
        resources.restore(stood)
        assert all(each.is_usable for each in resources.devices())
    np.testing.assert_array_equal(x, np.full(2, 3.0**9 / 8, np.float32))
    with pytest.raises(PlacementError, match=r"devices are unknown; got \['x'\]"):
        resources.withdraw(["x"])


def test_what_cannot_move_says_what_there_is(client):
    slice_ = client.slice({"data": 4}, island="island-0")
    with pytest.raises(SliceError, match=r"no other 4 devices as \{'data': 4\}"):
        slice_.migrate()
    slice_.close()
    with pytest.raises(SliceError, match="is not there"):
        slice_.suspend()


def endless(x):
    """Never comes to an end."""
    return jax.lax.while_loop(lambda v: v[0] >= 0, lambda v: v + 1 - 1, x)


def test_a_computation_past_its_deadline_is_ended_and_others_keep_their_values():
    with local(devices_per_island=2) as client, client.another() as other:
        mine, theirs = client.slice({"x": 2}), other.slice({"x": 2})
        kept = other.put(np.arange(2.0, dtype=np.float32), theirs.sharding(P("x")))
        add = jit(lambda x: x + 1, slice=theirs)
        made = add(kept)
        np.testing.assert_array_equal(made, [1.0, 2.0])
        x = np.ones(2, np.float32)
        quick = jit(lambda x: x * 2, slice=mine, deadline_s=30.0)(x)
        late = jit(endless, slice=mine, deadline_s=0.3)(x)
        with pytest.raises(
            DeadlineError, match=r"'endless' of client 1 ran for longer"
        ):
            late.result(TIMEOUT_S)

        np.testing.assert_array_equal(add(kept).result(TIMEOUT_S), [1.0, 2.0])
        np.testing.assert_array_equal(add(made).result(TIMEOUT_S), [2.0, 3.0])
        assert {host for host, _ in theirs.devices} == {1}
        np.testing.assert_array_equal(quick, [2.0, 2.0])
        again = jit(lambda x: x * 3, slice=mine)(x)
        np.testing.assert_array_equal(again.result(TIMEOUT_S), [3.0, 3.0])


def test_an_island_forms_anew_with_more_and_fewer_processes_while_it_is_used():
    with local(devices_per_island=4, hosts_per_island=2, mesh=(2, 2)) as client:
        square = client.slice({"a": 2, "b": 2}, adjacent=True)
        assert square.devices == ((0, 0), (0, 1), (1, 0), (1, 1))
        z = jit(lambda x: x + 1, slice=square, in_shardings=P("a", "b"))(np.eye(2))
        np.testing.assert_array_equal(z, np.eye(2) + 1)
        del z  # six devices are no mesh that a square fits into
        square.close()
        narrow, wide = client.slice({"x": 2}), client.slice({"x": 4})
        f, g = (jit(lambda x: x - x.mean(), slice=each) for each in (narrow, wide))
        x, expected = f(np.arange(2.0, dtype=np.float32)), [-0.5, 0.5]
        y = g(client.put(np.arange(4.0, dtype=np.float32), wide.sharding(P("x"))))
        client.resources.reform("island-0", hosts=3, timeout_s=TIMEOUT_S)
        places = [each.coordinates for each in client.resources.devices()]
        assert places == [(number,) for number in range(6)]  # no square any more
        np.testing.assert_array_equal(f(x).result(TIMEOUT_S), expected)
        np.testing.assert_array_equal(g(y).result(TIMEOUT_S), np.arange(4) - 1.5)
        six = client.slice({"x": 6})
        assert float(jit(jnp.sum, slice=six)(np.ones(6, np.float32))) == 6.0

        for slice_ in (six, wide):
            slice_.close()
        del y
        client.resources.reform("island-0", hosts=1, timeout_s=TIMEOUT_S)
        np.testing.assert_array_equal(f(x).result(TIMEOUT_S), expected)
        devices = client.resources.devices()
        assert [each.slices for each in devices] == [(narrow.name,)] * 2
