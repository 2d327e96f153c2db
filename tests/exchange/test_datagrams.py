"""Small messages as datagrams, beside what ZeroMQ brings of the same lanes."""

from __future__ import annotations

import socket
import struct
from contextlib import closing, contextmanager

import numpy as np
import pytest
import zmq

from timelyml.exchange import Endpoint, Lane, LinkFailure
from timelyml.exchange.datagrams import DATAGRAM_BYTES, DatagramInbox, DatagramLink
from timelyml.exchange.frames import Kind, pack_frames

from .samples import TOKEN, cluster, codec, data, private, receive, until

ENCODER = codec()


@contextmanager
def liar(transport):
    """A plain datagram socket and a PUSH socket, both connected to a transport."""
    control = transport.endpoint.control
    path = control.removeprefix("ipc://").replace("-control", "-dgram")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        zmq.Context() as context,
        context.socket(zmq.PUSH) as push,
    ):
        push.set(zmq.LINGER, 1000)
        push.connect(control)
        datagrams.connect(path)
        yield datagrams, push


def raw(sequence, message, *, lane=Lane.CONTROL, token=TOKEN):
    body, _ = ENCODER.encode(message)
    (frame,) = pack_frames((lane, Kind.MESSAGE, 5, sequence), token, body, [])
    return frame


def datagram(sequence, message, *, after=0, lane=Lane.CONTROL, token=TOKEN):
    """A datagram that may have to wait for what ZeroMQ brings before `after`."""
    return struct.pack("<Q", after) + raw(sequence, message, lane=lane, token=token)


def test_datagrams_that_are_ahead_wait_for_what_zeromq_brings(alone):
    with liar(alone) as (datagrams, push):
        for sequence, after in ((1, 1), (2, 1), (4, 4)):
            datagrams.send(datagram(sequence, sequence, after=after))
        assert alone.receive() == []
        push.send(raw(0, 0))
        assert [i.message for i in receive(alone, 3)] == [0, 1, 2]
        push.send(raw(3, 3))
        assert [i.message for i in receive(alone, 2)] == [3, 4]


def test_what_zeromq_brings_is_not_ahead_of_datagrams_sent_before_it(alone):
    with liar(alone) as (datagrams, push):
        push.send(raw(1, "second"))
        until(lambda: alone._inbox.sockets[0].poll(0), [alone])
        alone._ready = [(alone._inbox.sockets[0], zmq.POLLIN)]  # as the poll saw it
        datagrams.send(datagram(0, "first"))
        assert [i.message for i in receive(alone, 2)] == ["first", "second"]


def test_lanes_do_not_wait_for_each_other(alone):
    with liar(alone) as (datagrams, _):
        datagrams.send(datagram(1, "early", after=1))
        datagrams.send(datagram(0, "bulk", lane=Lane.BULK))
        assert [i.message for i in receive(alone)] == ["bulk"]


@pytest.mark.parametrize(
    ("sent", "wrong"),
    [
        (
            [(0, 0), (0, 0)],
            "a duplicate or a restart on the control lane; got message 0",
        ),
        ([(3, 2), (3, 2)], "a gap on the control lane; got message 3; expected 0"),
        ([(3, 2), (2, 2)], "a gap on the control lane; got message 2; expected 0"),
        ([(3, 4)], "a gap on the control lane; got message 3; expected 0"),
        ([(0, 0), (2, 0)], "a gap on the control lane; got message 2; expected 1"),
        ([(1, 0)], "a gap on the control lane; got message 1; expected 0"),
    ],
)
def test_a_datagram_that_comes_twice_or_too_late_fails_the_link(alone, sent, wrong):
    with liar(alone) as (datagrams, _):
        for sequence, after in sent:
            datagrams.send(datagram(sequence, sequence, after=after))
        count = 2 if sent[0][0] == 0 else 1
        *_, (peer, failure) = receive(alone, count)
    assert peer == 5
    assert wrong in failure.reason


