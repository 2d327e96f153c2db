"""Islands of several processes: gangs span them, in one order for all clients."""

from __future__ import annotations

import os
import re
import signal
import threading

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from examples.gang_scheduling.ordered import tenant
from tests.ml.client import plain
from tests.ml.client.test_failures import TIMEOUT_S, process_of
from timelyml.errors import BufferLostError, ComputationError, TimelyError
from timelyml.ml.client import local
from timelyml.ml.functions import jit
from timelyml.ml.programs import program
from timelyml.testing.leftovers import Leftovers

ROUNDS = 250
PROGRAM_ROUNDS = 250  # of two programs each
PROMPT_S = 30.0
"""XLA ends a process whose peers wait in vain only after longer than that."""


@pytest.fixture(scope="module")
def client():
    before = Leftovers.now()
    with local(devices_per_island=4, hosts_per_island=2) as client:
        yield client
    before.check_gone(sockets=False)


def test_two_clients_in_opposite_orders_get_their_own_numbers(client):
    other = client.another()
    wrong: list[str] = []
    threads = [
        threading.Thread(
            target=tenant,
            args=(each, ROUNDS),
            kwargs={"tens_first": each is other, "wrong": wrong, "size": 4},
        )
        for each in (client, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    other.close()
    assert wrong == []


def test_programs_of_two_clients_in_opposite_orders_get_their_own_numbers(client):
    other = client.another()
    wrong: list[str] = []
    threads = [
        threading.Thread(target=sums, args=(each, PROGRAM_ROUNDS, each is other, wrong))
        for each in (client, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    other.close()
    assert wrong == []


def sums(client, rounds, tens_first, wrong):
    """Call two programs in one order or the other; note every wrong number."""
    slice_ = client.slice({"x": 4})
    ones, tens = (
        client.put(np.full(4, each, np.float32), slice_.sharding(P("x")))
        for each in (1.0, 10.0)
    )
    total = jit(lambda x: x.sum(), slice=slice_)
    half = jit(lambda x: x / 2 + 0, slice=slice_)
    first = program(lambda x: half(total(x)))
    second = program(lambda x: total(half(x)))
    calls = [(first, ones, 2.0), (second, tens, 20.0)]
    found = []
    for _ in range(rounds):
        for function, value, expected in reversed(calls) if tens_first else calls:
            found.append((function(value), expected))
    wrong += [
        f"call {number} gave {float(result)}, not {expected}"
        for number, (result, expected) in enumerate(found)
        if float(result) != expected
    ]


def test_training_over_two_processes_gives_what_one_device_gives(client):
    slice_ = client.slice({"data": 4})
    whole, cut = slice_.sharding(P()), slice_.sharding(P("data"))
    run = jit(
        plain.step,
        slice=slice_,
        in_shardings=(whole, cut),
        out_shardings=whole,
        donate_argnums=0,
    )
    weights, batch = plain.inputs()
    expected = plain.inputs()[0]
    step = jax.jit(plain.step)
    losses, wanted = [], []
    weights, cut_batch = client.put(weights, whole), client.put(batch, cut)
    for _ in range(10):
        weights, loss = run(weights, cut_batch)
        expected, expected_loss = step(expected, batch)
        losses.append(loss)
        wanted.append(expected_loss)

    # Sums over four devices are added in another order.
    np.testing.assert_allclose(np.stack(losses), np.stack(wanted), rtol=1e-5)
    for name, value in jax.device_get(weights).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6)


def test_values_move_between_slices_of_different_processes(client):
    all_four, two = client.slice({"data": 4}), client.slice({"data": 2})
    x = client.put(np.arange(16.0, dtype=np.float32), all_four.sharding(P("data")))
    keys = client.put(
        jax.random.split(jax.random.key(5), 4), all_four.sharding(P("data"))
    )
    there = jit(lambda x: x * 2, slice=two, in_shardings=P("data"))
    back = jit(lambda x: x + 1, slice=all_four, in_shardings=P(), donate_argnums=0)
    drawn = jit(jax.vmap(jax.random.normal), slice=all_four)(keys)

    np.testing.assert_array_equal(back(there(x)), np.arange(16.0) * 2 + 1)
    np.testing.assert_array_equal(drawn, jax.vmap(jax.random.normal)(keys.result()))
    np.testing.assert_array_equal(x, np.arange(16.0))


def test_a_donated_value_that_is_still_sent_elsewhere_is_copied_on_every_process(
    client,
):
    all_four, two = client.slice({"data": 4}), client.slice({"data": 2})
    step = jit(lambda x: x + 1, slice=all_four, donate_argnums=0)
    send = jit(lambda x: x * 10, slice=two)
    x = client.put(np.zeros(8, np.float32), all_four.sharding(P("data")))
    sent = []
    for _ in range(20):
        sent.append(send(x))
        x = step(x)
    for number, each in enumerate(sent):
        np.testing.assert_array_equal(each, np.full(8, 10.0 * number))
    np.testing.assert_array_equal(x, np.full(8, 20.0))


def root_of(x):
    def callback(x):
        if x.min() < 0:
            raise ValueError("below zero")
        return np.sqrt(x)

    return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def root_of_each_shard(x):
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(root_of, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


@pytest.mark.parametrize("fun", [root_of, root_of_each_shard])
def test_a_callback_that_raises_in_one_process_costs_its_call_and_no_island(
    client, fun
):
    slice_ = client.slice({"data": 4})
    calls = jit(lambda x: fun(x) + x.sum(), slice=slice_, in_shardings=P("data"))
    double = jit(lambda x: x * 2, slice=slice_, out_shardings=P("data"))
    workers = {process_of(client, worker) for worker in range(2)}
    for below in (0, 3, None):  # in the first process, in the second, in neither
        x = np.ones(4, np.float32)
        if below is None:
            np.testing.assert_array_equal(double(calls(x)), np.full(4, 10.0))
            continue
        x[below] = -1
        for each in (found := calls(x), double(found)):
            with pytest.raises(
                ComputationError, match=r"_islands.py:\d+ in callback.*below zero"
            ):
                each.result(timeout_s=PROMPT_S)
    assert {process_of(client, worker) for worker in range(2)} == workers


def test_calls_beside_one_whose_callback_raises_are_right_on_several_processes(client):
    slice_ = client.slice({"data": 4})
    calls = jit(lambda x: root_of(x) + x.sum(), slice=slice_, in_shardings=P("data"))
    inputs = [np.full(4, value, np.float32) for value in (1, -1, 4, 9, -2, 16)]
    for x, each in zip(inputs, [calls(x) for x in inputs], strict=True):
        if x[0] < 0:
            with pytest.raises(ComputationError, match="below zero"):
                each.result(timeout_s=PROMPT_S)
        else:
            np.testing.assert_array_equal(each.result(PROMPT_S), np.sqrt(x) + x.sum())


def test_when_one_process_dies_its_island_is_lost_and_nobody_waits_in_vain():
    with local(islands=2, devices_per_island=2, hosts_per_island=2) as client:
        here = client.slice({"data": 2}, island="island-0")
        there = client.slice({"data": 2}, island="island-1")
        f, g = (jit(lambda x: x - x.mean(), slice=each) for each in (here, there))
        x, y = np.arange(2, dtype=np.float32), np.arange(4, dtype=np.float32)
        x, y = f(x), g(y)
        np.testing.assert_array_equal(x, [-0.5, 0.5])
        cut = client.put(np.arange(2), here.sharding(P("data")))
        whole = client.put(np.arange(2), here.sharding())
        for each in (cut, whole):  # what is still under way goes to the new processes
            jit(lambda x: x + 1, slice=here)(each).block_until_ready()
        os.kill(process_of(client, 1), signal.SIGKILL)
        lost = [f(x) for _ in range(20)]
        kept = g(y)

        with pytest.raises(BufferLostError, match=r"worker 1 .*killed by SIGKILL"):
            jit(lambda x: x, slice=here)(cut).result(TIMEOUT_S)
        for each in lost:  # what had not begun runs where the island formed anew
            try:
                np.testing.assert_array_equal(each.result(TIMEOUT_S), [-0.5, 0.5])
            except TimelyError as error:
                assert re.search("island-0|worker 1|Gloo", str(error))  # noqa: PT017
        np.testing.assert_array_equal(kept, np.arange(4) - 1.5)
        # What one process has whole is there, and the island forms anew.
        np.testing.assert_array_equal(whole.result(TIMEOUT_S), [0, 1])
        again = f(np.arange(2, dtype=np.float32))
        np.testing.assert_array_equal(again.result(TIMEOUT_S), [-0.5, 0.5])
        assert {host for host, _ in here.devices} == {4, 5}
