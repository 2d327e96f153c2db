"""Memory of devices on real workers: calls wait, idle values leave and come back."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.ml.client.loops import sine_loop
from tests.ml.client.test_failures import SOON_S, TIMEOUT_S
from tests.ml.client.test_serving import core_of
from timelyml import ml
from timelyml.ml.store import CLIENT_BITS
from timelyml.testing.leftovers import Leftovers, eventually

MIB = 1 << 20
DEVICE_BYTES = 8 * MIB
HOST_BYTES = 64 * MIB


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    before = Leftovers.now()
    path = tmp_path_factory.mktemp("server") / "address"
    with ml.serve(
        path,
        devices_per_island=2,
        memory_bytes_per_device=DEVICE_BYTES,
        host_memory_bytes=HOST_BYTES,
    ) as server:
        yield server
    before.check_gone(sockets=False)


@pytest.fixture
def client(server):
    with ml.connect(server.path) as client:
        yield client
    ledger = ledger_of(server)
    assert eventually(lambda: set(ledger.used_bytes().values()) == {0}, SOON_S)
    assert set(ledger.host_bytes().values()) == {0}


def ledger_of(server):
    return core_of(server).buffers.memory.ledger


def places(client, handles):
    """Of each value, whether it takes memory on devices and on hosts."""
    seen = {each.name: each for each in client.objects()}
    numbers = [divmod(handle.buffer, 1 << CLIENT_BITS) for handle in handles]
    values = [seen[f"{owner}/{count}"] for owner, count in numbers]
    return [(each.device_bytes > 0, each.host_bytes > 0) for each in values]


def live_bytes_on_worker(client):
    """What arrays of JAX take in the worker's process, by its own account."""

    def count(x):
        # A shard is an array too once anybody has asked for it.
        shards = [s.data for a in jax.live_arrays() for s in a.addressable_shards]
        sizes = {s.unsafe_buffer_pointer(): s.nbytes for s in shards}
        return np.int32(sum(sizes.values()))

    def f(x):
        return jax.pure_callback(count, jax.ShapeDtypeStruct((), np.int32), x)

    slice_ = client.slice({"x": 1})
    found = int(ml.jit(f, slice=slice_)(np.float32(0)))
    slice_.close()
    return found


