"""ZeroMQ transports against each other, and against a plain socket that lies."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from timelyml.errors import ConfigError, PayloadError, PeerLostError, WireError
from timelyml.exchange import (
    CONTROLLER,
    CurveKeys,
    Endpoint,
    Lane,
    LinkFailure,
    ZmqTransport,
    zmq_transport,
)
from timelyml.exchange.frames import Kind, pack_frames

from .samples import (
    MESSAGES,
    PATIENCE_S,
    TOKEN,
    cluster,
    codec,
    data,
    payload_of,
    private,
    receive,
    until,
)

ENCODER = codec()


@pytest.fixture(params=["ipc", "tcp"])
def bind(request, tmp_path):
    return private(tmp_path) if request.param == "ipc" else "tcp://127.0.0.1:*"


@contextmanager
def liar(transport, lane=Lane.CONTROL):
    """A plain PUSH socket that is connected to a transport."""
    address = (transport.endpoint.control, transport.endpoint.bulk)[lane]
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.set(zmq.LINGER, 1000)
        push.connect(address)
        yield push


def raw(sequence, message="hello", *, lane=Lane.CONTROL, sender=5, token=TOKEN):
    body, buffers = ENCODER.encode(message)
    number = (lane, Kind.MESSAGE, sender, sequence)
    return pack_frames(number, token, body, buffers)


def test_messages_of_every_class_arrive_on_both_lanes(bind):
    with cluster(bind) as (one, two):
        for lane in Lane:
            for message in MESSAGES:
                one.send(1, message, lane)
            arrived = receive(two, len(MESSAGES))
            assert [i.message for i in arrived] == list(MESSAGES)
            assert {i.peer for i in arrived} == {0}


def test_large_arrays_arrive_equal_and_read_only(bind):
    rows = np.arange(3_000_000, dtype=np.float32).reshape(-1, 4)
    with cluster(bind) as (one, two):
        one.send(1, data({"x": rows, "y": rows[:, 0]}), Lane.BULK)
        (incoming,) = receive(two)
        got = payload_of(incoming)
        assert np.array_equal(got["x"], rows)
        assert np.array_equal(got["y"], rows[:, 0])
        for array in got.values():
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.setflags(write=True)


@pytest.mark.sources
def test_an_array_is_copied_neither_before_sending_nor_after_receiving(
    bind, monkeypatch
):
    """The only copies are those that the operating system makes in between."""
    rows = np.arange(1_000_000.0)
    sent, received = [], []
    with cluster(bind) as (one, two):
        link = one._links[1]
        monkeypatch.setattr(one, "_links", {1: Spy(link, sent)})
        accept = two._inbox._accept
        monkeypatch.setattr(
            two._inbox,
            "_accept",
            lambda lane, frames, arrived: (
                received.extend(frames) or accept(lane, frames, arrived)
            ),
        )
        one.send(1, data(rows), Lane.BULK)
        (incoming,) = receive(two)
        monkeypatch.undo()
    assert np.shares_memory(np.frombuffer(sent[1], np.uint8), rows)
    wire = np.frombuffer(received[1], np.uint8)
    assert np.shares_memory(wire, payload_of(incoming))


class Spy:
    """A link that remembers the frames it is given."""

    def __init__(self, link, frames):
        self._link = link
        self._frames = frames
        self.monitors = link.monitors
        self.sequences = link.sequences
        self.is_near = False

    def send(self, lane, frames):
        self._frames.extend(frames)
        return self._link.send(lane, frames)


@settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1]), st.sampled_from(Lane), st.booleans()),
        max_size=40,
    )
)
def test_each_link_delivers_in_order(tmp_path, sends):
    with cluster(private(tmp_path), count=3) as peers:
        expected = {}
        for number, (sender, lane, is_large) in enumerate(sends):
            message = [int(lane), number, np.zeros(20_000 if is_large else 1)]
            peers[sender].send(2, message, lane)
            expected.setdefault((sender, lane), []).append(number)
        found = {}
        for peer, (lane, number, _) in receive(peers[2], len(sends)):
            found.setdefault((peer, lane), []).append(number)
        assert found == expected


def test_control_overtakes_bulk(bind):
    with cluster(bind) as (one, two):
        for number in range(20):
            one.send(1, data(np.zeros(100_000)), Lane.BULK)
            one.send(1, number, Lane.CONTROL)
        # Both lanes are there once their last message is.
        until(lambda: all(p.poll(0) for p in two._inbox.sockets), [two])
        first = two.receive()
        kinds = [isinstance(i.message, int) for i in first]
        assert kinds == sorted(kinds, reverse=True)
        receive(two, 40 - len(first))


def test_one_call_takes_a_bounded_number_of_messages(alone):
    with liar(alone) as push:
        for sequence in range(1000):
            push.send_multipart(raw(sequence))
        until(lambda: alone._inbox.sockets[0].poll(0), [alone])
        counts = []
        until(
            lambda: counts.append(len(alone.receive())) or sum(counts) == 1000, [alone]
        )
        assert max(counts) <= 256


def test_peers_that_start_to_listen_later_get_everything(tmp_path):
    address = f"{private(tmp_path)}/late"
    one = ZmqTransport(0, codec=codec(), token=TOKEN, bind=private(tmp_path))
    with closing(one):
        one.connect(1, Endpoint(f"{address}-control", f"{address}-bulk"))
        one.send(1, "early")
        assert one.receive() == []
        with zmq.Context() as context, context.socket(zmq.PULL) as pull:
            pull.bind(f"{address}-control")
            assert pull.poll(10_000)
            pull.recv()


def test_the_controller_is_a_peer_like_any_other(tmp_path):
    controller = ZmqTransport(
        CONTROLLER, codec=codec(), token=TOKEN, bind=private(tmp_path)
    )
    worker = ZmqTransport(0, codec=codec(), token=TOKEN, bind=private(tmp_path))
    with closing(controller), closing(worker):
        worker.connect(CONTROLLER, controller.endpoint)
        worker.send(CONTROLLER, "hello")
        assert receive(controller) == [(0, "hello")]


def test_metrics_count_what_moved(bind):
    with cluster(bind) as (one, two):
        one.send(1, "hello")
        one.send(1, data(np.zeros(10_000)), Lane.BULK)
        receive(two, 2)
        assert one.metrics.messages_sent == [1, 1]
        assert two.metrics.messages_received == [1, 1]
        assert one.metrics.bytes_sent == two.metrics.bytes_received
        assert two.metrics.bytes_received[Lane.BULK] > 80_000
        assert not two.metrics.frames_refused


def test_a_message_that_cannot_be_encoded_leaves_the_link_intact(bind):
    with cluster(bind) as (one, two):
        with pytest.raises(PayloadError, match="cannot be sent to another process"):
            one.send(1, lambda: 1)
        one.send(1, "next")
        assert receive(two) == [(0, "next")]


def test_a_message_beyond_the_size_limit_is_refused_by_the_sender(bind):
    with cluster(bind, max_frame_bytes=100_000) as (one, two):
        for message in (np.zeros(100_000), "x" * 100_000):
            with pytest.raises(WireError, match="too large; got a frame of"):
                one.send(1, message)
        one.send(1, "next")
        assert receive(two) == [(0, "next")]


def test_a_peer_is_connected_once(bind):
    with (
        cluster(bind) as (one, two),
        pytest.raises(ConfigError, match="connected before"),
    ):
        one.connect(1, two.endpoint)


def test_sending_without_a_link_is_refused(alone):
    with pytest.raises(PeerLostError, match="no link to it was opened"):
        alone.send(3, "hello")


def test_keys_of_the_cluster_open_the_network():
    keys = CurveKeys.generate()
    with cluster("tcp://0.0.0.0:*", keys=keys, advertise="127.0.0.1") as (one, two):
        assert two.endpoint.control.startswith("tcp://127.0.0.1:")
        one.send(1, "hello")
        assert receive(two) == [(0, "hello")]


def test_waiting_ends_with_a_wake_from_another_thread(alone):
    thread = threading.Thread(target=alone.wake)
    thread.start()
    start = time.monotonic()
    alone.wait(30)
    assert time.monotonic() - start < 10
    thread.join()


def test_looking_finds_a_message_or_a_wake_and_nothing_else(bind):
    with cluster(bind) as (one, two):
        assert not two.poll()
        two.wake()
        assert two.poll()
        assert not two.poll()
        one.send(1, "hello")
        until(two.poll, [one])
        assert two.poll()  # until it is taken
        assert [i.message for i in two.receive()] == ["hello"]
        assert not two.poll()


def test_many_wakes_end_one_wait(alone):
    for _ in range(100_000):
        alone.wake()
    alone.wait(30)
    for _ in range(100):
        alone.wait(0.001)
    start = time.monotonic()
    alone.wait(0.05)
    assert time.monotonic() - start > 0.04


def test_waiting_ends_with_a_message(bind):
    with cluster(bind) as (one, two):
        one.send(1, "hello")
        start = time.monotonic()
        until(lambda: bool(two.receive()), [two])
        assert time.monotonic() - start < 10


def test_waiting_takes_no_more_than_its_time(alone):
    start = time.monotonic()
    alone.wait(0.05)
    alone.wait(0)
    alone.wait(-1)
    assert 0.04 < time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("sequences", "wrong"),
    [
        ([0, 2], "a gap on the control lane; got message 2; expected 1"),
        ([1], "a gap on the control lane; got message 1; expected 0"),
        ([0, 1, 1], "a duplicate or a restart on the control lane; got message 1"),
        ([0, 1, 0], "a duplicate or a restart on the control lane; got message 0"),
    ],
)
def test_a_gap_or_a_duplicate_fails_the_link_once(alone, sequences, wrong):
    with liar(alone) as push:
        for sequence in [*sequences, 10, 11]:
            push.send_multipart(raw(sequence, sequence))
        until(lambda: alone._inbox.sockets[0].poll(0), [alone])
        arrived = receive(alone, len(sequences))
        until(
            lambda: not alone.receive() and alone.metrics.frames_refused["lost"] == 2,
            [alone],
        )
    *good, (peer, failure) = arrived
    assert [i.message for i in good] == sequences[:-1]
    assert peer == 5
    assert wrong in failure.reason


def test_a_failed_link_leaves_others_alone(alone):
    with liar(alone) as push:
        push.send_multipart(raw(3, sender=5))
        push.send_multipart(raw(0, "fine", sender=6))
        arrived = receive(alone, 2)
    assert {type(i.message) for i in arrived if i.peer == 5} == {LinkFailure}
    assert [i.message for i in arrived if i.peer == 6] == ["fine"]


def test_an_authentic_frame_that_does_not_decode_fails_the_link(alone):
    with liar(alone) as push:
        frames = pack_frames((0, Kind.MESSAGE, 5, 0), TOKEN, b"\xc1\x00", [])
        push.send_multipart(frames)
        ((peer, failure),) = receive(alone)
    assert peer == 5
    assert "cannot be decoded" in failure.reason


def test_a_message_on_the_wrong_lane_fails_the_link(alone):
    with liar(alone, Lane.BULK) as push:
        push.send_multipart(raw(0))
        ((_, failure),) = receive(alone)
    assert "a message of lane 0 came on lane 1" in failure.reason


@pytest.mark.sources
@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"hello"], "short"),
        ([b"x" * 100], "magic"),
        (raw(0, token=b"f" * 16), "token"),
        (raw(0, np.zeros(5000))[:1], "frames"),
        ([*raw(0), b"more"], "frames"),
    ],
)
def test_foreign_frames_are_counted_and_never_decoded(
    alone, monkeypatch, frames, reason
):
    decoded = []
    monkeypatch.setattr(alone._codec, "decode", lambda *_: decoded.append(1))
    with liar(alone) as push:
        push.send_multipart(frames)
        refused = alone.metrics.frames_refused
        until(lambda: not alone.receive() and bool(refused), [alone])
    assert refused == {reason: 1}
    assert not decoded


def test_a_frame_beyond_the_size_limit_never_arrives(tmp_path):
    alone = ZmqTransport(
        0, codec=codec(), token=TOKEN, bind=private(tmp_path), max_frame_bytes=1000
    )
    with closing(alone), liar(alone) as push:
        monitor = push.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        push.send(b"x" * 2000)
        assert monitor.poll(10_000)
        push.disable_monitor()
        monitor.close(0)
        assert alone.receive() == []


def test_random_frames_disturb_nobody(alone):
    rng = np.random.default_rng(0)
    with liar(alone) as push:
        for _ in range(200):
            count = int(rng.integers(1, 4))
            push.send_multipart(
                [rng.bytes(int(rng.integers(0, 99))) for _ in range(count)]
            )
        push.send_multipart(raw(0, "real"))
        assert receive(alone) == [(5, "real")]
    assert alone.metrics.frames_refused.total() == 200


def test_a_peer_that_closes_is_reported_after_its_last_message(bind):
    with cluster(bind, linger_s=PATIENCE_S) as (one, two):
        rows = np.arange(500_000.0)
        for _ in range(5):
            two.send(0, data(rows), Lane.BULK)
        two.send(0, "last")
        two.close()
        arrived = receive(one, 7)
        assert arrived[-1] == (1, LinkFailure("it closed its transport"))
        assert sum(i.message == "last" for i in arrived) == 1
        with pytest.raises(PeerLostError, match="it closed its transport"):
            one.send(1, "hello")


def test_a_peer_that_is_killed_is_reported_within_seconds(bind):
    with cluster(bind, count=1) as (one,):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, bind, *wire(one.endpoint)],
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            parts = child.stdout.readline().split()
            key = parts[2].encode() if len(parts) > 2 else None
            one.connect(1, Endpoint(parts[0], parts[1], key))
            one.send(1, "ping")
            assert receive(one) == [(1, "pong")]
            child.kill()
            start = time.monotonic()
            also = f", or it was silent for {PATIENCE_S:g} s" if key else ""
            assert receive(one) == [(1, LinkFailure("the connection broke" + also))]
            assert time.monotonic() - start < PATIENCE_S / 2  # not by its silence
        with pytest.raises(PeerLostError, match="the connection broke"):
            one.send(1, "hello")


@pytest.mark.parametrize("is_tcp", [False, True])
def test_a_watched_peer_that_is_stopped_is_reported(tmp_path, is_tcp):
    bind = "tcp://127.0.0.1:*" if is_tcp else private(tmp_path)
    with cluster(bind, count=1, silence_s=1.0) as (one,):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, bind, *wire(one.endpoint)],
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            parts = child.stdout.readline().split()
            key = parts[2].encode() if is_tcp else None
            one.connect(1, Endpoint(parts[0], parts[1], key), is_watched=not is_tcp)
            one.send(1, "ping")
            assert receive(one) == [(1, "pong")]
            child.send_signal(signal.SIGSTOP)
            ((_, failure),) = receive(one)
            child.kill()
        assert failure.reason == "the connection broke, or it was silent for 1 s"


def wire(endpoint):
    key = [endpoint.public_key.decode()] if endpoint.public_key else []
    return [endpoint.control, endpoint.bulk, *key]


CHILD = """
import sys
from timelyml.exchange import Codec, Endpoint, ZmqTransport
bind, control, bulk, *key = sys.argv[1:]
peer = ZmqTransport(1, codec=Codec([]), token=b"0123456789abcdef", bind=bind)
peer.connect(0, Endpoint(control, bulk, key[0].encode() if key else None))
own = peer.endpoint
print(own.control, own.bulk, *([own.public_key.decode()] if own.public_key else []))
sys.stdout.flush()
while True:
    peer.wait(60)
    for _ in peer.receive():
        peer.send(0, "pong")
