from __future__ import annotations

import dataclasses

import pytest

from timelyml.errors import GraphError
from timelyml.graph import Broadcast, Direct, Exchange, Gather, Pipeline


def route(payload, num_shards):
    return payload % num_shards


@pytest.mark.parametrize(
    ("pact", "text"),
    [
        (Pipeline(), "pipeline"),
        (Exchange(route), "exchange"),
        (Exchange.by_key(len), "exchange by key"),
        (Broadcast(), "broadcast"),
        (Gather(3), "gather to 3"),
        (Direct(), "direct"),
    ],
)
def test_a_pact_is_sparse_unless_it_says_otherwise(pact, text):
    assert not pact.dense
    assert pact.describe() == text
    assert dataclasses.replace(pact, dense=True).describe() == f"{text}, dense"


def test_pacts_are_values():
    assert Gather(1, dense=True) == Gather(1, dense=True)
    assert Exchange(route) == Exchange(route)
    assert Exchange.by_key(len) == Exchange(key=len)
    with pytest.raises(dataclasses.FrozenInstanceError, match="dense"):
        Pipeline().dense = True


def test_an_exchange_needs_exactly_one_rule():
    with pytest.raises(GraphError, match="got neither of route and key"):
        Exchange()
    with pytest.raises(GraphError, match="got both of route and key"):
        Exchange(route, key=len)


def test_an_exchange_needs_a_function():
    with pytest.raises(GraphError, match="got 'word'; expected a callable"):
        Exchange("word")


def test_a_gather_needs_a_shard():
    with pytest.raises(GraphError, match="got -1; expected 0 or more"):
        Gather(-1)
