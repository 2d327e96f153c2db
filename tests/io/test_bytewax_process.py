"""Dataflows that Bytewax runs in processes of its own, and that feed a stream here."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.io.world import Interrupted
from timelyml import Cluster, Dataflow, Logic
from timelyml.errors import (
    ConfigError,
    GraphError,
    PeerError,
    RunStoppedError,
    ShippingError,
)
from timelyml.exchange import Codec
from timelyml.graph import Exchange
from timelyml.io.bytewax_feed import QUEUE_TAG
from timelyml.io.bytewax_messages import MESSAGES, FedBlock
from timelyml.io.bytewax_positions import Live
from timelyml.runtime.effects import Ended
from timelyml.runtime.shipping import dumps
from timelyml.testing import eventually

pytest.importorskip("bytewax", reason="no wheels for this Python")

WITHIN_S = 15.0


def sending(items, *, fn=None, batch_size=1):
    """A build function: the items, by way of a map."""

    def build(send):
        import bytewax.operators as op
        from bytewax.dataflow import Dataflow
        from bytewax.testing import TestingSource

        flow = Dataflow("fed")
        stream = op.input("items", flow, TestingSource(items, batch_size))
        send(stream if fn is None else op.map("apply", stream, fn))
        return flow

    return build


def endless(path, make=lambda n: n, most=None):
    """A build function: items without end; tells its process and how many it made."""

    def build(send):
        import bytewax.operators as op
        from bytewax.dataflow import Dataflow
        from bytewax.inputs import DynamicSource, StatelessSourcePartition

        class Partition(StatelessSourcePartition):
            num_made = 0

            def next_batch(self):
                if self.num_made == most:
                    raise StopIteration
                self.num_made += 1
                path.with_suffix(".new").write_text(f"{os.getpid()} {self.num_made}")
                path.with_suffix(".new").rename(path)
                return [make(self.num_made)]

        class Endless(DynamicSource):
            def build(self, *_):
                return Partition()

        flow = Dataflow("endless")
        send(op.input("items", flow, Endless()))
        return flow

    return build


def told(path):
    """The process of `endless`, and how many items it has made."""
    assert eventually(path.exists)
    process, count = path.read_text().split()
    return int(process), int(count)


def is_alive(process):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def test_records_come_at_their_epochs_of_bytewax(cluster):
    flow = Dataflow()
    build = sending(range(7), fn=lambda n: (n, str(n)), batch_size=3)
    flow.bytewax(build, epoch_interval_s=0).collect()

    assert cluster.run(flow).batches("out") == [
        (1, [(0, "0"), (1, "1"), (2, "2")]),
        (2, [(3, "3"), (4, "4"), (5, "5")]),
        (3, [(6, "6")]),
    ]


def test_columns_come_as_they_were_sent(cluster):
    def columns(n):
        return {"x": np.full((n, 3000), n), "n": np.arange(n)}

    flow = Dataflow()
    build = sending(range(1, 4), fn=columns)
    flow.bytewax(build, columns=True, epoch_interval_s=0).collect()

    batches = cluster.run(flow).batches("out")

    assert [time for time, _ in batches] == [1, 2, 3]
    for n, (_, batch) in enumerate(batches, start=1):
        np.testing.assert_array_equal(batch["x"], np.full((n, 3000), n))
        np.testing.assert_array_equal(batch["n"], np.arange(n))
        assert not batch["x"].flags.writeable


def fire(shard, delivery):
    shard.notify_at(delivery.time)
    shard.state.setdefault(delivery.time, []).append(delivery.payload)


def send_sum(shard, time):
    blocks = shard.state.pop(time)
    total = sum(int(block.sum()) for block in blocks)
    shard.output().send(time, [(shard.index, len(blocks), total)])


def test_items_of_a_regular_stream_are_epochs_with_an_even_block_for_each_shard(
    cluster,
):
    items = [np.arange(n) for n in (4, 0, 1, 40_000)]
    flow = Dataflow(num_shards=2)
    fed = flow.bytewax(
        sending(items, batch_size=3), columns=True, regular=True, credit_bytes=160_000
    )
    (sums,) = flow.operator(
        Logic(on_batch=fire, on_notify=send_sum),
        inputs=[fed],
        pacts=[Exchange(lambda rows, n: rows % n, dense=True)],
        num_shards=2,
        states=("state",),
        regular=True,
    )
    sums.collect()

    batches = cluster.run(flow).batches("out")

    found = {(time, shard): total for time, [(shard, _, total)] in batches}
    assert found == {
        (time, shard): int(item[item % 2 == shard].sum())
        for time, item in enumerate(items)
        for shard in (0, 1)
    }
    pieces = {time: count for time, [(_, count, _)] in batches}
    assert pieces == {0: 1, 1: 1, 2: 1, 3: 8}


def test_records_of_a_regular_stream_are_epochs_too(cluster):
    flow = Dataflow()
    flow.bytewax(sending("abc", batch_size=2), regular=True).collect()

    assert cluster.run(flow).batches("out") == [(0, ["a"]), (1, ["b"]), (2, ["c"])]


def test_several_processes_cannot_be_regular():
    with pytest.raises(ConfigError, match="'bytewax' cannot be regular; got 2 proc"):
        Dataflow().bytewax(sends_nothing, processes=2, regular=True)


def test_arrays_travel_without_pickle_and_without_being_copied_into_the_body():
    block = FedBlock(3, 80_000, {"x": np.zeros(10_000), "n": np.arange(5)})
    records = FedBlock(3, 80_000, [np.ones(10_000), ("word", np.arange(5))])
    refuses_pickle = Codec(MESSAGES, allow_pickle=False)

    for message in (block, records):
        body, buffers = Codec(MESSAGES).encode(message)
        decoded = refuses_pickle.decode(body, buffers)

        assert [len(buffer) for buffer in buffers] == [80_000]
        assert len(body) < 400
        assert decoded.epoch == 3
    np.testing.assert_array_equal(decoded.payload[1][1], np.arange(5))


def test_two_processes_feed_two_shards_and_share_their_epochs(cluster, tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.txt").write_text(
            "".join(f"{index}:{n}\n" for n in range(9))
        )

    def build(send):
        import bytewax.operators as op
        from bytewax.connectors.files import DirSource
        from bytewax.dataflow import Dataflow

        flow = Dataflow("files")
        send(op.input("lines", flow, DirSource(tmp_path, "*.txt", batch_size=2)))
        return flow

    def with_shard(shard, delivery):
        records = [(shard.index, record) for record in delivery.payload]
        shard.output().send(delivery.time, records)

    flow = Dataflow()
    flow.bytewax(build, processes=2).unary(with_shard).collect()

    records = cluster.run(flow)["out"]

    expected = [f"{index}:{n}" for index in range(4) for n in range(9)]
    assert sorted(record for _, record in records) == expected
    assert {shard for shard, _ in records} == {0, 1}


def test_a_silent_process_does_not_hold_back_the_epochs_of_others(cluster):
    flow = Dataflow()
    flow.bytewax(sending(range(30)), processes=2, epoch_interval_s=0).collect()

    assert cluster.run(flow, max_epochs_ahead=3)["out"] == list(range(30))


def test_a_slow_consumer_holds_the_source_back_and_little_waits(cluster, tmp_path):
    path = tmp_path / "made"
    item_bytes, credit_bytes, num_items = 100_000, 1_000_000, 150

    def compare(shard, delivery):
        until = shard.now() + 0.005
        while shard.now() < until:
            yield
        num_here = int(delivery.payload[-1][0])
        _, num_made = told(path)
        shard.output().send(delivery.time, [num_made - num_here])

    messages = []
    flow = Dataflow()
    build = endless(path, lambda n: np.full(item_bytes // 8, n), num_items)
    flow.bytewax(build, credit_bytes=credit_bytes).unary(compare).collect()

    result = cluster.run(
        flow,
        credit_bytes=credit_bytes,
        on_message=lambda *message: messages.append(message),
    )

    (peak,) = [body for _, _, tag, body in messages if tag == QUEUE_TAG]
    assert len(result["out"]) == num_items
    assert 0 < peak <= credit_bytes
    # On the link, in the channel, and what each end has in hand.
    assert max(result["out"]) * item_bytes <= 2 * credit_bytes + 3 * item_bytes


def test_a_killed_process_fails_the_run_with_its_name_within_seconds(cluster, tmp_path):
    flow = Dataflow()
    flow.bytewax(endless(tmp_path / "made"), name="tokens").probe()
    run = cluster.start(flow)
    process, _ = told(tmp_path / "made")

    killed = time.monotonic()
    os.kill(process, signal.SIGKILL)
    with pytest.raises(PeerError, match="process 0 of 'tokens' was killed by SIGKILL"):
        run.result(timeout_s=50)
    assert time.monotonic() - killed < WITHIN_S


def linger(shard, delivery):
    """A consumer that takes its time for each block."""
    until = shard.now() + 0.1
    while shard.now() < until:
        yield


def test_a_killed_process_fails_the_run_before_all_that_it_sent_was_worked_off(
    cluster, tmp_path
):
    flow = Dataflow()
    fed = flow.bytewax(endless(tmp_path / "made"), epoch_interval_s=0, name="tokens")
    flow.operator(Logic(on_batch=linger), inputs=[fed], outputs=0)
    run = cluster.start(flow, max_epochs_ahead=2)
    assert eventually(lambda: told(tmp_path / "made")[1] >= 500, 20)
    process, _ = told(tmp_path / "made")

    killed = time.monotonic()
    os.kill(process, signal.SIGKILL)
    with pytest.raises(PeerError, match="process 0 of 'tokens' was killed by SIGKILL"):
        run.result(timeout_s=50)
    assert time.monotonic() - killed < WITHIN_S


def test_a_process_ends_within_seconds_of_the_worker_that_it_feeds(tmp_path):
    flow = Dataflow()
    flow.bytewax(endless(tmp_path / "made"), name="tokens").probe()
    with Cluster(1) as cluster:
        run = flow.start(cluster=cluster)
        process, _ = told(tmp_path / "made")
        worker = int(
            Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
        )

        os.kill(worker, signal.SIGKILL)

        with pytest.raises(PeerError, match=r"worker 0 .* was killed by SIGKILL"):
            run.result(timeout_s=20)
        assert eventually(lambda: not is_alive(process), WITHIN_S)


@pytest.mark.parametrize("way", ["stop", "cancel"])
def test_a_process_ends_with_the_run(cluster, tmp_path, way):
    flow = Dataflow()
    flow.bytewax(endless(tmp_path / "made"), name="tokens").probe()
    run = cluster.start(flow)
    process, _ = told(tmp_path / "made")

    getattr(run, way)()

    assert eventually(lambda: not is_alive(process), WITHIN_S)
    if way == "cancel":
        with pytest.raises(RunStoppedError, match="cancelled"):
            run.result()


def test_an_exception_comes_with_its_type_its_step_and_its_traceback(cluster):
    def fail_at_three(n):
        return {0: 1, 1: 1, 2: 1}[n]

    flow = Dataflow()
    flow.bytewax(sending(range(9), fn=fail_at_three), name="tokens").collect()

    with pytest.raises(
        KeyError, match="operator 'tokens' failed on worker 0"
    ) as caught:
        cluster.run(flow)
    (note,) = caught.value.__notes__
    assert "in bytewax process 0 of 'tokens'" in note
    assert 'step "fed.apply.flat_map_batch"' in note
    assert "in fail_at_three" in note


def sends_nothing(send):
    from bytewax.dataflow import Dataflow

    return Dataflow("empty")


def returns_nothing(send):
    sending([1])(send)


def test_a_record_that_does_not_unpickle_fails_the_run_with_what_its_class_raised(
    cluster,
):
    def sticky(n):
        class Sticky:
            def __setstate__(self, state):
                raise LookupError("does not come back")

        record = Sticky()
        record.n = n
        return record

    flow = Dataflow(num_shards=1)
    flow.bytewax(sending(range(3), fn=sticky), name="tokens").collect()
    match = r"operator 'tokens' failed on worker 0.*: LookupError: does not come back"
    with pytest.raises(LookupError, match=match) as got:
        cluster.run(flow)
    assert "a record that does not unpickle" in got.value.traceback_text


@pytest.mark.parametrize(
    ("build", "got"), [(sends_nothing, "0 calls"), (returns_nothing, "a NoneType")]
)
def test_a_build_function_that_does_not_fit_is_an_error_that_says_how(build, got):
    flow = Dataflow()
    flow.bytewax(build, name="tokens").collect()

    with pytest.raises(ConfigError, match=f"function of 'tokens' does not fit.*{got}"):
        flow.run(timeout_s=20)


def test_a_build_function_that_cannot_be_called_or_shipped_is_refused_at_once():
    lock = threading.Lock()

    with pytest.raises(GraphError, match="'bytewax' needs a function for 'build'"):
        Dataflow().bytewax("build")
    with pytest.raises(ShippingError, match="'tokens' cannot ship its build function"):
        Dataflow().bytewax(lambda send: lock, name="tokens")


@pytest.mark.parametrize(
    ("option", "value"),
    [("processes", 0), ("credit_bytes", 0), ("epoch_interval_s", -1)],
)
def test_options_out_of_range_are_refused(option, value):
    with pytest.raises(ConfigError, match=f"'{option}' out of range"):
        Dataflow().bytewax(sends_nothing, **{option: value})


def test_what_bytewax_prints_is_not_mixed_with_results(capfd):
    flow = Dataflow()
    flow.bytewax(sending([1], fn=lambda n: print("seen", n))).collect()

    flow.run(timeout_s=20)

    assert capfd.readouterr().out == ""


def test_a_bytewax_dataflow_is_not_begun_again_elsewhere():
    flow = Dataflow()
    flow.bytewax(sending([1]), name="tokens").collect()
    begun = {"live": Live()}, {}
    states = dict(zip(("state", "schema"), map(dumps, begun), strict=True))
    world = Interrupted(1)

    world.begin(flow, {("tokens", 0): states})
    world.step_until(lambda: world.effects and isinstance(world.effects[-1], Ended))

    with pytest.raises(ConfigError, match="'tokens' cannot go on with what was begun"):
        raise world.effects[-1].error
