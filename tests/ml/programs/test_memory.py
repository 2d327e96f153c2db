"""What programs take at their peak, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from tests.ml.functions.fakes import Client, Slice, Value
from timelyml.ml.functions import ArrayType, MemoryNeeds, jit
from timelyml.ml.programs import Place, lower, program, scratch_bytes

BLOCK = 1024  # bytes of a value on each device
ROWS = ArrayType((512,), "float32", 4)
TEMPORARY = 100


def scale(x):
    return x * 2


@pytest.fixture
def slices():
    client = Client()
    return [Slice(client, name, AbstractMesh((2,), ("data",))) for name in "ab"]


def needs_of(computation):
    """As XLA would say of `scale`, which gives as much as it takes."""
    count = len(computation.donated)
    return MemoryNeeds(BLOCK, BLOCK, count * BLOCK, TEMPORARY)


def scratch(block, *args):
    places = {
        "a": Place("i", ("d0", "d1"), ("h0", "h0")),
        "b": Place("j", ("d2", "d3"), ("h1", "h1")),
    }
    return scratch_bytes(lower(program(block).program(*args), places), needs_of)


def on(slice_):
    return Value(slice_, ROWS, ("data",))


def test_a_call_takes_its_temporaries_beside_its_result(slices):
    a = jit(scale, slice=slices[0], in_shardings=P("data"))
    assert scratch(a, on(slices[0])) == {"a": TEMPORARY}


def test_what_lives_within_counts_as_long_as_it_lives(slices):
    a = jit(scale, slice=slices[0], in_shardings=P("data"))
    # One is read while the next is made; of three in a row the first is gone by then.
    assert scratch(lambda x: a(a(a(x))), on(slices[0])) == {"a": BLOCK + TEMPORARY}


def test_results_that_are_made_late_leave_room_until_then(slices):
    a = jit(scale, slice=slices[0], in_shardings=P("data"))

    def f(x):
        y = a(a(x))
        return y, a(y)

    # At the end two results and no more; before, one of them and two within.
    assert scratch(f, on(slices[0])) == {"a": TEMPORARY}


def test_donated_memory_is_used_again(slices):
    take = jit(scale, slice=slices[0], in_shardings=P("data"), donate_argnums=(0,))
    assert scratch(take, on(slices[0])) == {"a": TEMPORARY}
    assert scratch(lambda x: take(take(x)), on(slices[0])) == {"a": TEMPORARY}


def test_what_arrives_on_a_slice_counts_there(slices):
    a, b = (jit(scale, slice=each, in_shardings=P("data")) for each in slices)
    found = scratch(lambda x: b(a(x)), np.ones(512, np.float32))
    assert found == {"a": 2 * BLOCK + TEMPORARY, "b": BLOCK + TEMPORARY}


def test_values_that_are_not_cut_take_all_of_their_bytes(slices):
    whole = jit(scale, slice=slices[0], in_shardings=P(), out_shardings=P())
    found = scratch(lambda x: (whole(x),), np.ones(512, np.float32))
    assert found == {"a": 2 * BLOCK}  # of the argument; as much more is the result's
