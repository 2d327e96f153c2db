"""Layers are cut where the slowest stage is fastest."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ml.pipeline.cases import unhurried
from timelyml import ml
from timelyml.errors import ConfigError
from timelyml.ml.pipeline import Chain, estimated_costs, measured_costs, partition


def narrow(params, x):
    return x @ params


def wide(params, x):
    return (x @ params) @ params.T


def all_cuts(num_layers, num_stages):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield list(itertools.pairwise((0, *inner, num_layers)))


@unhurried
@given(st.data(), st.lists(st.integers(0, 20), min_size=1, max_size=9))
def test_no_other_cut_has_a_cheaper_largest_stage(data, costs):
    num_stages = data.draw(st.integers(1, len(costs)))
    cut = partition([narrow] * len(costs), num_stages, costs=costs)
    best = min(
        max(sum(costs[a:b]) for a, b in bounds)
        for bounds in all_cuts(len(costs), num_stages)
    )
    assert max(cut.stage_costs) == best
    assert sum(cut.sizes) == len(costs)
    assert all(size >= 1 for size in cut.sizes)


def test_stages_of_a_cut_run_their_layers_on_their_own_weights():
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(3, 3)) for _ in range(5)]
    x = rng.normal(size=(2, 3))
    cut = partition([narrow, narrow, wide, narrow, narrow], sizes=(2, 1, 2))
    expected = x @ params[0] @ params[1] @ params[2] @ params[2].T
    expected = expected @ params[3] @ params[4]
    for stage, weights in zip(cut.stages, cut.params_of(params), strict=True):
        x = stage(weights, x)
    np.testing.assert_allclose(x, expected)


def test_stages_of_the_same_layers_are_the_same_function():
    first, second, third = partition([narrow, wide, narrow], 3).stages
    assert first == third
    assert hash(first) == hash(third)
    assert first != second == Chain((wide,))
    assert partition([narrow, wide], 1).stages[0].__name__ == "narrow_wide"


def test_estimates_count_the_products_of_each_layer():
    x = jax.ShapeDtypeStruct((8, 16), np.float32)
    square = jax.ShapeDtypeStruct((16, 16), np.float32)
    flat = jax.ShapeDtypeStruct((16, 4), np.float32)
    one = 2 * 8 * 16 * 16
    costs = estimated_costs([narrow, wide, narrow], [square, square, flat], x)
    assert costs[0] == one
    assert 2 * one <= costs[1] < 2.2 * one
    assert costs[2] == one / 4


def test_measured_costs_tell_large_layers_from_small_ones():
    def large(params, x):
        for _ in range(60):
            x = jax.numpy.tanh(x @ params)
        return x

    weights = np.full((400, 400), 1e-3, np.float32)
    tokens = np.arange(64)
    with ml.local() as client:
        costs = measured_costs(
            [lambda table, rows: table[rows], large, narrow],
            [np.ones((64, 400), np.float32), weights, weights],
            tokens,
            client.slice({"data": 1}),
            repeats=3,
        )
    assert costs[1] == max(costs)
    assert min(costs) > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_stages": 4}, "got 4 stages; expected 1 to 3"),
        ({"num_stages": 0}, "got 0 stages"),
        ({"sizes": (1, 1)}, r"sizes \(1, 1\); expected 3 layers in all"),
        ({"sizes": (0, 3)}, r"sizes \(0, 3\)"),
        ({"num_stages": 2, "costs": [1]}, "1 costs; expected one for each of 3"),
        ({}, "num_stages=None, sizes=None; expected one of the two"),
        ({"num_stages": 2, "sizes": (1, 2)}, "expected one of the two"),
    ],
)
def test_cuts_that_cannot_be_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        partition([narrow] * 3, **options)
