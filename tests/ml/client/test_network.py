"""Clients over tcp: who has the key is let in, as far as there is room; others learn why."""

from __future__ import annotations

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

from timelyml import ml
from timelyml.cli import app
from timelyml.errors import AdmissionError, ConfigError, PeerError, WireError
from timelyml.exchange import CONTROLLER, AccessKey, Lane, ServerKeys
from timelyml.ml.client.remote import RemoteLink
from timelyml.ml.controller import Call
from timelyml.ml.controller.clients import ClientOptions
from timelyml.ml.controller.gate import GateAddress
from timelyml.testing.leftovers import Leftovers, eventually

ARRAY = np.arange(20_000, dtype=np.float32)  # larger than what rides along
NUM_CLIENTS = 24
SECONDS_S = 8  # within which whoever has no key hears so


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    before = Leftovers.now()
    path = tmp_path_factory.mktemp("server") / "address"
    options = {
        "max_clients": NUM_CLIENTS,
        "max_calls_per_client": 64,
        "max_bytes_per_client": 10 * ARRAY.nbytes,
        "policy": "priority",
    }
    listen = "tcp://127.0.0.1:*"
    with ml.serve(path, listen=listen, devices_per_island=2, **options) as server:
        yield server
    before.check_gone(sockets=False)


@pytest.fixture
def client(server):
    with ml.connect(server.address, key=server.key_path) as client:
        yield client


def test_a_client_computes_over_an_encrypted_connection(client):
    s = client.slice({"x": 2})
    step = ml.jit(lambda x: (x + 1, x.sum()), slice=s)
    x, total = step(client.put(ARRAY, s.sharding(P("x"))))
    np.testing.assert_array_equal(x, ARRAY + 1)
    assert float(total) == pytest.approx(ARRAY.sum(), rel=1e-6)


def test_the_key_may_be_passed_as_text_and_only_its_user_can_read_the_file(server):
    assert server.key_path.stat().st_mode & 0o777 == 0o600
    with (
        ml.connect(server.address, key=server.key_path.read_text()) as one,
        one.another() as two,
    ):
        assert [each.client for each in two.usage()][-2:] == [one._number, two._number]


def test_a_wrong_key_is_refused_within_seconds(server):
    other = ServerKeys.generate().access.to_text()
    began = time.monotonic()
    with pytest.raises(PeerError, match=r"lets nobody in with this key; got the hand"):
        ml.connect(server.address, key=other)
    assert time.monotonic() - began < SECONDS_S


def test_no_key_or_one_too_many_is_refused_at_once(server):
    with pytest.raises(ConfigError, match="lets nobody in without its key"):
        ml.connect(server.address)
    with pytest.raises(ConfigError, match="has its key in it"):
        ml.connect(server.path, key=server.key_path)
    with pytest.raises(ConfigError, match="a key cannot be read"):
        ml.connect(server.address, key="/no/such/file")


def test_the_public_key_without_the_token_is_not_enough(server):
    right = AccessKey.of(server.key_path)
    forged = AccessKey(right.public, ServerKeys.generate().token)
    address = GateAddress.remote(server.address, forged)
    link = RemoteLink("here", address, ClientOptions(), heartbeat_timeout_s=0.5)
    with pytest.raises(PeerError, match=r"nobody answers at 'here'; got .* in 0\.5 s"):
        link.connect(lambda _: None)
    assert server._gates[1]._transport.metrics.frames_refused["token"]


