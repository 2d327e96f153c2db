"""Gradients through loops and branches: what is recorded, and what is refused."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from tests.ml.functions.fakes import Client, Slice, Value
from timelyml import ml
from timelyml.errors import TraceError
from timelyml.ml.functions import jit, type_of
from timelyml.ml.programs import Branch, Call, Loop, program
from timelyml.ml.programs.nodes import Exchange

PAIR = AbstractMesh((2,), ("data",))
X = np.ones((2, 2), np.float32)


@pytest.fixture
def slices():
    client = Client()
    return [Slice(client, name, PAIR) for name in "ab"]


@pytest.fixture
def parts(slices):
    a, b = slices
    return {
        "less": jit(lambda i, n: i < n, slice=a),
        "step": jit(lambda i, w, x: (i + 1, jnp.tanh(x @ w)), slice=a),
        "big": jit(lambda x: x.sum() > 0, slice=b),
        "half": jit(lambda x: -x, slice=b),
        "square": jit(lambda x: x * x, slice=b),
        "loss": jit(lambda x: (x * x).sum(), slice=b),
    }


def looped(parts, *, max_steps=5, body=None, checkpoint=False):
    """A program with a loop that carries an integer and an array."""

    @program
    def f(w, x, n):
        def step(carried):
            i, x = parts["step"](carried[0], w, carried[1])
            return i, (body(x) if body else x)

        _, x = ml.while_loop(
            lambda carried: parts["less"](carried[0], n),
            step,
            (0, x),
            max_steps=max_steps,
            checkpoint=checkpoint,
        )
        return parts["loss"](x)

    return f


def controls(recorded):
    return [node for node in recorded.nodes if isinstance(node, Branch | Loop)]


def test_a_loop_is_recorded_and_gone_through_once_more_the_other_way(parts):
    recorded = ml.grad(looped(parts)).program(X, X, 3)
    there, back = controls(recorded)
    assert there.is_recorded
    assert back.is_replayed
    assert there.max_steps == back.max_steps == 5
    # What is kept of a run: x before and after it, and the slope of tanh.
    kept = there.body.results[len(there.values) :]
    assert len(kept) == 3
    # The weights are there all along: they are given to both ways, and kept by none.
    weights = next(i for i, each in enumerate(recorded.nodes) if each.outputs)
    assert weights in [ref.node for ref in back.operands]
    text = recorded.ir()
    assert "replay of while_loop %4.2" in text
    assert "recalled 2: float32[2,2] on a" in text


def test_computing_again_keeps_what_functions_read(parts):
    recorded = ml.grad(looped(parts), keeps=False).program(X, X, 3)
    there, _ = controls(recorded)
    kept = there.body.results[len(there.values) :]
    assert len(kept) == 2  # i and x before the run


def test_a_checkpointed_loop_keeps_what_is_carried_and_computes_the_rest_again(parts):
    def body(x):
        return ml.cond(parts["big"](x), parts["square"], parts["half"], x)

    model = looped(parts, body=body, checkpoint=True)
    there, back = controls(ml.grad(model).program(X, X, 3))
    kept = there.body.results[len(there.values) :]
    nodes = there.body.nodes
    # The two that are carried, and which branch was taken.
    assert [type(nodes[ref.node]).__name__ for ref in kept] == ["Arg", "Arg", "Branch"]
    forward = next(node for node in nodes if isinstance(node, Call))
    again = next(node for node in back.body.nodes if isinstance(node, Call))
    assert again.computation is forward.computation  # or a tie could fall otherwise
    (inner,) = [node for node in nodes if isinstance(node, Branch)]
    assert [len(region.results) for region in inner.regions] == [1, 1]


def test_a_checkpointed_body_that_takes_memory_does_so_both_ways(slices, parts):
    a, _ = slices
    consume = jit(lambda x: jnp.exp(x) * x, slice=a, donate_argnums=0)
    model = looped(parts, body=consume, checkpoint=True)
    there, back = controls(ml.grad(model).program(X, X, 3))
    donors = [
        [node for node in each.body.nodes if isinstance(node, Call) and node.donated]
        for each in (there, back)
    ]
    assert [len(each) for each in donors] == [1, 1]


def test_a_branch_keeps_what_the_region_needs_that_ran(parts):
    half, square = parts["half"], parts["square"]

    @program
    def f(x):
        return parts["loss"](ml.cond(parts["big"](x), square, half, x))

    there, back = controls(ml.grad(f).program(X))
    assert [len(region.results) for region in there.regions] == [1, 1]
    assert [len(region.results) for region in back.regions] == [1, 1]
    assert back.kind == "cond"


def test_loops_that_no_gradient_goes_through_stay_as_they_are(parts):
    @program
    def f(x, n):
        count = ml.while_loop(
            lambda i: parts["less"](i, n), lambda i: parts["step"](i, x, x)[0], 0
        )
        return parts["loss"](x), count

    (loop,) = controls(ml.grad(f, has_aux=True).program(X, 3))
    (plain,) = controls(f.program(X, 3))
    assert (loop.body, loop.condition) == (plain.body, plain.condition)
    assert not loop.is_recorded


def test_a_loop_without_a_bound_is_refused_with_its_line(parts):
    model = looped(parts, max_steps=None)
    model.program(X, X, 3)
    with pytest.raises(TraceError, match=r"test_control.py.*no max_steps; expected"):
        ml.grad(model).program(X, X, 3)


def test_second_derivatives_through_loops_are_refused_with_the_line(parts):
    of_norm = program(lambda w, x: parts["loss"](ml.grad(looped(parts))(w, x, 3)))
    of_norm.program(X, X)
    with pytest.raises(TraceError, match=r"while_loop at .*test_control.py.*gradient"):
        ml.grad(of_norm).program(X, X)


def test_rows_go_back_by_the_counts_that_they_came_by(slices, parts):
    @program
    def f(x, to):
        rows = parts["half"](ml.route(x, to, slices[1]))
        return parts["loss"](ml.unroute(rows))

    to = np.arange(2, dtype=np.int32)
    nodes = ml.grad(f).program(X, to).nodes
    rows = [node for node in nodes if isinstance(node, Exchange)]
    assert [node.kind for node in rows] == ["route", "unroute", "route", "unroute"]
    assert len({node.matrix for node in rows}) == 1
    assert [node.max_rows for node in rows] == [2, 1, 2, 1]
    with pytest.raises(TraceError, match=r"no gradient; got an argument int32\[2\]"):
        ml.grad(f, 1).program(X, to)


def test_gradients_of_what_loops_are_given_lie_as_that_does(slices, parts):
    w = Value(slices[1], type_of(X), ("data",))
    x = Value(slices[0], type_of(X), (None, "data"))
    recorded = ml.grad(looped(parts), (0, 1)).program(w, x, 3)
    for ref, argument in zip(recorded.results, (w, x), strict=True):
        value = recorded.value(ref)
        assert (value.slice, value.spec) == (argument.slice.name, argument.spec)


def test_what_a_body_destroys_but_the_way_back_reads_is_kept(slices, parts):
    a, _ = slices
    parts["square"] = jit(lambda x: x * x, slice=a)
    consume = jit(jnp.exp, slice=a, donate_argnums=0)
    add = jit(lambda x, y: x + y, slice=a)

    def body(x):
        y = parts["square"](x)
        return add(y, consume(x))

    there, _ = controls(ml.grad(looped(parts, body=body)).program(X, X, 3))
    kept = there.body.results[len(there.values) :]
    donor = next(
        i
        for i, node in enumerate(there.body.nodes)
        if getattr(node, "donated", ()) != ()
    )
    assert any(ref.node == donor for ref in kept)
    donated = set(there.body.nodes[donor].donated)
    assert not donated & set(kept)
