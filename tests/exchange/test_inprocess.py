from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from timelyml.errors import PeerLostError
from timelyml.exchange import CONTROLLER, InProcessHub, Lane

from .samples import Progress, data, payload_of, receive


def test_messages_arrive_by_reference_in_order_control_first():
    hub = InProcessHub()
    one, two = hub.transport(0), hub.transport(CONTROLLER)
    rows = np.zeros(3)
    one.send(CONTROLLER, data(rows), Lane.BULK)
    one.send(CONTROLLER, "first")
    one.send(CONTROLLER, "second")
    arrived = two.receive()
    assert [i.peer for i in arrived] == [0, 0, 0]
    assert [i.message for i in arrived[:2]] == ["first", "second"]
    assert payload_of(arrived[2]) is rows
    assert two.receive() == []


def test_payloads_are_read_only_on_both_sides():
    hub = InProcessHub()
    rows = np.zeros(3)
    hub.transport(0).send(0, data({"x": rows[1:]}), Lane.BULK)
    for array in (rows, payload_of(hub.transport(0).receive()[0])["x"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_hub_has_one_transport_per_index():
    hub = InProcessHub()
    assert hub.transport(3) is hub.transport(3)


def test_one_call_takes_a_bounded_number_of_messages():
    transport = InProcessHub().transport(0)
    for number in range(300):
        transport.send(0, number, Lane.BULK)
    assert len(transport.receive()) == 256
    assert [i.message for i in transport.receive()] == list(range(256, 300))


def test_each_link_keeps_its_order_between_threads():
    hub = InProcessHub()
    receiver = hub.transport(9)

    def send(index):
        for number in range(500):
            hub.transport(index).send(9, number, Lane.BULK)

    threads = [threading.Thread(target=send, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    arrived = receive(receiver, 1500)
    for thread in threads:
        thread.join()
    for index in range(3):
        assert [i.message for i in arrived if i.peer == index] == list(range(500))


def test_waiting_ends_with_a_wake_or_a_message_or_the_time():
    hub = InProcessHub()
    one = hub.transport(0)
    one.wake()
    one.wait(30)
    hub.transport(1).send(0, Progress)
    one.wait(30)
    one.receive()
    start = time.monotonic()
    one.wait(0.05)
    assert 0.04 < time.monotonic() - start < 10


def test_looking_finds_a_message_or_a_wake_and_nothing_else():
    hub = InProcessHub()
    one = hub.transport(0)
    assert not one.poll()
    hub.transport(1).send(0, Progress)
    assert one.poll()
    one.receive()
    one.wait(0)
    assert not one.poll()
    one.wake()
    assert one.poll()


def test_a_wake_from_another_thread_ends_the_wait():
    one = InProcessHub().transport(0)
    thread = threading.Thread(target=one.wake)
    thread.start()
    one.wait(30)
    thread.join()


def test_metrics_count_messages():
    hub = InProcessHub()
    hub.transport(0).send(1, "hello", Lane.BULK)
    hub.transport(1).receive()
    assert hub.transport(0).metrics.messages_sent == [0, 1]
    assert hub.transport(1).metrics.messages_received == [0, 1]


def test_a_closed_peer_cannot_be_sent_to():
    hub = InProcessHub()
    hub.transport(1).close()
    with pytest.raises(PeerLostError, match="peer 1 is gone"):
        hub.transport(0).send(1, "hello")
