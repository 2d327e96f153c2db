"""Labelled models: which part goes where, and what cannot be parted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from timelyml import ml
from timelyml.errors import ConfigError, ProgramError, TraceError

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
W = {"in": np.ones((4, 4), np.float32), "out": np.ones((2, 1), np.float32)}


@pytest.fixture
def client():
    return ml.OfflineClient()


@pytest.fixture
def slices(client):
    return [client.slice({"data": 2}, name=name) for name in "abc"]


@pytest.fixture
def two(slices):
    return {"encoder": slices[0], "decoder": slices[1]}


def model(w, x):
    with jax.named_scope("encoder"):
        h = jnp.tanh(x @ w["in"])
    mask = jnp.tril(jnp.ones((8, 8)))  # wherever it is needed
    h = (mask @ jax.nn.relu(h))[:, :2]  # less to move after than before
    with jax.named_scope("decoder"):
        return (mask @ h @ w["out"]).sum()


def calls(function, *args):
    """Names and slices of the calls of a program."""
    recorded = function.program(*args)
    return [(node.computation.name, node.slice) for _, node in recorded.calls()]


def test_labels_say_where_and_the_rest_goes_where_few_bytes_move(two):
    lines = ml.fragments(model, two).ir(W, X).splitlines()
    assert [each.strip() for each in lines if " = call" in each] == [
        "%3 = call encoder(%2, %0): float32[8,2] on a",
        "%4 = call decoder(%3, %1): float32[] on b",
    ]


def test_a_gradient_within_the_function_has_the_labels_of_what_it_is_of(two):
    def step(w, x):
        loss, gradient = jax.value_and_grad(model)(w, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradient), loss

    found = calls(ml.fragments(step, two), W, X)
    assert found == [("encoder", "a"), ("decoder", "b"), ("encoder", "a")]


def test_the_gradient_of_fragments_goes_back_through_them(two):
    assert calls(ml.grad(ml.fragments(model, two)), W, X) == [
        ("encoder_forward", "a"),
        ("decoder_turn", "b"),
        ("encoder_backward", "a"),
    ]


def test_arguments_are_at_home_where_they_are_read_first(two, slices):
    w, x = ml.homes(ml.fragments(model, two), W, X)
    assert (w["in"], w["out"], x) == (slices[0], slices[1], slices[0])
    with pytest.raises(ConfigError, match="homes of what is not in fragments"):
        ml.homes(ml.program(lambda: None))


def test_the_innermost_label_counts_and_calls_are_inlined(slices):
    @jax.jit
    def block(x):
        with jax.named_scope("attention"):
            x = jnp.sin(x)
        return jnp.cos(x)

    def whole(x):
        with jax.named_scope("model"):
            return block(x).sum()

    fragments = ml.fragments(whole, {"model": slices[0], "attention": slices[1]})
    assert calls(fragments, X) == [("attention", "b"), ("model", "a")]


def test_a_short_loop_with_labels_is_unrolled(two):
    def step(h, w):
        with jax.named_scope("encoder"):
            h = jnp.sin(h @ w)
        with jax.named_scope("decoder"):
            h = jnp.cos(h)
        return h, h.sum()

    fragments = ml.fragments(lambda ws, x: jax.lax.scan(step, x, ws), two)
    found = calls(fragments, np.ones((3, 4, 4), np.float32), X)
    labelled = [name for name, _ in found if name in two]
    assert labelled == ["encoder", "decoder"] * 3


def test_a_loop_of_one_label_stays_whole(two):
    def looped(x):
        def step(h, _):
            with jax.named_scope("encoder"):
                return jnp.sin(h), None

        x, _ = jax.lax.scan(step, x, None, length=1000)
        with jax.named_scope("decoder"):
            return x.sum()

    assert len(calls(ml.fragments(looped, two), X)) == 2


def both(x):
    with jax.named_scope("encoder"):
        x = jnp.sin(x)
    with jax.named_scope("decoder"):
        return jnp.cos(x)


custom = jax.custom_jvp(both)
custom.defjvp(lambda primals, tangents: (both(*primals), tangents[0]))
REFUSED = {
    "65 iterations are more than are unrolled, 64": lambda x: jax.lax.scan(
        lambda h, _: (both(h), None), x, None, length=65
    )[0],
    "how often it runs is known only then": lambda x: jax.lax.while_loop(
        lambda h: h.sum() > 0, both, x
    ),
    "which branch is taken is known only when": lambda x: jax.lax.cond(
        x.sum() > 0, both, jnp.tan, x
    ),
    "what jax.checkpoint computes again has to": jax.checkpoint(both),
    "its derivative is given for the whole": custom,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_parted_is_refused_with_the_reason(two, reason):
    fragments = ml.fragments(REFUSED[reason], two)
    with pytest.raises(TraceError, match=f"got decoder, encoder, though {reason}"):
        fragments.program(X)


def test_what_is_no_function_is_refused(slices):
    with pytest.raises(ConfigError, match="no function; got 3"):
        ml.fragments(3, {"encoder": slices[0]})


def test_labels_that_do_not_occur_are_refused_and_those_that_do_are_named(slices):
    fragments = ml.fragments(model, {"encoder": slices[0], "head": slices[1]})
    with pytest.raises(
        ConfigError, match="got no 'head' among its scopes decoder, enc"
    ):
        fragments.program(W, X)
    with pytest.raises(ConfigError, match="fragments have no assignment"):
        ml.fragments(model, {})


def test_results_may_be_arguments_and_constants(two):
    def function(x, y):
        return both(x), y, jnp.arange(3), 2.5

    recorded = ml.fragments(function, two).program(X, X)
    shapes = [recorded.value(ref).type.shape for ref in recorded.results]
    assert shapes == [(8, 4), (8, 4), (3,), ()]


def test_a_callback_is_refused_as_parts_do_not_travel_as_code(two):
    def printing(x):
        jax.debug.print("x {}", x)
        return both(x)

    with pytest.raises(TraceError, match="'printing' calls Python on the host"):
        ml.fragments(printing, two).program(X)


def test_a_function_that_computes_nothing_is_refused(two):
    def nothing(x):
        both(x)
        return x

    with pytest.raises(ProgramError, match="computes nothing"):
        ml.fragments(nothing, two).program(X)


def long(params, x):
    """Three stages; two share weights, and a value skips one."""
    with jax.named_scope("first"):
        h = jnp.sin(x["a"] @ params["w"])
    skipped = h * x["b"]
    with jax.named_scope("second"):
        h = jnp.cos(h @ params["v"])
    with jax.named_scope("third"):
        return {"y": h @ params["w"].T + skipped, "one": 1.0}


NAMES = ("first", "second", "third")
PARAMS = dict.fromkeys(("w", "v", "unused"), X[:4])


def staged(function=long, names=NAMES):
    return ml.named_stages(function, names, PARAMS, {"a": X, "b": X})


def test_stages_compute_the_model_for_microbatches_of_any_size():
    cut = staged()
    assert tuple(stage.__name__ for stage in cut.stages) == NAMES
    assert cut.tied == (((0, "['w']"), (2, "['w']")),)
    weights = cut.params_of(PARAMS)
    assert list(map(sorted, weights)) == [["['unused']", "['w']"], ["['v']"], ["['w']"]]
    for size in (8, 3):
        x = y = {"a": X[:size], "b": X[:size]}
        for stage, params in zip(cut.stages, weights, strict=True):
            y = stage(params, y)
        whole = long(*jax.tree.map(jnp.asarray, (PARAMS, x)))
        jax.tree.map(np.testing.assert_array_equal, y, whole)
    same = jax.tree.map(lambda a, b: a is b, cut.join(weights), PARAMS)
    assert all(jax.tree.leaves(same))


def test_stages_that_cannot_be_in_order_are_refused():
    def twice(params, x):
        return long(params, {"a": long(params, x)["y"], "b": x["b"]})

    with pytest.raises(TraceError, match="stage 'first' reads what comes after it"):
        staged(twice)
    with pytest.raises(ConfigError, match="no scope 'fourth'"):
        staged(names=("first", "fourth"))
    with pytest.raises(ConfigError, match="stages cannot be told apart"):
        staged(names=("first", "first"))


def test_a_stage_before_the_first_is_refused():
    cut = staged()
    with pytest.raises(TraceError, match="is given what no stage before it gave"):
        cut.stages[1](cut.params_of(PARAMS)[1], (X,))
