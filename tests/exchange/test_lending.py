"""Large arrays in shared memory between transports, and what becomes of it."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import InvariantError
from timelyml.exchange import (
    Away,
    Lane,
    LinkFailure,
    split_by_destination,
)
from timelyml.exchange.datagrams import close_all, descriptor_path, send_descriptors
from timelyml.exchange.frames import OFFER, Kind, pack_frames, pack_returns, pack_table
from timelyml.exchange.shared_pool import SEALS, Extents, SharedPool

from .samples import TOKEN, cluster, codec, data, payload_of, private, receive, until

ENCODER = codec()
MIB = 1 << 20


def rows_of(mib, value=1.0):
    return np.full((mib * MIB // 1024, 256), value, np.float32)


@contextmanager
def lending(tmp_path, **options):
    """Two transports, the first of which lends to the second."""
    with cluster(private(tmp_path), **options) as (one, two):

        def is_taken():
            one.receive()
            two.receive()
            link = one._links[1]
            if link.broken() is None and link.is_near and not one._lending._offered:
                one.send(1, data(rows_of(1)))
            return one._lending._has_takers

        until(is_taken, [one, two])
        yield one, two


def send(one, two, payload, lane=Lane.BULK):
    """Send a payload and return what arrives."""
    one.send(1, data(payload), lane)
    (incoming,) = receive(two)
    return payload_of(incoming)


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def until_free(one, two):
    """Wait until nobody holds anything of the first one's pool."""

    def is_free():
        one.receive()
        two.receive()
        return not one._lending.used_bytes

    until(is_free, [one, two])


def test_a_lent_array_arrives_equal_and_read_only_and_comes_back(tmp_path):
    rows = np.arange(MIB, dtype=np.float32).reshape(-1, 4)
    with lending(tmp_path) as (one, two):
        before = one.metrics.bytes_lent
        got = send(one, two, {"x": rows, "y": rows[:, 0]})
        assert one.metrics.bytes_lent == before + rows.nbytes + rows.nbytes // 4
        assert np.array_equal(got["x"], rows)
        assert np.array_equal(got["y"], rows[:, 0])
        for array in got.values():
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.setflags(write=True)
        assert one._lending.used_bytes
        last = got["x"][-1]
        del got, array
        assert last[-1] == rows[-1, -1]
        del last
        until_free(one, two)
        assert one.metrics.bytes_sent == two.metrics.bytes_received


def test_blocks_that_are_viewed_stay_and_a_full_pool_is_no_obstacle(tmp_path):
    with lending(tmp_path, pool_bytes=8 * MIB) as (one, two):
        kept = [send(one, two, rows_of(1, value)) for value in range(20)]
        assert one.metrics.bytes_lent >= 7 * MIB
        assert one._lending.used_bytes <= 8 * MIB
        for value, rows in enumerate(kept):
            assert np.all(rows == value)
        lent = one.metrics.bytes_lent
        rows = kept[0][:1]
        kept.clear()
        until(
            lambda: (
                not (one.receive() + two.receive()) and one._lending.used_bytes <= MIB
            ),
            [two, one],
        )
        for _ in range(20):
            assert np.all(send(one, two, rows_of(1, 7)) == 7)
            assert one.receive() == []
        assert one.metrics.bytes_lent > lent + 7 * MIB
        assert np.all(rows == 0)


def test_lent_messages_keep_their_order_among_others(tmp_path):
    with lending(tmp_path, pool_bytes=2 * MIB) as (one, two):
        for number in range(60):
            size = (10, 100_000, 600_000)[number % 3]
            one.send(1, data(np.full(size, number, np.float32)))
        arrived = receive(two, 60)
    assert [payload_of(i)[0] for i in arrived] == list(range(60))


def test_what_was_made_in_shared_memory_is_lent_without_a_copy(tmp_path):
    with lending(tmp_path) as (one, two):
        payload = {"x": np.arange(40_000).reshape(-1, 4), "y": np.arange(10_000) * 0.5}
        shards = np.arange(10_000) % 5
        away = Away(np.array([False, True, False, True, True]), one.shared_memory)
        parts = split_by_destination(payload, shards, 5, away=away)
        expected = split_by_destination(payload, shards, 5)
        assert [shard for shard, _ in parts] == [shard for shard, _ in expected]
        before = one._lending.used_bytes
        for (shard, part), (_, wanted) in zip(parts, expected, strict=True):
            for name, column in part.items():
                assert np.array_equal(column, wanted[name])
                assert column.dtype == wanted[name].dtype
                found = one._lending._pool._find(column.data.cast("B"))
                assert (found is not None) == away.shards[shard]
        got = send(one, two, parts[1][1])
        assert one._lending.used_bytes == before
        del found, part, column
        parts.clear()
        assert np.array_equal(got["y"], expected[1][1]["y"])
        del got
        until_free(one, two)


