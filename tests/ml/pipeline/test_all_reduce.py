"""Gradients go round rings of slices: sums, bits, and the bytes that each slice gets."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from timelyml import ml
from timelyml.ml.pipeline.all_reduce import AllReduce, rings_of
from timelyml.ml.pipeline.chunking import Chunking
from timelyml.testing.leftovers import Leftovers

NUM_DEVICES = 4
SHAPES = {"table": (50, 8), "bias": (7,), "scale": ()}
NUM_ELEMENTS = (
    408  # a multiple of the numbers of replicas, so that nothing is filled up
)
TOLERANCE = 1e-6  # float32, four numbers of about 1


@pytest.fixture(scope="module")
def client():
    before = Leftovers.now()
    with ml.local(
        islands=2,
        devices_per_island=NUM_DEVICES,
        hosts_per_island=2,
        environment={"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    ) as client:
        yield client
    before.check_gone(sockets=False)


def several(client, island, axes, count):
    return [client.slice(axes, island=island) for _ in range(count)]


def gradients_of(slices, spec=()):
    rng = np.random.default_rng(0)
    values = [
        {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
        for _ in slices
    ]
    specs = {"table": P(*spec), "bias": P(), "scale": P()}
    placed = [
        slice_.client.put(each, {k: slice_.sharding(s) for k, s in specs.items()})
        for each, slice_ in zip(values, slices, strict=True)
    ]
    return values, placed


def all_reduced(slices, gradients):
    """The sum as each slice has it in the end."""
    made = {}
    chunking = Chunking.of(gradients[0], slices[0].mesh, len(slices), set())
    all_reduce = AllReduce(
        slices, chunking, lambda key, make: made.setdefault(key, make())
    )
    chunks = all_reduce(gradients, [{} for _ in slices])

    def join(chunks):
        return chunking.joined(chunks)

    return [
        jax.tree.map(np.asarray, ml.jit(join, slice=slice_)(each))
        for slice_, each in zip(slices, chunks, strict=True)
    ]


def assert_sums(found, values):
    for each in found:
        for key in SHAPES:
            exact = sum(value[key].astype(np.float64) for value in values)
            np.testing.assert_allclose(each[key], exact, atol=TOLERANCE)
            np.testing.assert_array_equal(each[key], found[0][key])


@pytest.mark.parametrize("count", [3, 4])
def test_a_replica_gets_its_share_of_the_bytes_and_all_the_same_bits(client, count):
    slices = several(client, "island-0", {"data": 1}, count)
    values, gradients = gradients_of(slices)
    with client.resources.trace() as trace:
        found = all_reduced(slices, gradients)
    again = all_reduced(slices, gradients)

    assert_sums(found, values)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    got = sum(each.size_bytes for each in trace.transfers)
    share = 2 * (count - 1) * 4 * NUM_ELEMENTS // count
    assert got == count * share, "2(n-1)/n of the gradients each, not n-1 times them"
    ring = [slice_.devices[0][0] for slice_ in slices]
    num_seams = sum(ring[i - 1] != host for i, host in enumerate(ring))
    seams = sum(each.size_bytes for each in trace.transfers if each.source != each.host)
    assert seams == num_seams * share == 2 * share, "the rest stays on its host"
    for slice_ in slices:
        slice_.close()


def test_what_crosses_between_islands_is_a_share_of_that_of_each_slice(client):
    slices = [
        *several(client, "island-0", {"data": 1}, 2),
        *several(client, "island-1", {"data": 1}, 2),
    ]
    values, gradients = gradients_of(slices)
    with client.resources.trace() as trace:
        found = all_reduced(slices, gradients)

    assert_sums(found, values)
    moves = trace.transfers
    within = [each for each in moves if each.source_island == each.island]
    between = [each for each in moves if each.source_island != each.island]
    whole = 4 * NUM_ELEMENTS
    # Each of four: within its island 2(n-1)/n, and between them 2(k-1)/k of 1/n of it.
    assert sum(each.size_bytes for each in within) == 4 * whole
    assert sum(each.size_bytes for each in between) == 4 * whole // 2
    for slice_ in slices:
        slice_.close()


def test_gangs_of_two_processes_send_what_each_process_has(client):
    axes = {"model": NUM_DEVICES}
    slices = [client.slice(axes, island=f"island-{i}") for i in range(2)]
    values, gradients = gradients_of(slices, (None, "model"))
    with client.resources.trace() as trace:
        found = all_reduced(slices, gradients)

    assert_sums(found, values)
    first, second = (sorted({h for h, _ in each.devices}) for each in slices)
    pairs = {*zip(first, second, strict=True), *zip(second, first, strict=True)}
    table, whole = 4 * 50 * 8, 4 * (7 + 1)  # the first is cut over devices
    piece = table // 2 // 2  # of a chunk, on one process
    cut = [each for each in trace.transfers if each.size_bytes == piece]
    assert {(each.source, each.host) for each in cut} == pairs
    assert sum(each.size_bytes for each in cut) == 2 * table
    got = sum(each.size_bytes for each in trace.transfers)
    assert got == 2 * (table + 2 * whole), "each process gets leaves that it has whole"
    for slice_ in slices:
        slice_.close()


@pytest.mark.parametrize("spec", [("model",), (None, "model"), ("model", "data")])
def test_a_leaf_is_cut_into_chunks_where_devices_do_not_cut_it(client, spec):
    slice_ = client.slice({"data": 2, "model": 2})
    (value,), (gradients,) = gradients_of([slice_], spec)
    chunking = Chunking.of(gradients, slice_.mesh, 3, {1})

    assert chunking.groups[0].spec == spec
    chunks = chunking.cut(value)
    assert len({tuple(a.shape for a in each) for each in chunks}) == 1
    joined = chunking.joined(chunks)
    leaves = jax.tree.leaves(value)
    np.testing.assert_array_equal(jax.tree.leaves(joined)[-1], leaves[-1])
    assert len(jax.tree.leaves(joined)) == len(leaves) - 1
    slice_.close()


class Standing:
    """A slice, as far as rings look at it."""

    def __init__(self, island):
        self.island = island


def test_rings_go_in_the_order_of_replicas_and_then_from_island_to_island():
    slices = [Standing(each) for each in "abab"]
    assert rings_of(slices) == ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    unequal = [*slices, Standing("c")]
    assert rings_of(unequal) == ([[0, 2, 1, 3, 4]], [[0], [2], [1], [3], [4]])
