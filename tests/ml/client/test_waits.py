"""Waiting for values: one answer for many, and who holds up what does not come."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.ml.client.test_failures import TIMEOUT_S, started_gate
from timelyml import ml
from timelyml.errors import DeadlineError
from timelyml.testing.leftovers import eventually

SHORT_S = 0.2


def test_who_waits_for_one_of_the_values_that_were_put_asks_of_all(client):
    s = client.slice({"x": 2})
    tree = client.put([np.full(4, n) for n in range(50)], s.sharding())
    tree[7].block_until_ready()
    assert not any(each.is_unasked for each in tree)
    assert client._inbox.unasked(99) == []
    assert jax.block_until_ready(tree) is tree
    lonely = client.put(np.ones(4), s.sharding())
    del lonely
    assert client._inbox.unasked(99) == [], "what is gone is not asked of"


def test_what_does_not_come_in_time_says_who_holds_it_up_and_since_when(
    client, tmp_path
):
    s = client.slice({"x": 1})
    slow = ml.jit(started_gate(tmp_path), slice=s)
    double = ml.jit(lambda x: x * 2, slice=s)
    double(np.ones(4, np.float32)).block_until_ready()  # compiled by now
    y = double(double(slow(np.ones(4, np.float32))))
    assert eventually((tmp_path / "started").exists, TIMEOUT_S)
    try:
        host = s.devices[0][0]
        where = rf"on slice '{s.name}' of island '{s.island}': host {host} last said"
        why = rf"'output 0 of f' was called for by client \d+ \d+\.\d s ago, and is launched, or next, {where}"
        with pytest.raises(DeadlineError, match=why):
            y.result(SHORT_S)
        assert "is launched, or next" in client.explain_stall(y)
        assert client.explain_stall() == "every slice stands on its devices"
    finally:
        (tmp_path / "go").touch()
    np.testing.assert_array_equal(y.result(TIMEOUT_S), np.full(4, 4.0))


def test_a_value_on_a_suspended_slice_says_so(client):
    s = client.slice({"x": 1})
    double = ml.jit(lambda x: x * 2, slice=s)
    x = double(np.ones(4, np.float32)).block_until_ready()
    s.suspend()
    with pytest.raises(DeadlineError, match=rf"slice '{s.name}' is suspended"):
        double(x).result(SHORT_S)
    assert f"slice '{s.name}' of client" in client.explain_stall()
    s.resume()
    np.testing.assert_array_equal(double(x).result(TIMEOUT_S), np.full(4, 4.0))