def test_columns_that_are_no_plain_bytes_are_gathered_elsewhere():
    words = [f"word {n}" for n in range(2_000)]
    masked = np.ma.masked_array(np.arange(2_000), np.arange(2_000) % 3 == 0)
    columns = [
        np.array(words, object),
        np.array(words, np.dtypes.StringDType()),
        np.array([(n, word) for n, word in enumerate(words)], "i4, O"),
        masked,
    ]
    shards = np.arange(2_000) % 4
    away = Away(np.arange(4) % 2 == 1, lambda size: np.zeros(size, np.uint8))
    parts = split_by_destination(columns[0], shards, 4, away=away)
    assert [part[1] for _, part in parts] == [f"word {n}" for n in range(4, 8)]
    for column in columns:
        parts = split_by_destination({"x": column}, shards, 4, away=away)
        expected = split_by_destination({"x": column}, shards, 4)
        for (_, part), (_, wanted) in zip(parts, expected, strict=True):
            assert type(part["x"]) is type(column)
            assert part["x"].tolist() == wanted["x"].tolist()


def test_rows_are_gathered_once_where_there_is_no_such_memory():
    rows = np.arange(40_000).reshape(-1, 4)
    away = Away(np.arange(4) % 2 == 1, lambda size: None)
    parts = split_by_destination(rows, np.arange(10_000) % 4, 4, away=away)
    assert len({id(part.base) for _, part in parts}) == 1


def test_memory_is_offered_again_to_who_had_no_room_for_the_offer(tmp_path):
    with cluster(private(tmp_path)) as (one, two):
        until(lambda: one._links[1].broken() is None and one._links[1].is_near, [one])
        path = descriptor_path(two.endpoint.control)
        ends = os.pipe()
        with pytest.raises(BlockingIOError):
            deque(send_descriptors(path, TOKEN, 5, ends) for _ in count())
        close_all(ends)
        assert np.all(send(one, two, rows_of(1)) == 1)
        assert not one._lending._loans
        close_all(two._inbox.views._descriptors.take(5))
        assert np.all(send(one, two, rows_of(1)) == 1)
        until(lambda: not one.receive() and one._lending._has_takers, [one, two])


