"""The simulated network keeps the order of each link, and breaks as it is told."""

from __future__ import annotations

import numpy as np
import pytest

from timelyml.errors import PeerLostError
from timelyml.exchange import Lane, LinkFailure
from timelyml.runtime.messages import (
    Block,
    CreditMessage,
    DataMessage,
    Part,
    Start,
)
from timelyml.runtime.shipping import worker_codec
from timelyml.runtime.simulation.network import LinkKey, SimNetwork


def _network(num_peers=3, codec=None):
    network = SimNetwork(codec)
    return network, [network.transport(index) for index in range(num_peers)]


def _deliver_all(network):
    while network.busy_links:
        network.deliver(network.busy_links[0])


def _starts(transport):
    return [(peer, message) for peer, message in transport.receive()]


def test_a_link_is_first_in_first_out():
    network, (zero, one, _) = _network()
    for generation in range(5):
        zero.send(1, Start(generation))

    _deliver_all(network)

    assert _starts(one) == [(0, Start(generation)) for generation in range(5)]


def test_links_and_lanes_do_not_wait_for_each_other():
    network, (zero, one, two) = _network()
    zero.send(1, Start(0), Lane.BULK)
    zero.send(1, Start(1))
    two.send(1, Start(2))

    for link in (LinkKey(2, 1, Lane.CONTROL), LinkKey(0, 1, Lane.CONTROL)):
        network.deliver(link)

    assert _starts(one) == [(2, Start(2)), (0, Start(1))]
    assert network.busy_links == [LinkKey(0, 1, Lane.BULK)]


def test_what_arrives_is_a_read_only_copy():
    network, (zero, one, _) = _network(codec=worker_codec())
    rows = np.arange(10_000)
    part = Part(0, 0, 10_000, True, rows.nbytes, rows)
    zero.send(1, DataMessage(1, (Block(0, (1, 2), (part,)),)), Lane.BULK)

    _deliver_all(network)

    ((_, message),) = one.receive()
    (block,) = message.blocks
    received = block.parts[0].payload
    assert block.time == (1, 2)
    assert np.array_equal(received, rows)
    assert not np.shares_memory(received, rows)
    assert not received.flags.writeable


def test_a_cut_link_loses_a_suffix_then_tells_then_stays_silent():
    network, (zero, one, _) = _network()
    for generation in range(5):
        zero.send(1, Start(generation))
    network.cut(0, 1, "it was cut", keep=lambda count: 2, is_known=False)
    zero.send(1, Start(9))

    _deliver_all(network)

    assert _starts(one) == [
        (0, Start(0)),
        (0, Start(1)),
        (0, LinkFailure("it was cut")),
    ]


def test_a_sender_that_knows_of_the_cut_may_not_send():
    network, (zero, one, _) = _network()
    network.cut(0, 1, "it was cut", keep=lambda count: count, is_known=True)

    with pytest.raises(PeerLostError, match="peer 1 is gone"):
        zero.send(1, Start(0))
    one.send(0, Start(1))  # the way back is another link


def test_nothing_of_the_other_lane_follows_a_failure():
    network, (zero, one, _) = _network()
    zero.send(1, Start(0), Lane.BULK)
    network.cut(0, 1, "it was cut", keep=lambda count: count, is_known=False)

    network.deliver(LinkKey(0, 1, Lane.CONTROL))

    assert network.busy_links == []
    assert _starts(one) == [(0, LinkFailure("it was cut"))]


def test_a_replaced_peer_hears_nothing_of_what_was_meant_for_the_old_one():
    network, (zero, _, two) = _network()
    zero.send(1, Start(0))

    fresh = network.replace(1)
    two.send(1, Start(1))
    fresh.send(0, Start(2))

    assert network.busy_links == []
    assert not fresh.has_mail


def test_bytes_are_counted_per_lane():
    network, (zero, one, _) = _network(codec=worker_codec())
    zero.send(1, CreditMessage(1, ((0, 10),)))

    _deliver_all(network)

    assert zero.metrics.bytes_sent == one.metrics.bytes_received
    assert zero.metrics.bytes_sent[Lane.CONTROL] > 0
    assert zero.metrics.bytes_sent[Lane.BULK] == 0