def test_a_gap_behind_what_zeromq_brings_fails_the_link(alone):
    with liar(alone) as (datagrams, push):
        datagrams.send(datagram(2, "early", after=1))
        push.send(raw(0, "late"))
        (_, message), (_, failure) = receive(alone, 2)
    assert message == "late"
    assert "a gap on the control lane; got message 2; expected 1" in failure.reason


def test_a_datagram_of_no_lane_fails_the_link(alone):
    with liar(alone) as (datagrams, _):
        datagrams.send(datagram(0, "hello", lane=7))
        ((_, failure),) = receive(alone)
    assert failure == LinkFailure("a message of lane 7 came as a datagram")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "short"),
        (b"x" * 100, "magic"),
        (datagram(0, "hello", token=b"x" * 16), "token"),
        (datagram(0, b"x" * DATAGRAM_BYTES), "size"),
    ],
    ids=["empty", "noise", "foreign", "oversized"],
)
def test_what_is_not_of_this_cluster_is_refused_and_counted(alone, sent, reason):
    with liar(alone) as (datagrams, _):
        datagrams.send(sent)
        datagrams.send(datagram(0, "real"))
        assert receive(alone) == [(5, "real")]
    assert alone.metrics.frames_refused == {reason: 1}


def test_links_that_are_connected_send_small_messages_past_zeromq(tmp_path):
    with cluster(private(tmp_path)) as (one, two):
        until_direct(one, two)
        one.send(1, "small")
        assert not two._inbox.sockets[0].poll(0)
        one.send(1, data(np.zeros(10_000)))
        one.send(1, "last")
        kinds = [type(i.message) is str for i in receive(two, 3)]
        assert kinds == [True, False, True]


def test_nothing_is_lost_where_the_receiver_does_not_look(tmp_path):
    with cluster(private(tmp_path)) as (one, two):
        until_direct(one, two)
        for number in range(3000):
            one.send(1, number, Lane(number % 2))
        arrived = [i.message for i in receive(two, 3000)]
        for lane in Lane:
            found = [number for number in arrived if number % 2 == lane]
            assert found == list(range(lane, 3000, 2))


def test_a_peer_without_datagrams_gets_everything_by_zeromq(tmp_path):
    with cluster(private(tmp_path), count=1) as (one,), zmq.Context() as context:
        pulls = [context.socket(zmq.PULL) for _ in Lane]
        for pull, name in zip(pulls, ("control", "bulk"), strict=True):
            pull.bind(f"ipc://{tmp_path}/other-{name}")
        ends = [f"ipc://{tmp_path}/other-{name}" for name in ("control", "bulk")]
        one.connect(1, Endpoint(*ends))
        until(lambda: one.receive() or one._links[1]._num_connected == 2, [one])
        one.send(1, "hello")
        assert pulls[0].poll(10_000)
        for pull in pulls:
            pull.close(0)


def test_a_full_queue_is_left_to_zeromq_for_a_while(tmp_path):
    inbox = DatagramInbox(str(tmp_path / "dgram"))
    link = DatagramLink(str(tmp_path / "dgram"))
    with closing(inbox), closing(link):
        sent, after = 0, struct.pack("<Q", 7)
        while link.send(b"x" * 1000, 7):
            sent += 1
        assert inbox.receive() == after + b"x" * 1000
        assert not link.send(b"y", 7)
        while not link.send(b"z", 7):
            pass
        rest = [inbox.receive() for _ in range(sent)]
        assert rest == [after + b"x" * 1000] * (sent - 1) + [after + b"z"]
        assert inbox.receive() is None
    assert list(tmp_path.iterdir()) == []


def until_direct(one, two):
    """Wait until a transport knows that it is connected to another."""

    def is_direct():
        one.wait(0.01)
        one.receive()
        link = one._links[two.index]
        link.broken()
        return link._datagrams is not None

    until(is_direct, [])
