"""Groups compute forward once if they keep what the way back needs."""

import jax
import numpy as np
import pytest

from timelyml.ml.moe import relu_expert_forward
from timelyml.ml.sharded.functions import Needs
from timelyml.ml.sharded.groups import GroupedFunction
from timelyml.ml.sharded.structure import Structure

EXPERTS = {"down": np.zeros((3, 5, 4)), "up": np.zeros((3, 4, 5))}
ROWS = np.array([2, 0, 2, 2])  # the second expert has none


def prepared(*, keeps):
    function = GroupedFunction(
        relu_expert_forward,
        (),
        Structure(jax.tree.structure(EXPERTS)),
        Structure(jax.tree.structure((0,))),
        smallest=8,
        is_ranked=True,
        keeps=keeps,
    )
    return function.prepared(Needs((True, True, True, False), (True,), (False,)))


def leaves_and_cotangents():
    rng = np.random.default_rng(0)
    experts = [
        rng.standard_normal(leaf.shape).astype(np.float32)
        for leaf in jax.tree.leaves(EXPERTS)
    ]
    rows, back = rng.standard_normal((2, 4, 4)).astype(np.float32)
    return [*experts, rows, ROWS], [back]


def dots(function, *arguments):
    """How many matmuls a jitted function has."""
    return str(jax.make_jaxpr(function)(*arguments)).count("dot_general")


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_are_those_of_each_expert_on_its_own_rows(keeps):
    leaves, cotangents = leaves_and_cotangents()

    def loss(down, up, rows):
        out = [
            relu_expert_forward({"down": down[e], "up": up[e]}, rows[i])
            for i, e in enumerate(ROWS)
        ]
        return sum((o * c).sum() for o, c in zip(out, cotangents[0], strict=True))

    groups = prepared(keeps=keeps)
    _, kept = groups.forward(leaves)
    *got, of_index = groups.backward(leaves, kept, cotangents)

    expected = jax.grad(loss, argnums=(0, 1, 2))(*leaves[:3])
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert of_index is None
    assert not got[0][1].any()


def test_the_way_back_has_no_matmul_of_the_way_out_if_residuals_are_kept():
    leaves, _ = leaves_and_cotangents()
    again, once = prepared(keeps=False), prepared(keeps=True)

    _, nothing = again.forward(leaves)
    _, kept = once.forward(leaves)

    rows = np.zeros((8, 4), np.float32)
    one = (*leaves[:2], rows)
    assert nothing == []
    assert len(kept) == 2  # one for each expert that has rows
    assert dots(again.pull, 0, (one, ((), (rows,)))) == 6
    assert dots(once.finish, 0, kept[0], one, (rows,)) == 4
