"""Buffers of a host: pieces come in any order, before or after they are expected."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from timelyml.ml.functions import ArrayType, type_of
from timelyml.ml.hosts import Expect, Gone, Piece, Pieces, SliceMade
from timelyml.ml.hosts.buffers import BufferStore
from timelyml.ml.hosts.slices import HostSlice, gather, zeros

FLOAT = ArrayType((4, 3), "float32", 4)
VALUE = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture
def host_slice():
    made = SliceMade("s", ("x",), (1,), ((0, 0),))
    return HostSlice(made, [jax.local_devices()])


def pieces(*rows, error=None, target=7):
    parts = tuple(Piece((start, 0), VALUE[start:stop]) for start, stop in rows)
    return Pieces(target, parts, error)


@pytest.mark.parametrize("num_early", range(4))
def test_a_buffer_is_there_once_all_of_its_pieces_are(host_slice, num_early):
    store = BufferStore()
    messages = [pieces((3, 4)), pieces((0, 1)), pieces((1, 3))]
    for message in messages[:num_early]:
        assert not store.add(message)
    complete = [store.expect(Expect(7, "s", FLOAT, ("x",)), host_slice)]
    complete += [store.add(message) for message in messages[num_early:]]

    assert complete == [False] * (len(complete) - 1) + [True]
    np.testing.assert_array_equal(store.get(7).array, VALUE)
    assert store.get(7).error is None


def test_a_buffer_without_elements_needs_no_pieces(host_slice):
    store = BufferStore()
    empty = ArrayType((0, 3), "bfloat16", 2)
    assert store.expect(Expect(7, "s", empty, ()), host_slice)
    assert store.get(7).array.shape == (0, 3)


def test_pieces_of_what_failed_keep_its_error(host_slice):
    store = BufferStore()
    store.expect(Expect(7, "s", FLOAT, ()), host_slice)
    store.add(pieces((0, 2), error=b"why"))
    store.add(pieces((2, 4)))
    assert store.get(7).error == b"why"


def test_pieces_of_a_buffer_that_was_released_are_dropped(host_slice):
    store = BufferStore()
    store.expect(Expect(7, "s", FLOAT, ()), host_slice)
    store.add(pieces((0, 2)))
    store.release([7])
    assert not store.add(pieces((2, 4)))
    assert 7 not in store
    assert len(store) == 0


def test_pieces_that_came_early_outlast_the_move_of_their_slice(host_slice):
    store = BufferStore()
    store.add(pieces((0, 2)))
    store.leave([7])  # the order takes another way than pieces
    store.add(pieces((2, 4)))
    assert store.expect(Expect(7, "s", FLOAT, ()), host_slice)


def test_what_was_lost_on_its_way_comes_when_its_slice_is_there_again(host_slice):
    store = BufferStore()
    expected = Expect(7, "s", FLOAT, (), senders=(1,))
    store.expect(expected, host_slice)
    assert store.lost(Gone(1, "island-1", "it was killed")) == [7]
    assert not store.add(pieces((0, 2)))  # of another host, from then
    store.leave([7])
    assert not store.add(pieces((0, 4)))
    assert store.expect(Expect(7, "s", FLOAT, (), senders=(2,)), host_slice)
    assert store.get(7).error is None


def test_what_is_promised_is_at_hand_until_it_is_released(host_slice):
    store = BufferStore()
    store.promise([1, 2])
    store.release([2])
    assert store.not_at_hand((1, 2)) == {2}
    assert 1 not in store


@pytest.mark.parametrize(
    "value",
    [VALUE, jax.random.split(jax.random.key(1), 4), jax.random.key(2), np.float32(3)],
    ids=["floats", "keys", "key", "number"],
)
def test_what_is_gathered_makes_the_same_array_again(host_slice, value):
    array_type = type_of(value)
    box = tuple((0, length) for length in array_type.shape)
    store = BufferStore()
    store.expect(Expect(7, "s", array_type, ()), host_slice)
    words = jax.random.key_data(value) if array_type.key_impl else value
    store.add(Pieces(7, (Piece((0,) * len(box), np.asarray(words)),)))
    (again,) = gather(store.get(7).array, array_type, [box])

    np.testing.assert_array_equal(again.array, words)
    assert type_of(store.get(7).array).dtype == array_type.dtype
    (nothing,) = zeros(array_type, [box])
    assert nothing.array.shape == again.array.shape
    assert nothing.array.dtype == again.array.dtype
