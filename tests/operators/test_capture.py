"""Streams that are captured, and replayed with other shards and workers."""

from __future__ import annotations

import datetime as dt
import socket
import struct
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operators.test_distinct import in_epochs
from timelyml import Cluster, Dataflow
from timelyml.errors import ConfigError, GraphError, TapeError
from timelyml.runtime import tape
from timelyml.runtime.recording import Recording
from timelyml.testing.leftovers import eventually

EPOCHS = [[1, 2, 3], [], [4], [5, 6, 7, 8]]


def captured(place, epochs=EPOCHS, *, num_shards=3, to=None, **options):
    flow = Dataflow("captured", num_shards=num_shards)
    flow.source(in_epochs(epochs)).capture(to, name="tape")
    return place.run(flow, **options)


def by_time(result, name="out"):
    found = {}
    for time, payload in result.batches(name):
        found.setdefault(time, Counter()).update(payload)
    return found


def replayed(place, source, *, num_shards=2, **options):
    flow = Dataflow("replayed", num_shards=num_shards)
    stream = flow.replay(source, **options)
    stream.collect()
    stream.exchange(lambda n: 0).count().collect("counts")
    return place.run(flow)


EXPECTED = {t: Counter(records) for t, records in enumerate(EPOCHS) if records}


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_a_recording_in_memory_can_be_replayed_on_other_shards(cluster, num_shards):
    recording = captured(cluster).recording("tape")
    assert len(recording.tapes) == 3

    result = replayed(cluster, recording, num_shards=num_shards)
    assert by_time(result) == EXPECTED
    assert result.batches("counts") == [(0, [3]), (2, [1]), (3, [4])]


def test_files_can_be_replayed_by_another_number_of_workers(cluster, tmp_path):
    captured(cluster, to=tmp_path / "tapes")
    files = sorted(path.name for path in (tmp_path / "tapes").iterdir())
    assert files == [f"shard-0000{n}.tape" for n in range(3)]

    for workers in (1, 3):
        with Cluster(workers, mode="threads") as other:
            flow = Dataflow(num_shards=workers)
            flow.replay(str(tmp_path / "tapes")).collect()
            assert by_time(flow.run(cluster=other, timeout_s=30)) == EXPECTED


def test_a_recording_can_be_saved_and_replayed_from_there(cluster, tmp_path):
    captured(cluster).recording("tape").save(tmp_path)

    assert by_time(replayed(cluster, tmp_path)) == EXPECTED


def free_addresses(kind, number, directory):
    if kind == "unix":
        return [f"unix:{directory}/tape-{n}.sock" for n in range(number)]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return [f"tcp://127.0.0.1:{port}" for port in ports]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize(("num_addresses", "num_shards"), [(1, 3), (2, 3), (4, 2)])
def test_a_stream_goes_to_another_flow_through_sockets(
    cluster, tmp_path, kind, num_addresses, num_shards
):
    places = free_addresses(kind, num_addresses, tmp_path)
    replaying = Dataflow("replaying", num_shards=2)
    replaying.replay(places).collect()

    run = cluster.start(replaying)
    with Cluster(2, mode="threads") as other:
        flow = Dataflow("capturing", num_shards=num_shards)
        flow.source(in_epochs(EPOCHS)).capture(places)
        flow.run(cluster=other, timeout_s=30)
    assert by_time(run.result()) == EXPECTED


def test_a_replay_takes_no_path_from_a_file_or_from_another_replay(cluster, tmp_path):
    flow = Dataflow(num_shards=1)
    flow.replay(f"unix:{tmp_path}/place").collect()

    (tmp_path / "place").write_text("precious")
    with pytest.raises(TapeError, match=r"cannot listen at .*Address already in use"):
        cluster.run(flow)
    assert (tmp_path / "place").read_text() == "precious"

    (tmp_path / "place").unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{tmp_path}/place")
        other.listen()
        other.setblocking(False)
        with pytest.raises(TapeError, match=r"cannot listen at .*already in use"):
            cluster.run(flow)
        with pytest.raises(
            BlockingIOError, match="temporarily"
        ):  # nor has it heard of a connection
            other.accept()
        assert (tmp_path / "place").is_socket()


