"""What hosts are told beside launches: it outlives them, and leaves nothing behind."""

from __future__ import annotations

import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from timelyml.errors import BufferLostError, PeerError
from timelyml.ml.client import local
from timelyml.ml.functions import jit
from timelyml.ml.programs import program
from timelyml.testing.leftovers import Leftovers, eventually

TIMEOUT_S = 60.0
SILENCE_S = 60.0  # in which a worker that is gone would be noticed at the latest


def flows_of(client):
    """Return the workers of the flows that the controller of a client runs."""
    controller = client._link._cluster._session.controller
    runs = controller.service_runs.open()
    assert all(plan.graph.name == "upkeep" for plan, _ in runs)
    return sorted(plan.members for plan, _ in runs)


def num_open_epochs(client):
    return client._link._service._core.num_open_epochs


def test_hosts_say_what_they_have_and_have_nothing_of_clients_that_are_gone():
    with local(islands=2) as client:
        own = client.slice({"x": 1}, island="island-0")
        kept = client.put(np.ones(3, np.float32), own.sharding())
        with client.another() as other:
            for island in ("island-0", "island-1"):
                s = other.slice({"x": 1}, island=island)
                double = jit(lambda x: x * 2, slice=s)
                twice = program(lambda x, f=double: f(f(x)))
                held = double(np.ones(3, np.float32)), twice(np.ones(3, np.float32))
                np.testing.assert_array_equal(held[1], np.full(3, 4, np.float32))
            before = client.resources.hosts()
        after = client.resources.hosts()

        assert [(each.host, each.island) for each in before] == [
            (0, "island-0"), (1, "island-1")
        ]  # fmt: skip
        assert [each.num_slices for each in before] == [2, 1]
        assert all(each.num_functions and each.num_programs for each in before)
        assert before[1].num_buffers >= 2  # and what others of its calls left
        counts = [
            (
                x.num_slices,
                x.num_functions,
                x.num_programs,
                x.num_buffers,
                x.num_launches,
            )
            for x in after
        ]
        assert counts == [(1, 0, 0, 1, 0), (0, 0, 0, 0, 0)]
        assert all(x.epoch < y.epoch for x, y in zip(before, after, strict=True))
        np.testing.assert_array_equal(kept, np.ones(3))


def test_the_death_of_a_host_with_orders_under_way_ends_its_flow_and_no_other():
    before = Leftovers.now()
    with local(islands=2, heartbeat_timeout_s=SILENCE_S) as client:
        here = client.slice({"x": 1}, island="island-0")
        there = client.slice({"x": 1}, island="island-1")
        pids = {each.host: each.process_id for each in client.resources.hosts()}
        assert flows_of(client) == [(0,), (1,)]
        functions = [
            jit(lambda x, n=n: jnp.linalg.qr(x * n)[1], slice=here) for n in range(12)
        ]
        x = np.eye(4, dtype=np.float32)
        results = [each(x) for each in functions]  # all are to be compiled first

        os.kill(pids[0], signal.SIGKILL)
        for result in results:
            try:
                assert np.asarray(result).shape == (4, 4)
            except (BufferLostError, PeerError) as error:
                assert "SIGKILL" in str(error)  # noqa: PT017 - or it is computed anew

        assert float(jit(jnp.sum, slice=there)(x)) == 4.0
        again = jit(lambda x: x + 1, slice=here)(x)
        np.testing.assert_array_equal(again.result(TIMEOUT_S), x + 1)
        assert [each.host for each in client.resources.hosts()] == [1, 2]
        assert flows_of(client) == [(1,), (2,)]
        assert eventually(lambda: num_open_epochs(client) == 0, TIMEOUT_S)
        del again, results
    before.check_gone(sockets=False)


def test_a_host_that_cannot_obey_an_order_is_replaced_and_the_error_says_why():
    with local(heartbeat_timeout_s=SILENCE_S) as client:
        s = client.slice({"x": 1})
        x = client.put(np.ones(3, np.float32), s.sharding())
        service = client._link._service
        service._post(lambda: service._core._outbox.order(0, "nonsense"))
        with pytest.raises(BufferLostError, match="got what is no order"):
            x.result(TIMEOUT_S)

        again = jit(lambda x: x + 1, slice=s)(np.ones(3, np.float32))
        np.testing.assert_array_equal(again.result(TIMEOUT_S), np.full(3, 2.0))
        assert [each.host for each in client.resources.hosts()] == [1]