def random_bits(num_bytes, seed):
    """Floats of any bits, those that are no numbers among them."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, num_bytes // 4, np.uint32)
    return bits.view(np.float32)


def test_idle_values_leave_the_devices_and_come_back_bit_for_bit(client):
    s = client.slice({"x": 2})
    values = [random_bits(6 * MIB, seed) for seed in range(4)]
    handles = [client.put(value, s.sharding(P("x"))) for value in values]
    negative = ml.jit(lambda x: -x, slice=s, in_shardings=P("x"))

    # 3 MiB of each on a device: two of four fit.
    handles[3].block_until_ready()
    assert eventually(
        lambda: places(client, handles) == [(False, True)] * 2 + [(True, False)] * 2,
        SOON_S,
    )
    assert live_bytes_on_worker(client) < 3 * 6 * MIB
    for value, handle in zip(values, handles, strict=True):
        result = negative(handle)
        assert handle.sharding.spec == P("x")
        np.testing.assert_array_equal(
            np.asarray(result).view(np.uint32), (-value).view(np.uint32)
        )
        del result
    for value, handle in zip(values, handles, strict=True):
        np.testing.assert_array_equal(
            np.asarray(handle).view(np.uint32), value.view(np.uint32)
        )


def test_keys_and_replicas_come_back_too(client):
    s = client.slice({"x": 2})
    keys = client.put(jax.random.split(jax.random.key(1), 8), s.sharding(P("x")))
    small = client.put(jnp.arange(6, dtype=jnp.bfloat16), s.sharding(P()))
    big = [client.put(np.zeros(MIB, np.float32), s.sharding(P())) for _ in range(2)]
    assert eventually(
        lambda: places(client, [keys, small]) == [(False, True)] * 2, SOON_S
    )
    del big
    drawn = ml.jit(jax.vmap(jax.random.normal), slice=s)(keys)
    doubled = ml.jit(lambda x: x * 2, slice=s)(small)

    np.testing.assert_array_equal(
        drawn, jax.vmap(jax.random.normal)(jax.random.split(jax.random.key(1), 8))
    )
    np.testing.assert_array_equal(doubled, np.arange(0, 12, 2))
    assert places(client, [keys, small]) == [(True, False)] * 2


def test_waiting_for_what_was_put_ends_when_it_is_on_its_devices_or_never_will(client):
    s = client.slice({"x": 2})
    put = client.put(np.ones(MIB, np.float32), s.sharding(P("x")))
    assert put.block_until_ready().is_ready()
    ((on_device, _),) = places(client, [put])
    assert on_device
    large = client.put(np.ones(3 * DEVICE_BYTES, np.int8), s.sharding(P("x")))
    with pytest.raises(ml.MemoryLimitError, match="that is put"):
        large.block_until_ready()


def test_what_can_never_fit_fails_at_once_and_says_what_it_takes(client):
    s = client.slice({"x": 2})
    x = client.put(np.ones(MIB, np.float32), s.sharding(P("x")))
    repeat = ml.jit(lambda x: jnp.tile(x, 8) + 1, slice=s, out_shardings=P("x"))
    with pytest.raises(
        ml.MemoryLimitError, match=r"'<lambda>' of client \d+ can never fit"
    ) as error:
        repeat(x).result(TIMEOUT_S)
    assert "float32[1048576], 2,097,152 bytes, kept by client" in str(error.value)
    assert error.value.limit_bytes == DEVICE_BYTES
    with pytest.raises(ml.MemoryLimitError, match=r"the value \d+/\d+ that is put"):
        client.put(np.ones(5 * MIB, np.float32), s.sharding(P("x"))).result(TIMEOUT_S)
    np.testing.assert_array_equal(np.asarray(x)[:2], [1, 1])


def test_clients_that_want_more_together_than_there_is_wait_for_each_other(server):
    wrong = []

    def work(number):
        with ml.connect(server.path) as client:
            s = client.slice({"x": 2})
            grow = ml.jit(
                lambda x: (x + 1, x.sum()), slice=s, out_shardings=(P("x"), P())
            )
            x = client.put(np.full(MIB, number, np.float32), s.sharding(P("x")))
            kept = x
            for step in range(10):
                x, total = grow(x)
                if float(total) != (number + step) * MIB:
                    wrong.append((number, step))
            if np.asarray(kept)[-1] != number or np.asarray(x)[0] != number + 10:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_beyond_the_memory_of_the_host_a_call_fails_and_names_who_holds_it(
    server, client
):
    s = client.slice({"x": 2})
    with ml.connect(server.path) as other:
        theirs = other.slice({"x": 2})
        held = other.put(np.ones(MIB, np.float32), theirs.sharding(P("x")))
        held.block_until_ready()
        kept = []

        def fill():
            for _ in range(20):
                kept.append(client.put(np.ones(MIB, np.float32), s.sharding(P("x"))))
                np.asarray(kept[-1][:1])

        with pytest.raises(ml.MemoryLimitError, match="no room for them in host") as e:
            fill()
        assert f"kept by client {other._number}" in str(e.value.holders)
        assert f"2,097,152 bytes, kept by client {client._number}" in str(e.value)
        del kept[1:]
        again = client.put(np.full(MIB, 2, np.float32), s.sharding(P("x")))
        np.testing.assert_array_equal(np.asarray(again)[:2], [2, 2])
        np.testing.assert_array_equal(np.asarray(kept[0])[:2], [1, 1])
        np.testing.assert_array_equal(np.asarray(held)[:2], [1, 1])


def test_what_a_donated_argument_gives_is_not_counted_twice(client):
    s = client.slice({"x": 2})
    step = ml.jit(lambda x: x * 2, slice=s, donate_argnums=0, out_shardings=P("x"))
    x = client.put(np.ones(2 * MIB + MIB // 2, np.float32), s.sharding(P("x")))
    for _ in range(5):  # 5 of 8 MiB: neither twice nor beside the one before
        x = step(x)
    np.testing.assert_array_equal(np.asarray(x)[-2:], [32, 32])
    assert places(client, [x]) == [(True, False)]


def looped(client, *, max_steps):
    """The gradient of a loop that keeps what is carried, and a cosine of it."""
    s = client.slice({"x": 2})
    f = sine_loop(s, s, max_steps=max_steps, in_shardings=(P(), P(), P("x")))
    return s, ml.grad(f, (0, 1))


def test_what_a_loop_keeps_for_its_way_back_counts_as_memory_and_spills(client, server):
    s, gradient = looped(client, max_steps=9)
    x = np.linspace(0, 1, MIB // 2, dtype=np.float32)
    w = np.float32(1.1)
    ledger = ledger_of(server)

    by_w, by_x = gradient(w, client.put(x, s.sharding(P("x"))), 7)

    # 2 MiB of each of 7 runs, x and a cosine, do not fit on devices of 8 MiB.
    assert eventually(lambda: max(ledger.host_bytes().values()) > 0, TIMEOUT_S)
    by_x = np.asarray(by_x)

    def plain(w, x):
        for _ in range(7):
            x = jnp.sin(w * x)
        return x.sum()

    expected = jax.grad(plain, (0, 1))(w, x)
    np.testing.assert_allclose(by_x, expected[1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(by_w, expected[0], rtol=1e-4)


def test_what_a_loop_keeps_goes_with_the_client_and_with_a_cancelled_call(
    client, server
):
    s, gradient = looped(client, max_steps=1000)
    x = client.put(np.ones(MIB // 64, np.float32), s.sharding(P("x")))
    ledger = ledger_of(server)
    held = max(ledger.used_bytes().values())

    def grown():
        return max(ledger.used_bytes().values()) > held + MIB // 2

    cancelled = gradient(np.float32(1), x, 1000)
    assert eventually(grown, TIMEOUT_S)
    client.cancel(cancelled[1])
    assert eventually(lambda: max(ledger.used_bytes().values()) <= held + MIB, SOON_S)
    left = gradient(np.float32(1), x, 1000)
    assert eventually(grown, TIMEOUT_S)  # the fixture sees all of it go
    del left
