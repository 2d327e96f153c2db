"""The backward pass in two parts: no work twice, none missing, nothing kept in vain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ml.pipeline import llama
from timelyml.ml.pipeline.flattening import evaluate as interpreted
from timelyml.ml.pipeline.flattening import num_products
from timelyml.ml.pipeline.splitting import split

WIDTH, HIDDEN, LAYERS = 6, 10, 3


def layer(w, x):
    hidden = jax.jit(jax.nn.silu)(x @ w["up"].T)
    y = x + jnp.tanh(hidden @ w["down"]) @ w["mix"]
    return y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6)


def in_turn(params, x):
    for w in params:
        x = layer(w, x)
    return x


def scanned(params, x):
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *params)
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, stacked)[0]


def rematerialised(params, x):
    for w in params:
        x = jax.checkpoint(layer)(w, x)
    return x


def weights(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"up": (HIDDEN, WIDTH), "down": (HIDDEN, WIDTH), "mix": (WIDTH, WIDTH)}
    return [
        {k: rng.normal(size=s).astype(np.float32) * 0.3 for k, s in shapes.items()}
        for _ in range(LAYERS)
    ]


def rows(count, seed=1):
    return np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)


def evaluate(part, arguments):
    """Run a part compiled; one operation after the other would compile each of them."""
    return compiled(lambda flat: interpreted(part, flat), arguments)


def compiled(function, *arguments):
    quickly = {"xla_backend_optimization_level": 0}
    return jax.jit(function, compiler_options=quickly)(*arguments)


class Cut:
    """A stage cut in two, and the ways to run it."""

    def __init__(self, stage, params, x, **options):
        self.leaves, tree = jax.tree.flatten(params)
        self.x = x
        self.is_kept = options.get("is_input_kept", False)
        self.parts = split(
            lambda w, x, extra: [stage(jax.tree.unflatten(tree, w), x[0])],
            [jax.typeof(jnp.asarray(leaf)) for leaf in self.leaves],
            [jax.typeof(jnp.asarray(x))],
            **options,
        )

    @property
    def given(self):
        return [*self.leaves, self.x] if self.is_kept else self.leaves

    def forward(self):
        return evaluate(self.parts.forward, [*self.leaves, self.x])

    def whole(self, dy):
        _, *saved = self.forward()
        return evaluate(self.parts.backward, [*self.given, *saved, dy])

    def in_two(self, dy):
        _, *saved = self.forward()
        first = evaluate(self.parts.input_part, [*self.given, *saved, dy])
        dx, carried = first[: self.parts.num_dx], first[self.parts.num_dx :]
        # What the weight part does not say it keeps is gone by then.
        kept = [
            each if i in self.parts.kept else jnp.full_like(each, jnp.nan)
            for i, each in enumerate(saved)
        ]
        last = evaluate(self.parts.weight_part, [*self.given, *kept, *carried])
        return [*dx, *last]


@pytest.mark.parametrize("stage", [in_turn, scanned])
def test_the_parts_have_the_products_of_the_whole_and_none_of_the_forward_pass(stage):
    params, x = weights(), rows(4)
    parts = Cut(stage, params, x).parts
    forward = num_products(jax.make_jaxpr(stage)(params, x).eqns)
    both = num_products(
        jax.make_jaxpr(lambda p, x, dy: jax.vjp(stage, p, x)[1](dy))(params, x, x).eqns
    )
    counts = [
        num_products(each.eqns)
        for each in (parts.forward, parts.input_part, parts.weight_part, parts.backward)
    ]
    assert forward == 3 * LAYERS
    assert counts == [forward, forward, forward, both - forward]


def test_what_is_rematerialised_is_computed_again_once_and_not_in_both_parts():
    parts = Cut(rematerialised, weights(), rows(4)).parts
    again = num_products(parts.backward.eqns) - 2 * 3 * LAYERS
    assert again == 3 * LAYERS
    first, second = (
        num_products(part.eqns) for part in (parts.input_part, parts.weight_part)
    )
    assert (first, second) == (again + 3 * LAYERS, 3 * LAYERS)


@pytest.mark.parametrize("stage", [in_turn, scanned, rematerialised])
def test_whole_and_halves_give_what_jax_gives(stage):
    params, x, dy = weights(), rows(4), rows(4, seed=2)
    cut = Cut(stage, params, x)
    y, gradients, dx = compiled(
        lambda p, x, dy: (stage(p, x), *jax.vjp(stage, p, x)[1](dy)), params, x, dy
    )
    expected = [dx, *jax.tree.leaves(gradients)]
    np.testing.assert_allclose(cut.forward()[0], y, rtol=1e-5, atol=1e-6)
    for got in (cut.whole(dy), cut.in_two(dy)):
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [in_turn, scanned])
def test_all_that_is_saved_grows_with_the_rows_so_weights_are_not_in_it(stage):
    def saved_sizes(count):
        cut = Cut(stage, weights(), rows(count))
        return [int(np.prod(aval.shape)) for aval in cut.parts.forward.out_avals[1:]]

    one, three = saved_sizes(1), saved_sizes(3)
    assert three == [3 * size for size in one]


def test_a_first_stage_keeps_its_input_by_reference_and_hands_nothing_down():
    params = {"table": rows(9, seed=3), "layers": weights()}
    tokens = np.array([[1, 2, 0], [8, 8, 1]])

    def first(params, tokens):
        return in_turn(params["layers"], params["table"][tokens])

    cut = Cut(first, params, tokens, is_input_kept=True)
    dy = np.random.default_rng(4).normal(size=(2, 3, WIDTH)).astype(np.float32)
    (expected,) = compiled(
        lambda p, dy: jax.vjp(lambda p: first(p, tokens), p)[1](dy), params, dy
    )
    assert cut.parts.num_dx == 0
    assert num_products(cut.parts.input_part.eqns) == 3 * LAYERS
    assert num_products(cut.parts.weight_part.eqns) == 3 * LAYERS
    for ours, theirs in zip(cut.in_two(dy), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_long_loop_stays_whole_and_right():
    def stage(params, x):
        return jax.lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ params), x)

    w, x, dy = weights()[0]["mix"], rows(2), rows(2, seed=2)
    cut = Cut(stage, w, x)
    gradient, dx = compiled(lambda w, x, dy: jax.vjp(stage, w, x)[1](dy), w, x, dy)
    for got in (cut.whole(dy), cut.in_two(dy)):
        np.testing.assert_allclose(got[0], dx, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(got[1], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("index", [0, 1, 3])  # stage 2 is as 1
def test_every_stage_alone_equals_the_golden_boundaries(index):
    init, grads = llama.golden("init"), llama.golden("step0_grads")
    boundaries = llama.golden("step0_boundaries")
    params = llama.stages_of(init, 4)[index]
    expected = llama.stages_of(grads, 4, "grad_")[index]
    labels = init["tokens"][0]
    x = labels if index == 0 else boundaries[f"act_{index - 1}"]
    is_last = index == 3

    def stage(params, x):
        y = llama.stage(params, x)
        if not is_last:
            return y
        total, count = llama.loss_fn(y, labels)
        return total / count

    cut = Cut(stage, params, x, is_input_kept=index == 0)
    y, *_ = cut.forward()
    dy = np.float32(1) if is_last else boundaries[f"cot_{index}"]
    wanted = grads["loss"] if is_last else boundaries[f"act_{index}"]
    np.testing.assert_allclose(y, wanted, atol=2e-5)  # ten times the files' own error
    got = cut.in_two(dy)
    if index:
        dx, *got = got
        np.testing.assert_allclose(dx, boundaries[f"cot_{index - 1}"], atol=1e-6)
    for ours, theirs in zip(got, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=7e-5)
