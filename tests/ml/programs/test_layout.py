"""Layouts and moves against numpy, and their cost against the number of devices."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from timelyml.ml.functions import LogicalMesh
from timelyml.ml.programs import Place
from timelyml.ml.programs.layout import Layout, Move


def at(array, index):
    return array[(*(slice(*each) for each in index), ...)]


@st.composite
def layouts(draw, shape):
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    names = tuple("abc"[: len(sizes)])
    mesh = LogicalMesh(names, tuple(sizes))
    free = draw(st.permutations(names))
    spec = []
    for length in shape:
        taken = []
        while free and draw(st.booleans()):
            if length % (math.prod(mesh.sizes[n] for n in [*taken, free[0]])):
                break
            taken.append(free.pop(0))
        spec.append(tuple(taken) if len(taken) != 1 else taken[0])
    return Layout(mesh, tuple(each or None for each in spec), shape)


@st.composite
def places(draw, layout, hosts):
    num_devices = layout.mesh.size
    chosen = draw(
        st.lists(st.sampled_from(hosts), min_size=num_devices, max_size=num_devices)
    )
    return Place("island", tuple(map(str, range(num_devices))), tuple(chosen))


@st.composite
def moves(draw):
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 6, 12, 24]), max_size=3)))
    source, target = draw(layouts(shape)), draw(layouts(shape))
    return Move(
        source,
        draw(places(source, "stu")),
        target,
        draw(places(target, "tuvw")),
    )


@given(moves())
def test_pieces_put_each_element_where_it_belongs_once(move):
    whole = np.arange(math.prod(move.source.shape)).reshape(move.source.shape)
    held = {
        shard: at(whole, move.source.index(move.source.block_of(shard)))
        for shard in range(move.source.mesh.size)
    }
    messages = {
        (host, other): [at(held[piece.source], piece.source_index) for piece in pieces]
        for host in move.source_place.shards_by_host
        for other, pieces in move.sends(host).items()
    }
    for host, shards in move.target_place.shards_by_host.items():
        blocks = {shard: move.target.block_of(shard) for shard in shards}
        indices = {shard: move.target.index(block) for shard, block in blocks.items()}
        built = {shard: np.full_like(at(whole, indices[shard]), -1) for shard in shards}
        num_writes = {shard: np.zeros_like(each) for shard, each in built.items()}
        for other, pieces in move.receives(host).items():
            arrays = messages.pop((other, host), None)
            if other == host:
                assert arrays is None
                arrays = [at(held[each.source], each.source_index) for each in pieces]
            for piece, array in zip(pieces, arrays, strict=True):
                assert move.source_place.hosts[piece.source] == other
                for shard in piece.targets:
                    at(built[shard], piece.target_index)[...] = array
                    at(num_writes[shard], piece.target_index)[...] += 1
        for shard in shards:
            np.testing.assert_array_equal(built[shard], at(whole, indices[shard]))
            assert (num_writes[shard] == 1).all()
    assert messages == {}


@given(moves())
def test_no_host_gets_over_the_network_what_it_has_or_twice(move):
    for host in move.target_place.shards_by_host:
        own = move.source_place.shards_by_host.get(host, ())
        has = {move.source.block_of(shard) for shard in own}
        for other, pieces in move.receives(host).items():
            got = [
                (move.source.block_of(piece.source), piece.source_index, piece.targets)
                for piece in pieces
            ]
            assert len(set(got)) == len(got)
            if other != host:
                assert not {block for block, _, _ in got} & has


@given(st.data())
def test_shards_and_blocks_are_the_same_numbers(data):
    layout = data.draw(layouts((24, 12)))
    held = {}
    for shard in range(layout.mesh.size):
        held.setdefault(layout.block_of(shard), set()).add(shard)
    for block, shards in held.items():
        replicas = range(layout.num_replicas)
        assert {layout.shard(block, replica) for replica in replicas} == shards
    assert len(held) == math.prod(layout.counts)


@pytest.mark.parametrize("num_hosts", [2, 512])
@pytest.mark.parametrize(
    ("source", "target", "num_pieces"),
    [
        (("data",), ("data",), 4),  # one to one
        (("data",), (None, "data"), None),  # all to all: one for each pair
        ((), ("data",), 4),
    ],
)
def test_what_a_host_works_out_does_not_grow_with_the_others(
    source, target, num_pieces, num_hosts
):
    num_devices = 4 * num_hosts
    mesh = LogicalMesh(("data",), (num_devices,))

    def place(island):
        devices = tuple(f"{island}/{i}" for i in range(num_devices))
        hosts = tuple(f"{island}/{i // 4}" for i in range(num_devices))
        return Place(island, devices, hosts)

    shape = (2048 * 4, 2048 * 4)
    move = Move(
        Layout(mesh, source, shape), place("x"), Layout(mesh, target, shape), place("y")
    )
    received = move.receives("y/1")
    expected = num_pieces or 4 * num_devices
    assert sum(map(len, received.values())) == expected
    if num_pieces:
        assert set(received) == {"x/1"}
    sent = move.sends("x/1")
    assert sum(map(len, sent.values())) == expected


def test_replicas_share_the_work_of_sending():
    mesh = LogicalMesh(("data",), (8,))
    source = Place("x", tuple("abcdefgh"), tuple("12345678"))
    target = Place("y", tuple("ijklmnop"), tuple("ABCDEFGH"))
    move = Move(Layout(mesh, (), (8,)), source, Layout(mesh, ("data",), (8,)), target)
    assert [len(move.sends(host)) for host in "12345678"] == [1] * 8
