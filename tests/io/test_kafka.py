"""Bytewax's Kafka connectors against the broker that librdkafka brings along."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.io.world import Interrupted
from timelyml import Dataflow

confluent_kafka = pytest.importorskip("confluent_kafka", reason="extra 'kafka'")
pytest.importorskip("bytewax", reason="no wheels for this Python")

NUM_PARTITIONS = 4  # what the mock broker gives a topic
TIMEOUT_S = 20


@pytest.fixture
def broker():
    """A mock broker; it lives as long as the client that made it."""
    client = confluent_kafka.Producer({"test.mock.num.brokers": 1})
    (server,) = client.list_topics(timeout=TIMEOUT_S).brokers.values()
    address = f"{server.host}:{server.port}"
    for topic in ("words", "answers"):  # made by being asked for
        partitions = (
            client.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions
        )
        assert len(partitions) == NUM_PARTITIONS
    yield address
    client.flush(TIMEOUT_S)


def fill(address, count):
    """Produce numbered values in all partitions of a topic."""
    producer = confluent_kafka.Producer({"bootstrap.servers": address})
    for n in range(count):
        value = str(n).encode()
        producer.produce("words", value, partition=n % NUM_PARTITIONS)
    assert producer.flush(TIMEOUT_S) == 0


def source(address, **options):
    from bytewax.connectors.kafka import KafkaSource

    options.setdefault("tail", False)
    return KafkaSource([address], ["words"], batch_size=5, **options)


def value_of(message):
    return int(message.value)


def test_partitions_of_a_topic_are_shared_and_read_to_their_ends(cluster, broker):
    fill(broker, 100)
    flow = Dataflow(num_shards=2)

    def with_shard(shard, delivery):
        read = [(shard.index, m.partition, value_of(m)) for m in delivery.payload]
        shard.output().send(delivery.time, read)

    flow.read(source(broker)).unary(with_shard).collect()

    records = cluster.run(flow)["out"]

    assert sorted(value for _, _, value in records) == list(range(100))
    readers = {(shard, partition) for shard, partition, _ in records}
    assert Counter(shard for shard, _ in readers) == {0: 2, 1: 2}


def test_what_is_written_to_a_topic_can_be_read_from_it(cluster, broker):
    from bytewax.connectors.kafka import KafkaSink, KafkaSinkMessage, KafkaSource

    flow = Dataflow(num_shards=2)
    words = flow.source([f"word{n}" for n in range(50)]).exchange(lambda word: word)
    messages = words.map(lambda w: KafkaSinkMessage(w.encode(), w.upper().encode()))
    messages.write(KafkaSink([broker], "answers"))
    cluster.run(flow)

    flow = Dataflow()
    answers = flow.read(KafkaSource([broker], ["answers"], tail=False))
    answers.map(lambda m: (m.key.decode(), m.value.decode())).collect()

    expected = [(f"word{n}", f"WORD{n}") for n in range(50)]
    assert sorted(cluster.run(flow)["out"]) == sorted(expected)


def test_a_topic_that_grows_is_followed_until_the_run_is_stopped(cluster, broker):
    flow = Dataflow()
    flow.read(source(broker, tail=True), epoch_every=1).map(value_of).collect()
    run = cluster.start(flow)

    fill(broker, 40)
    with run.record.changed:
        assert run.record.changed.wait_for(
            lambda: sum(len(b) for _, _, b in run.record._batches["out"]) == 40,
            TIMEOUT_S,
        )
    run.stop(timeout_s=TIMEOUT_S)

    assert sorted(run.result()["out"]) == list(range(40))


def test_offsets_that_a_run_left_let_another_go_on_after_them(broker):
    def flow(*, tail):
        made = Dataflow(num_shards=2)
        read = made.read(source(broker, tail=tail), epoch_every=1, name="words")
        read.map(value_of).collect()
        return made

    def values(world):
        return sorted(value for _, _, batch in world._collected() for value in batch)

    fill(broker, 40)
    first, second = Interrupted(2), Interrupted(2)
    first.begin(flow(tail=True))
    first.step_until(lambda: len(values(first)) == 40)
    states = first.export("words")
    fill(broker, 20)
    second.begin(flow(tail=False), states)
    second.step_until(lambda: len(values(second)) >= 20)

    assert values(second) == list(range(20))
    first.stop()
    second.stop()
