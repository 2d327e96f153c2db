"""The gradient of a dataflow is that of the same model as one JAX program."""

import jax
import numpy as np
import pytest

from tests.ml.sharded.random_graphs import Program, check
from timelyml.testing import FlowTester

FLOAT32, FLOAT64 = 1e-5, 1e-10
"""Relative to the largest absolute value of each leaf."""


def in_order_of(seed):
    def run(graph):
        with FlowTester(1 + seed % 4, seed=seed) as tester:
            return tester.run(graph)

    return run


@pytest.mark.parametrize("seed", range(6))
def test_random_graphs_have_the_gradients_of_jax(seed):
    check(Program.draw(seed), np.float32, in_order_of(seed), FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 150))
def test_many_random_graphs_have_the_gradients_of_jax(seed):
    check(Program.draw(seed), np.float32, in_order_of(seed), FLOAT32)


def test_they_do_so_in_double_precision():
    with jax.enable_x64(True):
        for seed in (100, 101):
            check(Program.draw(seed), np.float64, in_order_of(seed), FLOAT64)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(102, 140))
def test_many_do_so_in_double_precision(seed):
    with jax.enable_x64(True):
        check(Program.draw(seed), np.float64, in_order_of(seed), FLOAT64)