def test_a_replay_listens_for_its_user_alone_and_where_a_killed_one_did(
    cluster, tmp_path
):
    place = tmp_path / "place"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(place))  # nobody listens there any more, but it stays
    flow = Dataflow(num_shards=1)
    flow.replay(f"unix:{place}").collect()

    run = cluster.start(flow)
    assert eventually(
        lambda: place.is_socket() and place.stat().st_mode & 0o777 == 0o600
    )
    capturing = Dataflow(num_shards=1)
    capturing.source(in_epochs(EPOCHS)).capture(f"unix:{place}")
    capturing.run(timeout_s=30)
    assert by_time(run.result()) == EXPECTED
    assert not place.exists()


def test_a_slow_reader_holds_the_capture_back(cluster, tmp_path):
    place = f"unix:{tmp_path}/tape.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{tmp_path}/tape.sock")
    listener.listen()
    flow = Dataflow(num_shards=1)
    blocks = flow.source(lambda *_: ((0, np.zeros(10_000)) for _ in range(1000)))
    blocks.capture(place, name="tape")

    run = cluster.start(flow, credit_bytes=1_000_000)
    connection, _ = listener.accept()
    with connection, listener:
        peaks = [run.metrics()["queued_bytes_peak"] for _ in range(5)]
        assert max(peaks) <= 1_100_000
        assert not run.done()
        size = 0
        while data := connection.recv(1 << 20):
            size += len(data)
    run.result()
    assert size > 80_000_000


def test_every_kind_of_record_comes_back(cluster):
    records = [
        (1, "a", None, 2.5, b"x"),
        {"when": dt.datetime(2024, 1, 2, tzinfo=dt.UTC), "what": {1, 2}},
        2**70,
        np.float32(0.5),
    ]
    rows = {"x": np.arange(5000.0).reshape(-1, 2), "w": np.array(["a"] * 2500)}
    flow = Dataflow(num_shards=1)
    flow.source(records).capture(name="records")
    flow.source(rows).capture(name="columns")
    result = cluster.run(flow)

    again = Dataflow(num_shards=1)
    again.replay(result.recording("records")).collect("records")
    again.replay(result.recording("columns")).collect("columns")
    found = cluster.run(again)
    assert found["records"] == records
    joined = [payload for _, payload in found.batches("columns")]
    assert np.array_equal(np.concatenate([p["x"] for p in joined]), rows["x"])
    assert np.concatenate([p["w"] for p in joined]).tolist() == ["a"] * 2500


def test_code_on_a_tape_is_only_run_if_that_is_asked_for(cluster):
    flow = Dataflow(num_shards=1)
    flow.source([Fraction(1, 3)]).capture(name="tape")
    recording = cluster.run(flow).recording("tape")

    with pytest.raises(TapeError, match=r"pickled code.*; pass allow_pickle=True"):
        replayed(cluster, recording)
    result = replayed(cluster, recording, allow_pickle=True)
    assert result["out"] == [Fraction(1, 3)]


def test_a_replay_keeps_to_the_epoch_credit(cluster):
    numbers = [[n] for n in range(200)]
    recording = captured(cluster, numbers, max_epochs_ahead=8).recording("tape")
    flow = Dataflow(num_shards=2)
    gate = flow.input("gate", num_shards=2)
    numbers = flow.replay(recording).probe("read")
    numbers.concat(gate).exchange(lambda n: 0).count().collect()

    run = cluster.start(flow, max_epochs_ahead=4)
    run.probe("read").wait_until(3, timeout_s=10)
    # The tape's own progress moves up to 8 epochs at a time, as its source was ahead.
    assert max(run.probe("read").frontier) <= 4 + 8
    run.input("gate").close()
    assert len(run.result()["out"]) == 200


def test_blocks_far_ahead_of_the_frontier_lock_nothing_up(cluster):
    flow = Dataflow(num_shards=1)
    late = flow.source(range(100)).delay(lambda n, time: n * 50)
    late.capture(name="tape")
    recording = cluster.run(flow).recording("tape")

    again = Dataflow(num_shards=1)
    again.replay(recording).collect()
    assert cluster.run(again, max_epochs_ahead=2)["out"] == list(range(100))


def test_a_replay_can_be_drained(cluster, tmp_path):
    flow = Dataflow(num_shards=1)
    flow.replay(f"unix:{tmp_path}/nobody.sock").collect()

    run = cluster.start(flow)
    run.stop(timeout_s=10)
    assert run.result()["out"] == []
    assert not (tmp_path / "nobody.sock").exists()


