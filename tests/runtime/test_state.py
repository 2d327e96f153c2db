"""State belongs to (operator, shard, name) and moves without its operator's help."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import pytest

from timelyml import Dataflow
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

    assert pickle.loads(exported["state"]) == {"x": 2}


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


class Odd:
    """Tells nothing of itself."""

    def __getattr__(self, name):
        raise LookupError(name)

    def __sizeof__(self):
        raise LookupError("no size")


def ring():
    one, other = {}, []
    one["other"], one["data"] = other, np.zeros(1000)
    other.append(one)
    return one


@pytest.mark.parametrize(("make", "at_least"), [(Odd, 1), (ring, 8000)])
def test_odd_and_circular_values_have_a_size(make, at_least):
    value = make()
    store = StateStore()
    store.declare(0, 0, ("state",))
    store.cell(0, 0, "state", "sum")["key"] = [value, value]
    assert at_least <= store.size_bytes(0) < at_least + 2000


def test_a_run_ends_whatever_its_operators_keep(cluster):
    def keep(shard, delivery):
        circle = [Odd()]
        circle.append(circle)
        shard.state["kept"] = circle
        shard.output().send(delivery.time, delivery.payload)

    flow = Dataflow()
    flow.source([1]).unary(keep, states=("state",)).collect()
    assert cluster.run(flow)["out"] == [1]