"""


def test_a_peer_that_restarts_at_the_same_address_is_reported(tmp_path):
    """ZeroMQ reconnects by itself; the connection counts as broken all the same."""
    with cluster(private(tmp_path), count=1) as (one,), zmq.Context() as context:
        address = f"ipc://{tmp_path}/peer"
        pulls = [context.socket(zmq.PULL) for _ in Lane]
        for lane, pull in enumerate(pulls):
            pull.bind(f"{address}{lane}")
        one.connect(1, Endpoint(f"{address}0", f"{address}1"))
        one.send(1, "hello", Lane.BULK)
        assert pulls[1].poll(10_000)
        pulls[1].close(0)
        again = context.socket(zmq.PULL)
        again.bind(f"{address}1")
        assert receive(one) == [(1, LinkFailure("the connection broke"))]
        for pull in (pulls[0], again):
            pull.close(0)


def test_wrong_keys_are_reported(tmp_path):
    with (
        cluster("tcp://127.0.0.1:*") as (_, two),
        cluster("tcp://127.0.0.1:*", 1) as (one,),
    ):
        wrong = CurveKeys.generate().public
        one.connect(1, Endpoint(two.endpoint.control, two.endpoint.bulk, wrong))
        one.send(1, "hello")
        ((_, failure),) = receive(one)
        assert failure.reason


def test_a_link_that_is_broken_is_waited_on_without_spinning(tmp_path):
    with cluster(private(tmp_path)) as (one, two):
        one.send(1, "hello")
        receive(two)
        break_off(two)
        calls = 0
        found = []
        while not found:
            one.wait(10)
            found += one.receive()
            calls += 1
        assert calls < 20


def test_a_peer_that_breaks_off_is_reported_after_what_it_had_sent(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(zmq_transport, "GRACE_S", 0.0)
    monkeypatch.setattr(zmq_transport, "_RECEIVES_PER_CHECK", 1)
    with cluster(private(tmp_path)) as (one, two):
        one.send(1, "hello")
        receive(two)  # connected by now, or nothing could break
        for number in range(2000):
            two.send(0, number)
        break_off(two)
        *numbers, (_, failure) = receive(one, 2001)
        assert [i.message for i in numbers] == list(range(2000))
        assert failure == LinkFailure("the connection broke")


def break_off(transport):
    """Close the sockets of a transport without a farewell, but flush them."""
    for link in transport._links.values():
        link.close(1000)
    transport._links.clear()
    transport._inbox.close()
    transport._context.term()
    transport._inbox.sockets.clear()


def test_closing_delivers_what_was_sent_before(bind):
    with cluster(bind, linger_s=PATIENCE_S) as (one, two):
        rows = np.arange(500_000.0)
        for _ in range(10):
            one.send(1, data(rows), Lane.BULK)
        one.close()
        arrived = receive(two, 11)
        assert all(np.array_equal(payload_of(i), rows) for i in arrived[:-1])


def test_closing_towards_nobody_ends_in_time(tmp_path):
    one = ZmqTransport(
        0, codec=codec(), token=TOKEN, bind=private(tmp_path), linger_s=0.2
    )
    one.connect(1, Endpoint(f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b"))
    one.send(1, data(np.zeros(1_000_000)), Lane.BULK)
    start = time.monotonic()
    one.close()
    assert time.monotonic() - start < 20  # not for ever
    one.close()
    one.wake()


def test_nothing_is_left_after_closing(tmp_path):
    threads = threading.active_count()
    with cluster(private(tmp_path)) as (one, two):
        one.send(1, "hello")
        receive(two)
        assert len(list(tmp_path.iterdir())) == 8
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == threads