def test_what_is_there_already_is_not_replaced_unless_asked_for(cluster, tmp_path):
    captured(cluster, to=tmp_path)
    with pytest.raises(TapeError, match="is there already"):
        captured(cluster, to=tmp_path)

    flow = Dataflow(num_shards=3)
    flow.source(in_epochs([[9]])).capture(tmp_path, overwrite=True)
    cluster.run(flow)
    assert by_time(replayed(cluster, tmp_path)) == {0: Counter([9])}


def test_a_capture_that_fails_leaves_no_complete_tape(cluster, tmp_path):
    flow = Dataflow(num_shards=1)
    numbers = flow.source([1, 0], batch_size=1, epoch_every=1).map(lambda n: 1 // n)
    numbers.capture(tmp_path)

    with pytest.raises(ZeroDivisionError, match="'map' failed"):
        cluster.run(flow)
    with pytest.raises(ConfigError, match="has nothing to replay"):
        Dataflow().replay(tmp_path)


def test_a_missing_tape_is_noticed(cluster, tmp_path):
    captured(cluster, to=tmp_path)
    (tmp_path / "shard-00001.tape").unlink()

    with pytest.raises(TapeError, match="got 2 tape files of 3"):
        replayed(cluster, tmp_path)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: b"not a tape" * 3, "got b'not a tapenot a ' at its start"),
        (lambda data: data[:14] + struct.pack("<H", 9) + data[16:], "got format 9"),
        (lambda data: data[:-7], "breaks off; got its end in the middle"),
        (lambda data: data[:16], "got the end of a tape at epoch 0"),
        (lambda data: data[:16] + b"\xff" * 64, "cannot be read; got a frame of"),
        (lambda data: b"", "breaks off"),
    ],
)
def test_a_damaged_tape_is_refused(cluster, damage, problem):
    recording = captured(cluster, num_shards=1).recording("tape")
    bad = Recording((damage(recording.tapes[0]),))

    with pytest.raises(TapeError, match=problem):
        replayed(cluster, bad)


def test_nobody_who_listens_is_an_error(cluster, tmp_path, monkeypatch):
    from timelyml.operators import tape_writers

    monkeypatch.setattr(tape_writers, "CONNECT_TIMEOUT_S", 0.1)
    flow = Dataflow(num_shards=1)
    flow.source([1]).capture(f"unix:{tmp_path}/nobody.sock")

    if cluster.mode != "processes":  # where the time-out is what the module says
        with pytest.raises(TapeError, match="nobody takes the captured stream"):
            cluster.run(flow)


@pytest.mark.parametrize(
    "place",
    [
        "tcp://127.0.0.1",
        "tcp://example.com:80",
        "ipc:///tmp/socket",
        "unix:/" + "far/" * 27,
        "unix:",
        "",
        ["a", "b"],
        [],
        5,
    ],
)
def test_addresses_that_cannot_be_used_are_refused(place):
    with pytest.raises(ConfigError, match="'capture' has no such place; got"):
        Dataflow().source([1]).capture(place)


def test_streams_in_scopes_are_not_captured():
    def body(stream):
        stream.capture()
        return stream

    with pytest.raises(GraphError, match="got a stream 1 scopes deep"):
        Dataflow().source([1]).iterate(body, max_iterations=2)


def test_a_tape_starts_with_its_magic_number_and_version(cluster):
    (first, *_) = captured(cluster).recording("tape").tapes

    assert first.startswith(b"timelyml tape\n\x01\x00")


@settings(max_examples=50, deadline=None)
@given(
    payloads=st.lists(st.lists(st.integers() | st.text(max_size=5), max_size=9)),
    sizes=st.lists(st.integers(1, 200), min_size=1),
)
def test_bytes_may_come_in_any_pieces(payloads, sizes):
    codec = tape.tape_codec(allow_pickle=False)
    events = [tape.Label(0, 1, 1)]
    for time, payload in enumerate(payloads):
        events.append(tape.Data(time, payload))
        events.append(tape.Data(time, np.arange(time * 700)))
        events.append(tape.Progress(((time, -1), (time + 1, 1))))
    frames = [tape.PREAMBLE]
    for event in events:
        frames += tape.pack(codec, event)
    data = b"".join(frames)

    unpacker = tape.Unpacker(tape.tape_codec(allow_pickle=False), "test")
    found, position = [], 0
    for n in range(len(data)):
        size = sizes[n % len(sizes)]
        found += unpacker.feed(data[position : position + size])
        position += size
        if position >= len(data):
            break
    assert unpacker.is_between_events
    assert repr(found) == repr(events)