def test_a_system_without_such_memory_sends_all_by_zeromq(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with cluster(private(tmp_path)) as (one, two):
            until(
                lambda: (
                    two.receive()
                    or one.receive()
                    or one._links[1].broken()
                    or one._links[1].is_near
                ),
                [one],
            )
            for value in range(3):
                assert np.all(send(one, two, rows_of(1, value)) == value)
            assert one._lending._offered == {1}
            assert one.metrics.bytes_lent == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_tcp_lends_nothing():
    with cluster("tcp://127.0.0.1:*") as (one, two):
        for value in range(3):
            assert np.all(send(one, two, rows_of(1, value)) == value)
        assert not one._links[1].is_near
        assert one.shared_memory(MIB) is None
        assert one.metrics.bytes_lent == 0


PEER = """
import os, sys, time
import numpy as np
from pathlib import Path
from tests.exchange.samples import *
bind, control, bulk, is_sender = sys.argv[1:]
peer = ZmqTransport(1, codec=codec(), token=TOKEN, bind=bind, silence_s=PATIENCE_S)
peer.connect(0, Endpoint(control, bulk))
peer.send(0, Connect((peer.endpoint,)))
kept = []
while True:
    kept += peer.receive()
    if is_sender == "True":
        peer.send(0, data(np.full(100_000, 5.0)))
    peer.wait(0.05)
"""


@contextmanager
def process(one, tmp_path, *, is_sender):
    """A process that sends, or keeps what it is sent; connected with `one`."""
    end = one.endpoint
    arguments = [private(tmp_path), end.control, end.bulk, str(is_sender)]
    with subprocess.Popen([sys.executable, "-c", PEER, *arguments]) as peer:
        try:
            (hello,) = receive(one)
            one.connect(1, hello.message.endpoints[0])
            yield peer
        finally:
            peer.send_signal(signal.SIGKILL)


def test_the_memory_of_a_killed_sender_stays_until_its_last_view_is_gone(tmp_path):
    with cluster(private(tmp_path), count=1) as (one,):
        with process(one, tmp_path, is_sender=True) as peer:
            views = one._inbox.views
            arrived = []
            until(lambda: arrived.extend(one.receive()) or bool(views._views), [one])
            (*_, got) = map(payload_of, arrived)
            peer.send_signal(signal.SIGKILL)
            until(
                lambda: any(type(i.message) is LinkFailure for i in one.receive()),
                [one],
            )
        assert np.all(got == 5.0)
        assert not views._mapped
        arrived.clear()
        assert np.all(got[5:] == 5.0)
        descriptors = num_descriptors()
        del got
        assert num_descriptors() == descriptors - 2


def test_what_a_killed_receiver_had_is_used_again(tmp_path):
    with cluster(private(tmp_path), count=1) as (one,):
        with process(one, tmp_path, is_sender=False) as peer:

            def is_lent():
                one.receive()
                one.send(1, data(rows_of(1)))
                return one.metrics.bytes_lent > 8 * MIB

            until(is_lent, [one])
            one._lending.lose(1)
            assert not one._lending._settle()
            assert one._lending.used_bytes >= 8 * MIB
            peer.send_signal(signal.SIGKILL)
        assert one._lending._settle()
        assert one._lending.used_bytes == 0


FORKS = """
import os, sys
from pathlib import Path
from tests.exchange.test_lending import *

def child(check):
    forked = os.fork()
    if not forked:
        os._exit(0 if check() else 1)
    return forked

def ended_well(forked):
    return os.waitpid(forked, 0)[1] == 0

with lending(Path(sys.argv[1])) as (one, two):
    got = send(one, two, rows_of(1, 3))
    ready, go = os.pipe()
    forked = child(lambda: os.read(ready, 1) and np.all(got == 3))
    del got
    for _ in range(3):
        send(one, two, rows_of(1, 4))
    os.write(go, b"x")
    assert ended_well(forked), "what the fork sees has changed"
    two._lending.rest()
    assert one.receive() == []
    assert one._lending.used_bytes >= MIB, "the fork's block is used again"
    forked = child(lambda: one.shared_memory(MIB) is None)
    assert ended_well(forked), "the fork writes where its parent does"
    forked = child(lambda: os.read(ready, 1) and one._lending._pool.trim() is None)
    mine = one.shared_memory(MIB)
    mine[:] = 7
    os.write(go, b"x")
    assert ended_well(forked)
    assert np.all(mine == 7), "the fork gives back what its parent uses"
"""


def test_forks_keep_what_they_see_and_write_nothing(tmp_path):
    # In a process of its own, which has not loaded JAX: that warns of forks.
    program = [sys.executable, "-c", FORKS, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@contextmanager
def liar(transport):
    """A plain datagram socket, and a function that passes descriptors."""
    stem = transport.endpoint.control.removeprefix("ipc://").removesuffix("control")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect(stem + "dgram")

        def say(sequence, kind, body):
            number = (Lane.CONTROL, kind, 5, sequence)
            (frame,) = pack_frames(number, TOKEN, body, [])
            datagrams.send(struct.pack("<Q", 0) + frame)

        yield say, stem + "fds"


def memory_of(size, seals=SEALS):
    memory = os.memfd_create("liar", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, size)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    return memory


def offer(say, path, size=MIB, *, said=None, seals=SEALS):
    memory = memory_of(size, seals)
    ends = os.pipe()
    send_descriptors(path, TOKEN, 5, [memory, ends[1]])
    for descriptor in (memory, *ends):
        os.close(descriptor)
    say(0, Kind.OFFER, OFFER.pack(size if said is None else said))


BODY = ENCODER.encode("hello")[0]


@pytest.mark.parametrize(
    ("kind", "body", "wrong"),
    [
        (Kind.LENT, b"", "a table of loans is short"),
        (Kind.LENT, struct.pack("<IQ", 1 << 31, 0), "a table of loans is short"),
        (Kind.LENT, pack_table(2**64 - 1, [(0, 1)] * 2), "loans have no numbers"),
        (Kind.LENT, pack_table(0, [(MIB, 1)]), "outside of its sender's memory"),
        (Kind.LENT, pack_table(0, [(0, MIB + 1)]), "outside of its sender's memory"),
        (Kind.LENT, pack_table(0, [(1 << 63, 1 << 63)]), "outside of its sender's"),
        (Kind.LENT, pack_table(0, [(5, 0)]), "outside of its sender's memory"),
        (Kind.LENT, pack_table(0, [(0, 10_000)]), "cannot be decoded"),
        (Kind.OFFER, OFFER.pack(MIB), "an offer of memory is wrong"),
        (Kind.OFFER, b"more", "an offer of memory is wrong"),
        (Kind.TAKEN, b"", "a frame is out of place"),
        (Kind.RETURNED, pack_returns([0]), "a frame is out of place"),
        (77, b"", "a frame is out of place"),
    ],
)
def test_what_no_lender_says_fails_its_link_and_is_counted(alone, kind, body, wrong):
    with liar(alone) as (say, path):
        offer(say, path)
        until(lambda: not alone.receive() and bool(alone._inbox.views._mapped), [alone])
        say(1, kind, body)
        ((peer, failure),) = receive(alone)
        say(2, Kind.MESSAGE, BODY)
        refused = alone.metrics.frames_refused
        until(lambda: not alone.receive() and refused["lost"] == 1, [alone])
    assert peer == 5
    assert wrong in failure.reason
    assert alone.metrics.frames_refused["link"] == 1


def test_a_return_of_what_was_not_lent_fails_the_link(tmp_path):
    with lending(tmp_path, linger_s=0.1) as (one, two):
        kept = send(one, two, rows_of(1, 3))
        used = one._lending.used_bytes
        two._tell(0, Kind.RETURNED, pack_returns([99]))
        ((peer, failure),) = receive(one)
        assert peer == 1
        assert "a loan comes back that is none; got 99" in failure.reason
        assert one._lending.used_bytes == used
        assert np.all(kept == 3)


def test_buffers_of_who_offered_nothing_are_refused(alone):
    with liar(alone) as (say, _):
        say(0, Kind.LENT, pack_table(0, [(0, 8192)]) + BODY)
        ((_, failure),) = receive(alone)
    assert "outside of its sender's memory" in failure.reason


def test_a_loan_that_comes_twice_is_refused_while_it_has_a_view(alone):
    body, _ = ENCODER.encode(np.zeros(MIB // 8))
    with liar(alone) as (say, path):
        offer(say, path)
        until(lambda: not alone.receive() and bool(alone._inbox.views._mapped), [alone])
        say(1, Kind.LENT, pack_table(9, [(0, MIB)]) + body)
        ((_, array),) = receive(alone)
        say(2, Kind.LENT, pack_table(9, [(0, MIB)]) + body)
        ((_, failure),) = receive(alone)
    assert "a loan comes twice" in failure.reason
    assert not array.any()


@pytest.mark.parametrize(
    "wrong",
    [{"said": 2 * MIB}, {"seals": fcntl.F_SEAL_GROW}, {"size": 0}],
    ids=["size", "shrinks", "empty"],
)
def test_memory_that_could_hurt_is_not_mapped(alone, wrong):
    descriptors = num_descriptors()
    with liar(alone) as (say, path):
        offer(say, path, **wrong)
        say(1, Kind.MESSAGE, BODY)
        assert receive(alone) == [(5, "hello")]
        assert not alone._inbox.views._mapped
    assert alone.metrics.frames_refused == {"memory": 1}
    assert num_descriptors() == descriptors


def test_descriptors_without_the_token_or_an_offer_are_closed(alone):
    with liar(alone) as (say, path):
        descriptors = num_descriptors()
        null = os.open(os.devnull, os.O_RDONLY)
        send_descriptors(path, b"x" * 16, 5, [null])
        send_descriptors(path, TOKEN, 6, [null, null])
        send_descriptors(path, TOKEN, 5, [null] * 3)
        os.close(null)
        say(0, Kind.OFFER, OFFER.pack(MIB))
        say(1, Kind.MESSAGE, BODY)
        assert receive(alone) == [(5, "hello")]
        assert num_descriptors() == descriptors + 2
    assert alone.metrics.frames_refused == {"memory": 1}


def test_a_pool_gives_free_pages_back_and_takes_them_again():
    pool = SharedPool(4 * MIB)
    with closing(pool):
        first, second = (pool.empty(MIB) for _ in range(2))
        assert pool.empty(3 * MIB) is None
        for array in (first, second):
            array[:] = 1
        del first, array
        pool.trim()
        assert os.fstat(pool.fd).st_blocks * 512 == MIB
        assert np.all(second == 1)
        third = pool.empty(MIB)
        assert not third.any()
        kept = os.dup(pool.fd)
        del third
    assert os.fstat(kept).st_blocks * 512 == MIB
    os.close(kept)


@given(st.lists(st.one_of(st.integers(1, 40), st.just(0)), max_size=60))
def test_ranges_never_overlap_and_join_again_when_they_are_given_back(steps):
    extents, taken = Extents(100), {}
    for size in steps:
        if size:
            start = extents.take(size)
            fits = any(free >= size for _, free in extents.free())
            if start is None:
                assert not fits
                continue
            assert all(
                start + size <= other or other + length <= start
                for other, length in taken.items()
            )
            taken[start] = size
        elif taken:
            start = min(taken, key=lambda at: at * 7919 % 101)
            extents.give(start, taken.pop(start))
        free = sum(size for _, size in extents.free())
        assert free + sum(taken.values()) == 100
    for start, size in taken.items():
        extents.give(start, size)
    assert extents.free() == [(0, 100)]
    with pytest.raises(InvariantError, match="memory is given back twice"):
        extents.give(10, 5)
