"""Gradients of programs: what is recorded, what is refused, and that it is JAX's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from tests.ml.functions.fakes import Client, Slice, Value
from timelyml import ml
from timelyml.errors import ConfigError, HandleError, TraceError
from timelyml.ml.functions import jit, recording, type_of
from timelyml.ml.gradients.planning import plan
from timelyml.ml.gradients.tape import Tape
from timelyml.ml.programs import Call, Ref, Route, Transfer, program
from timelyml.runtime.environment import worker_environment

ROOT = Path(__file__).parents[3]
PAIR = AbstractMesh((2,), ("data",))
FLOAT32, FLOAT64 = 1e-5, 1e-10
DOUBTS = 4  # of what JAX alone is off in float32 where that is more
SLOPE = 1e-6  # of a central difference with steps of 1e-6
X = np.ones((4, 4), np.float32)


def on_devices(float32, float64):
    done = subprocess.run(
        [sys.executable, "-m", "tests.ml.gradients.on_devices", float32, float64],
        env=worker_environment(os.environ, num_devices=8),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(found, float32, float64):
    assert found["wrong"] == {}
    assert len(found["float32"]) == len(float32.split(","))
    assert len(found["float64"]) == len(float64.split(","))
    for seed, difference in found["float32"].items():
        assert difference <= max(FLOAT32, DOUBTS * found["doubt"].get(seed, 0)), seed
    assert max(found["float64"].values()) <= FLOAT64
    assert max(found["slope"].values()) <= SLOPE


def test_gradients_of_random_programs_are_those_of_one_program_and_the_slope():
    seeds = "2,21", "8"
    check(on_devices(*seeds), *seeds)


@pytest.mark.slow
def test_gradients_of_many_random_programs_are_those_of_one_program():
    seeds = ",".join(map(str, range(80))), ",".join(map(str, range(80, 130)))
    check(on_devices(*seeds), *seeds)


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def slices(client):
    return [Slice(client, name, PAIR) for name in "ab"]


@pytest.fixture
def layer(slices):
    return jit(lambda w, x: jnp.tanh(x @ w), slice=slices[0])


@pytest.fixture
def loss(slices):
    return jit(lambda y: jnp.mean(y**2), slice=slices[1])


@pytest.fixture
def model(layer, loss):
    @program
    def f(w, x):
        return loss(layer(w, layer(w, x)))

    return f


def lines(function, *args):
    return [each.strip() for each in function.ir(*args).splitlines() if " = " in each]


def names(recorded):
    return [node.computation.name for _, node in recorded.calls()]


def test_the_gradient_goes_back_through_the_slices_and_adds_up_what_is_shared(slices):
    def layer(w, x):
        return x @ w

    def loss(y):
        return (y * y).sum()

    on_a, on_b = jit(layer, slice=slices[0]), jit(loss, slice=slices[1])

    @program
    def f(w, x):
        return on_b(on_a(w, on_a(w, x)))

    assert lines(ml.value_and_grad(f), X, X) == [
        "%0 = arg w: float32[4,4] from the client",
        "%1 = arg x: float32[4,4] from the client",
        "%2 = call layer_forward(%0, %1): float32[4,4] on a",
        "%3 = call layer_forward(%0, %2): float32[4,4] on a",
        "%4 = call loss_turn(%3): (float32[], float32[4,4]) on b",
        "%5 = call layer_backward(%0, %2, %4.1): (float32[4,4], float32[4,4]) on a",
        "%6 = call layer_backward(%1, %5.1): float32[4,4] on a",
        "%7 = call sum_gradients(%5.0, %6): float32[4,4] on a",
    ]


def test_rematerialising_saves_nothing_and_reads_what_the_functions_read(model):
    kept, again = (ml.grad(model, keeps=keeps).program(X, X) for keeps in (True, False))

    def num_outputs(recorded):
        return [len(node.outputs) for _, node in recorded.calls()][:3]

    assert num_outputs(kept) == [2, 2, 2]  # of each tanh its slope
    assert num_outputs(again) == [1, 1, 2]
    assert names(again)[:2] == ["<lambda>", "<lambda>"]  # as without a gradient


def test_checkpoint_in_a_function_keeps_nothing_of_it(slices, loss):
    @jax.checkpoint
    def deep(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    layer = jit(deep, slice=slices[0])
    kept = ml.grad(program(lambda w, x: loss(layer(w, x)))).program(X, X)
    forward = next(node for _, node in kept.calls())
    assert len(forward.outputs) == 1


def test_two_programs_of_equal_layers_share_what_is_compiled(slices, loss):
    layer = jit(lambda w, x: jnp.sin(x @ w), slice=slices[0])

    @program
    def f(w, x):
        for _ in range(5):
            x = layer(w, x)
        return loss(x)

    identities = {n.computation.identity for _, n in ml.grad(f).program(X, X).calls()}
    # Forward, the loss, backward with and without the gradient of x, and the sum.
    assert len(identities) == 5


def test_a_gradient_lies_as_its_argument(slices, layer, loss):
    _, b = slices
    w = Value(b, type_of(X), ("data",))  # used on a
    unused = Value(b, type_of(X), (None, "data"))

    @program
    def f(params, x):
        return loss(layer(params["w"], x))

    recorded = ml.grad(f).program({"w": w, "unused": unused}, X)
    for ref, argument in zip(recorded.results, (unused, w), strict=True):
        value = recorded.value(ref)
        assert (value.slice, value.spec) == ("b", argument.spec)
        assert value.type == argument.type


def test_what_is_donated_but_read_on_the_way_back_is_returned(slices, loss):
    a, _ = slices
    square = jit(lambda x: x * x, slice=a)
    step = jit(jnp.exp, slice=a, donate_argnums=0)
    x = Value(a, type_of(X), ())

    @program
    def f(x):
        return loss(square(x)), step(x)

    recorded = ml.grad(f, has_aux=True).program(x)
    calls = [node for _, node in recorded.calls()]
    stepped = next(i for i, n in enumerate(calls) if n.donated)
    back = next(n for n in calls if n.computation.name.endswith("lambda>_backward"))
    assert recorded.donated_args == f.program(x).donated_args == {0}
    index = recorded.nodes.index(calls[stepped])
    assert (index, 1) in back.operands  # what `step` returned beside its result
    assert len(calls[stepped].outputs) == 2


def test_a_donated_value_that_is_used_later_is_refused_as_without_a_gradient(slices):
    step = jit(lambda x: x + 1, slice=slices[0], donate_argnums=0)
    total = jit(lambda x, y: (x * y).sum(), slice=slices[0])

    @program
    def f(x):
        return total(step(x), x)

    with pytest.raises(HandleError, match="after it was donated"):
        ml.grad(f).program(Value(slices[0], type_of(X), ()))


def test_within_programs_gradients_are_called_and_differentiated_again(model, slices):
    update = jit(lambda w, g: w - 0.1 * g, slice=slices[0])
    norm = jit(lambda g: (g * g).sum(), slice=slices[1])

    @program
    def train(w, x):
        value, gradient = ml.value_and_grad(model)(w, x)
        return update(w, gradient), value

    @program
    def of_norm(w, x):
        return norm(ml.grad(model)(w, x))

    assert names(train.program(X, X))[-1] == "<lambda>"
    second = ml.grad(of_norm).program(X, X)
    assert "<lambda>_backward_backward" in names(second)


def test_a_captured_value_of_the_program_around_has_no_gradient(layer, loss):
    @program
    def outer(w, x):
        hidden = layer(w, x)

        @program
        def inner(w):
            return loss(layer(w, hidden))

        return ml.grad(inner)(w)

    assert names(outer.program(X, X)).count("<lambda>_backward") == 1


def test_lines_and_settings_are_those_of_the_call(slices):
    square = jit(lambda x: (x * x).sum(), slice=slices[0])

    @program
    def f(x):
        with jax.default_matmul_precision("float32"):
            return square(x)

    call = next(n for _, n in ml.grad(f).program(X).calls() if isinstance(n, Call))
    assert call.computation.settings.matmul_precision == "float32"
    assert call.line.endswith("return square(x)")


def test_checks_are_made_on_the_way_there_only(slices, loss):
    def root(x):
        checkify.check((x > 0).all(), "negative")
        return jnp.sqrt(x)

    rooted = jit(root, slice=slices[0])
    recorded = ml.grad(program(lambda x: loss(rooted(x)))).program(X)
    checked = [n.computation.name for _, n in recorded.calls() if n.computation.checks]
    assert checked == ["root_forward"]


def test_functions_with_callbacks_travel_as_code_both_ways(slices, loss):
    @jax.custom_vjp
    def solve(x):
        return jax.pure_callback(np.sqrt, jax.typeof(x), x)

    solve.defvjp(lambda x: (solve(x), solve(x)), lambda y, dy: (dy / (2 * y),))
    solved = jit(solve, slice=slices[0])
    recorded = ml.grad(program(lambda x: loss(solved(x)))).program(X)
    shipped = [n.computation.has_callbacks for _, n in recorded.calls()]
    assert shipped == [True, False, False]


def test_a_compiled_function_is_a_program_of_one_call(slices):
    def power(x, n):
        return (x**n).sum()

    alone = jit(power, slice=slices[0], static_argnames="n")
    recorded = ml.grad(alone).program(X, n=3)
    assert names(recorded) == ["power_turn"]


def test_argnums_count_from_the_end_too_and_past_static_ones(slices):
    scale = jit(lambda x, y: (x * y).sum(), slice=slices[0])
    f = ml.program(lambda x, n, y: scale(x, y), static_argnums=1)
    recorded = ml.grad(f, argnums=(-1, 0)).program(X, 2, X[:1])
    assert [recorded.value(r).type.shape for r in recorded.results] == [(1, 4), (4, 4)]


def test_a_gradient_of_no_scalar_is_refused(layer, loss):
    with pytest.raises(TraceError, match=r"no gradient; got a result float32\[4,4\]"):
        ml.grad(program(layer)).program(X, X)
    with pytest.raises(TraceError, match="expected one real scalar"):
        ml.grad(program(lambda w, x: (loss(layer(w, x)),))).program(X, X)


def test_a_gradient_of_whole_numbers_or_by_them_is_refused(slices, loss):
    count = jit(lambda x: (x > 0).sum(), slice=slices[0])
    with pytest.raises(TraceError, match="no gradient; got a result int32"):
        ml.grad(program(count)).program(X)
    with pytest.raises(
        TraceError, match=r"an argument int32\[4,4\]; expected trees of"
    ):
        ml.grad(program(loss)).program(X.astype(np.int32))


def test_has_aux_without_a_pair_is_refused(loss):
    with pytest.raises(TraceError, match="expected a pair of the loss and anything"):
        ml.grad(program(loss), has_aux=True).program(X)


def test_bad_argnums_are_refused(slices, loss):
    f = program(lambda x, n: loss(x), static_argnums=1)
    with pytest.raises(ConfigError, match="got 2 arguments by position; expected"):
        ml.grad(f, argnums=2).program(X, 3)
    with pytest.raises(ConfigError, match="got a static argument at position 1"):
        ml.grad(f, argnums=1).program(X, 3)
    with pytest.raises(ConfigError, match="argnums cannot be used; got 'x'"):
        ml.grad(f, argnums="x")


def test_a_function_without_a_derivative_is_refused_with_the_users_line(slices, loss):
    def halve(x):
        return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)

    halved = jit(halve, slice=slices[0])
    with pytest.raises(TraceError, match=r"halve.*Reverse-mode") as caught:
        ml.grad(program(lambda x: loss(halved(x)))).program(X)
    assert "loss(halved(x))" in caught.value.where


def test_a_program_of_more_than_calls_is_refused(loss):
    tape = Tape("f")
    x = tape.argument(X, "x")
    with recording(tape):
        result = loss(x)
    recorded = tape.program([result], is_fusible=False)
    moved = Transfer(Ref(0), recorded.value(Ref(0)), Route.PUT)
    more = replace(recorded, nodes=(*recorded.nodes, moved))
    with pytest.raises(TraceError, match="'f' has no gradient; got a transfer"):
        plan(tape, more, Ref(1), [Ref(0)], keeps=True)


def test_sharded_functions_keep_their_shardings(slices):
    layer = jit(
        lambda w, x: x @ w,
        slice=slices[0],
        in_shardings=(P(None, "data"), P()),
        out_shardings=P(None, "data"),
    )
    total = jit(lambda x: x.sum(), slice=slices[0])
    recorded = ml.grad(program(lambda w, x: total(layer(w, x))), (0, 1)).program(X, X)
    specs = [recorded.value(ref).spec for ref in recorded.results]
    assert specs == [(None, "data"), ()]
