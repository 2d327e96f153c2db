"""Whatever reaches the ports of a server: it serves on, and so do its other clients."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import secrets
import socket

import msgpack
import numpy as np
import pytest

from timelyml import ml
from timelyml.errors import PayloadError
from timelyml.exchange import CONTROLLER, Endpoint, Lane
from timelyml.exchange.frames import Kind, pack_frames
from timelyml.ml.client.remote import gate_address, random_peer
from timelyml.ml.controller import messages
from timelyml.ml.controller.gate import (
    AskInvitation,
    Join,
    Joined,
    JoinRefused,
    client_codec,
)
from timelyml.ml.functions import ArrayType
from timelyml.runtime.failure import unpack_error
from timelyml.testing.leftovers import Leftovers, eventually

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
NUM_RAW, NUM_FRAMES, NUM_CLIENTS = 40, 60, 12
ODD = [None, -1, 0, 1 << 40, 1 << 63, float("nan"), "", "x" * 300, b"\x80", (), [1], {}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    before = Leftovers.now()
    path = tmp_path_factory.mktemp("server") / "address"
    with ml.serve(path, listen="tcp://127.0.0.1:*") as server:
        yield server
    before.check_gone(sockets=False)


@pytest.fixture(scope="module")
def bystander(server):
    """A client that computes all the while, and its function and argument."""
    with ml.connect(server.path) as client:
        s = client.slice({"x": 1})
        yield ml.jit(lambda x: x + 1, slice=s), client.put(np.zeros(3), s.sharding())


def check(bystander):
    step, x = bystander
    np.testing.assert_array_equal(step(x), np.ones(3))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_strangers_send_is_not_heard(server, bystander, seed):
    rng = random.Random(seed)
    host, port = server.address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0")
    for _ in range(NUM_RAW):
        lane = rng.randint(0, 1)
        with socket.create_connection((host, int(port) + lane), timeout=5) as raw:
            noise = rng.randbytes(rng.randint(0, 300))
            raw.sendall(rng.choice([noise, greeting + bytes(32) + noise, greeting]))
    check(bystander)


@pytest.mark.parametrize("seed", SEEDS)
def test_frames_that_are_garbled_end_only_who_sent_them(server, bystander, seed):
    rng = random.Random(seed)
    address = gate_address(server.address, server.key_path)
    codec, transport = client_codec(), address.transport(random_peer())
    link = transport._links[CONTROLLER]
    hello = codec.encode(Join(transport.endpoint))
    for number in range(NUM_FRAMES):
        peer = random_peer()  # each a peer of its own, so that all are looked at
        body, buffers = rng.choice([hello, codec.encode(some_message(rng, "s", 1))])
        token = address.token if rng.random() < 0.9 else secrets.token_bytes(16)
        where = rng.choice([Lane.CONTROL, Lane.BULK, 7])
        kind = rng.choice([Kind.MESSAGE, Kind.MESSAGE, Kind.FAREWELL, 99])
        sequence = rng.choice([0, 0, 0, 1, 1 << 60])
        sent = [bytearray(each) for each in pack_frames(
            (where, kind, peer, sequence), token, garbled(rng, body), list(buffers)
        )]  # fmt: skip
        if rng.random() < 0.3:
            sent[-1] = sent[-1][: rng.randint(0, len(sent[-1]))]
        if rng.random() < 0.2:
            sent.append(bytearray(rng.randbytes(10)))
        link.send(Lane(number % 2), [bytes(each) for each in sent])
    check(bystander)
    transport.close()
    check(bystander)


@pytest.mark.parametrize("seed", SEEDS)
def test_messages_that_make_no_sense_end_only_who_said_them(server, bystander, seed):
    rng = random.Random(seed)
    for _ in range(NUM_CLIENTS):
        transport = gate_address(server.path, None).transport(random_peer())
        transport.send(CONTROLLER, Join(transport.endpoint))
        number = answer(transport, Joined).client
        transport.send(CONTROLLER, messages.AskSlice(1, ("x",), (1,)))
        name = answer(transport, messages.SliceGiven).slice
        for _ in range(6):
            message = some_message(rng, name, (number << 40) + 1)
            if dataclasses.is_dataclass(message) and rng.random() < 0.8:
                field = rng.choice(dataclasses.fields(message)).name
                message = replaced(message, {field: rng.choice(ODD)})
            with contextlib.suppress(PayloadError):  # it cannot even be said
                transport.send(CONTROLLER, message)
        transport.close()
    check(bystander)


@pytest.mark.parametrize(
    "join", [{"weight": 0}, {"weight": 1 << 70}, {"priority": -(1 << 60)}]
)
def test_a_client_that_wishes_what_makes_no_sense_is_turned_away(
    server, bystander, join
):
    transport = gate_address(server.path, None).transport(random_peer())
    with contextlib.suppress(PayloadError):
        transport.send(CONTROLLER, Join(transport.endpoint, **join))
        assert "impossible" in str(unpack_error(answer(transport, JoinRefused).error))
    transport.close()
    check(bystander)


def answer(transport, kind):
    """The first message of a kind that comes."""
    found = []

    def is_there():
        found.extend(m for _, m in transport.receive() if isinstance(m, kind))
        transport.wait(0.1)
        return found

    assert eventually(is_there, 20)
    return found[0]


def some_message(rng, slice_name, buffer):
    """A message that a client might send, but for its numbers and names."""
    array = np.zeros(4, np.float32)
    return rng.choice([
        messages.AskSlice(1, ("x",), (1,)),
        messages.DropSlice(slice_name),
        messages.Register("identity", slice_name, b"no pickle"),
        messages.RegisterProgram(1, b"no pickle", (), False),
        messages.Put(buffer, slice_name, ArrayType((4,), "float32", 4), (), array),
        messages.Call("identity", slice_name, (buffer,), (buffer + 1,)),
        messages.CallProgram(1, (buffer,), (buffer + 1,)),
        messages.Release((buffer, 5)),
        messages.Fetch(buffer),
        messages.Publish(1, "name", (buffer,), b"no pickle"),
        messages.Open(1, "name", 0.0),
        messages.Unpublish(1, "name"),
        messages.Watch((buffer, -1)),
        messages.AskObjects(1),
        messages.AskUsage(1),
        messages.Finished(1, (), ()),
        AskInvitation(Endpoint("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")),
        "no message",
    ])  # fmt: skip


def replaced(message, fields):
    """A message with fields that no constructor would check, so none does."""
    copied = object.__new__(type(message))
    for field in dataclasses.fields(message):
        value = fields.get(field.name, getattr(message, field.name))
        object.__setattr__(copied, field.name, value)
    return copied


def garbled(rng, body):
    """A body with some bytes changed, or other msgpack in its place."""
    if rng.random() < 0.2:
        return msgpack.packb([rng.randint(-2, 40), rng.choice([[], None, [1] * 9]), 0])
    changed = bytearray(body)
    for _ in range(rng.randint(0, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)