def test_many_clients_at_once_are_isolated_and_one_more_is_turned_away(server):
    clients = [ml.connect(server.path) for _ in range(NUM_CLIENTS // 2)]
    clients += [
        ml.connect(server.address, key=server.key_path) for _ in range(NUM_CLIENTS // 2)
    ]
    with pytest.raises(AdmissionError, match=r"not let in; got 24 .* fewer than 24"):
        ml.connect(server.path)

    slices = [each.slice({"x": 2}) for each in clients]
    results = []
    for number, (client, s) in enumerate(zip(clients, slices, strict=True)):
        step = ml.jit(lambda x: x + x.sum(), slice=s)
        x = client.put(np.full(2, number, np.float32), s.sharding(P("x")))
        for _ in range(3):
            x = step(x)
        results.append(x)
        if number == 3:
            client._link._transport._links[CONTROLLER].sequences[Lane.CONTROL] += 2
            client._link.send("after a gap")
        if number == 5:
            client._link.send("what no client says")
        if number == 7:
            client._link.send(Call("no such thing", s.name, (), (1,)))
    for number, x in enumerate(results):
        if number == 3:
            with pytest.raises(PeerError, match=r"the server .* is gone"):
                clients[number].slice({"x": 1})
        elif number in (5, 7):
            with pytest.raises(WireError, match="and is put out"):
                clients[number].slice({"x": 1})
        else:
            np.testing.assert_array_equal(x, np.full(2, number * 27.0))
    for each in clients:
        each.close()
    assert eventually(lambda: server.num_clients == 0, SECONDS_S)
    with ml.connect(server.path) as last:
        assert [each.client for each in last.usage()] == [last._number]


def test_a_client_runs_ahead_no_further_than_it_may(client):
    assert client._inbox.max_unfinished_calls == 64
    s = client.slice({"x": 1})
    x = client.put(np.float32(0), s.sharding())
    step = ml.jit(lambda x: x + 1, slice=s)
    for _ in range(200):
        x = step(x)
    assert float(x) == 200


def test_values_beyond_what_a_client_may_hold_are_refused_and_others_are_not(client):
    s = client.slice({"x": 1})
    kept = [client.put(ARRAY, s.sharding()) for _ in range(10)]
    late = client.put(ARRAY, s.sharding())
    with pytest.raises(AdmissionError, match="may not hold so much; got 80,000 bytes"):
        late.result()
    twice = ml.jit(lambda x: x * 2, slice=s)
    with pytest.raises(AdmissionError, match="may not hold so much"):
        twice(kept[0]).result()
    in_place = ml.jit(lambda x: x * 2, slice=s, donate_argnums=0)
    np.testing.assert_array_equal(in_place(kept.pop()), ARRAY * 2)
    with client.another() as other:
        t = other.slice({"x": 1})
        np.testing.assert_array_equal(other.put(ARRAY, t.sharding()), ARRAY)


def test_what_a_loop_holds_counts_as_what_its_client_does(client):
    s = client.slice({"x": 1})
    add = ml.jit(lambda i, x, y: (i + 1, x + y[: x.size]), slice=s)
    less = ml.jit(lambda i: i < 3, slice=s)

    def with_loop(num_times):
        many = ml.jit(lambda x: jnp.tile(x, num_times), slice=s)

        @ml.program
        def run(x):
            y = many(x)
            return ml.while_loop(lambda c: less(c[0]), lambda c: add(*c, y), (0, x))[1]

        return run

    x = client.put(ARRAY, s.sharding())
    np.testing.assert_array_equal(with_loop(5)(x), ARRAY * 4)
    with pytest.raises(AdmissionError, match=r"may not hold so much; got 720,0\d\d"):
        with_loop(9)(x).result()
    (used,) = [each for each in client.usage() if each.client == client._number]
    # What the loops held is gone, the results of the program perhaps not yet.
    assert ARRAY.nbytes <= used.device_bytes < 5 * ARRAY.nbytes


@pytest.mark.parametrize("wish", [{"priority": 1.5}, {"weight": 0}, {"priority": True}])
def test_wishes_that_make_no_sense_are_refused_at_the_call(client, wish):
    with pytest.raises(ConfigError, match="a client has an impossible"):
        client.another(**wish)


def test_a_client_of_larger_priority_is_shown_with_it(client):
    with client.another(priority=3) as urgent:
        usage = {each.client: each for each in urgent.usage()}
        assert usage[urgent._number].priority == 3
        assert usage[client._number].priority == 0


def test_a_client_that_was_closed_has_no_others(server):
    client = ml.connect(server.path)
    client.close()
    with pytest.raises(PeerError, match="the client was closed"):
        client.another()


def test_a_loop_without_end_of_one_client_stops_no_other(server):
    with ml.connect(server.path) as endless, ml.connect(server.path) as other:
        s, t = endless.slice({"x": 2}), other.slice({"x": 2})
        step, mine = (ml.jit(lambda x: x + x.sum(), slice=each) for each in (s, t))
        is_over = threading.Event()

        def loop():
            x = np.zeros(2, np.float32)
            while not is_over.is_set():
                x = step(x)

        thread = threading.Thread(target=loop)
        thread.start()
        for number in range(10):
            x = np.full(2, number, np.float32)
            np.testing.assert_array_equal(mine(x), np.full(2, number * 3.0))
        assert thread.is_alive()
        is_over.set()
        thread.join()


def test_the_commands_that_list_take_an_address_and_a_key(server, client):
    client.slice({"x": 1})
    options = [server.address, "--key", str(server.key_path)]
    top = CliRunner().invoke(app, ["top", *options])
    assert top.exit_code == 0
    assert f"client {client._number}" in top.stdout
    assert "priority" in top.stdout
    refused = CliRunner().invoke(app, ["objects", server.address])
    assert refused.exit_code == 2
    assert "lets nobody in without its key" in refused.stderr
