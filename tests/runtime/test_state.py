"""State belongs to (operator, shard, name) and moves without its operator's help."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import pytest

from timelyml.errors import GraphError, InvariantError
from timelyml.runtime.state import StateStore


def test_exported_state_is_the_same_on_another_store():
    here, there = StateStore(), StateStore()
    for store in (here, there):
        store.declare(3, 1, ("state", "params"))
    here.cell(3, 1, "state", "sum")[4] = [1, 2]
    here.cell(3, 1, "params", "sum")["w"] = np.arange(3)

    there.install_shard(3, 1, here.export_shard(3, 1, pickle.dumps), pickle.loads)

    assert there.cell(3, 1, "state", "sum") == {4: [1, 2]}
    np.testing.assert_array_equal(there.cell(3, 1, "params", "sum")["w"], [0, 1, 2])


def test_an_exported_shard_holds_nothing_of_its_neighbours():
    store = StateStore()
    store.declare(0, 0, ("state",))
    store.declare(0, 1, ("state",))
    store.cell(0, 0, "state", "a")["x"] = 1
    store.cell(0, 1, "state", "a")["x"] = 2

    exported = store.export_shard(0, 1, pickle.dumps)
    store.discard_shard(0, 1)

    assert pickle.loads(exported["state"]) == {"x": 2}
    assert store.cell(0, 0, "state", "a") == {"x": 1}
    assert store.num_entries(0) == 1


def test_state_that_was_not_declared_is_refused_with_what_there_is():
    store = StateStore()
    store.declare(0, 0, ("state",))

    with pytest.raises(GraphError, match=r"'count' has no state .* got 'seen'.*state"):
        store.cell(0, 0, "seen", "count")


def test_state_of_another_operator_is_not_installed():
    store = StateStore()

    with pytest.raises(InvariantError, match="did not declare state 'params'"):
        store.install_shard(0, 0, {"params": pickle.dumps({})}, pickle.loads)


def test_size_follows_the_arrays_that_are_held():
    store = StateStore()
    store.declare(0, 0, ("state",))
    before = store.size_bytes(0)

    store.cell(0, 0, "state", "a")["w"] = np.zeros(10_000, np.float32)

    assert store.size_bytes(0) - before >= 40_000


def test_size_follows_what_a_dataclass_holds():
    @dataclass(slots=True)
    class Held:
        rows: list

    store = StateStore()
    store.declare(0, 0, ("state",))
    store.cell(0, 0, "state", "a")["w"] = Held([np.zeros(10_000, np.float32)])

    assert store.size_bytes(0) >= 40_000
