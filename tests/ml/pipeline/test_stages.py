"""Pipelines of small stages: sizes, shared weights, replicas, and what is refused."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from timelyml import ml
from timelyml.errors import ConfigError, ScheduleError, TraceError
from timelyml.ml.moe import balance
from timelyml.ml.pipeline import gpipe, peak_by_stage
from timelyml.testing.leftovers import Leftovers

WIDTH, CLASSES = 4, 7
TOLERANCE = 1e-5  # float32, sums in another order
SGD, ADAM = optax.sgd(0.1), optax.adam(0.05)  # one of each, or each would be compiled


@pytest.fixture(scope="module")
def client():
    before = Leftovers.now()
    quickly = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with ml.local(islands=2, devices_per_island=2, environment=quickly) as client:
        yield client
    before.check_gone(sockets=False)


@pytest.fixture(scope="module")
def slices(client):
    """One rank on each island."""
    return [client.slice({"data": 1}, island=f"island-{i}") for i in range(2)]


def first(params, tokens):
    return jnp.tanh(params["table"][tokens] @ params["mix"])


def last(params, x):
    return jnp.tanh(x @ params["mix"]) @ params["table"].T


def loss_fn(logits, target):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    counts = target > 0
    return jnp.sum(jnp.where(counts, losses, 0)), jnp.sum(counts)


def weights(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"mix": (WIDTH, WIDTH), "table": (CLASSES, WIDTH)}
    return [
        {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
        for _ in range(2)
    ]


def batch(num_rows, seed=1):
    rng = np.random.default_rng(seed)
    tokens, target = rng.integers(CLASSES, size=(2, num_rows, 5))
    target[0, 1:] = 0  # rows count unequally much
    return tokens, target


def in_one_piece(params, tokens, target):
    total, count = loss_fn(last(params[1], first(params[0], tokens)), target)
    return total / count


@functools.cache
def step_in_one_piece(optimiser, loss):
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(params, state, tokens, target):
        value, gradients = jax.value_and_grad(loss)(params, tokens, target)
        changes, state = optimiser.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, value

    return step


def unpipelined(optimiser, params, batches, loss=in_one_piece):
    """Train as one program; return losses and weights."""
    state, losses = jax.jit(optimiser.init)(params), []
    for each in batches:
        step = step_in_one_piece(optimiser, loss)
        params, state, value = step(params, state, *each)
        losses.append(float(value))
    return losses, params


def pipelined(step, params, batches):
    state, losses = step.init(params), []
    for each in batches:
        state, loss = step(state, *each)
        losses.append(loss)
    return [float(each) for each in losses], state.params


def assert_same(ours, theirs):
    np.testing.assert_allclose(ours[0], theirs[0], atol=TOLERANCE)
    for got, expected in zip(
        jax.tree.leaves(ours[1]), jax.tree.leaves(theirs[1]), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=TOLERANCE)


@pytest.fixture(scope="module")
def pipe(slices):
    return ml.pipeline([first, last], slices=slices, num_microbatches=3)


def test_microbatches_of_unequal_size_give_what_the_whole_batch_gives(pipe):
    batches = [batch(8, seed) for seed in range(3)]  # 3, 3 and 2 rows
    ours = pipelined(pipe.train_step(loss_fn, ADAM), weights(), batches)
    assert_same(ours, unpipelined(ADAM, weights(), batches))


def test_microbatches_may_be_given_in_any_sizes(pipe):
    tokens, target = batch(8)
    parts = [
        (tokens[start:stop], target[start:stop])
        for start, stop in itertools.pairwise((0, 2, 5, 8))
    ]
    step = pipe.train_step(loss_fn, SGD)
    state, loss = step.on_microbatches(step.init(weights()), parts)
    expected = unpipelined(SGD, weights(), [(tokens, target)])
    assert_same(([float(loss)], state.params), expected)


def masked_loss(logits, target, is_row):
    total, count = loss_fn(logits, jnp.where(is_row[:, None], target, 0))
    return total, count


@pytest.mark.slow
def test_rows_may_be_padded_to_a_few_sizes(pipe):
    tokens, target = batch(29)
    sizes = (9, 10, 10)  # of which the first is padded by one row
    ends = (0, *itertools.accumulate(sizes))
    parts = [(tokens[a:b], target[a:b]) for a, b in itertools.pairwise(ends)]
    step = pipe.train_step(masked_loss, SGD, pad_rows=True)
    state, loss = step.on_microbatches(step.init(weights()), parts)
    expected = unpipelined(SGD, weights(), [(tokens, target)])
    assert_same(([float(loss)], state.params), expected)
    assert len(step._stages[0][-1]._shaped) == 1


def test_a_step_can_be_traced_into_one_program_with_the_same_result(pipe, slices):
    tokens, target = batch(6)
    parts = [
        (
            slices[0].client.put(tokens[i : i + 2], slices[0].sharding()),
            slices[1].client.put(target[i : i + 2], slices[1].sharding()),
        )
        for i in (0, 2, 4)
    ]
    step = pipe.train_step(loss_fn, SGD)
    program = ml.program(step.on_microbatches)
    state, loss = program(step.init(weights()), parts)
    ours = [float(loss)], state.params
    assert_same(ours, unpipelined(SGD, weights(), [(tokens, target)]))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_one_microbatch_for_two_stages_will_do(pipe, schedule):
    batches = [batch(3)]
    few = pipe.with_schedule(schedule, 1)
    ours = pipelined(few.train_step(loss_fn, SGD), weights(), batches)
    assert_same(ours, unpipelined(SGD, weights(), batches))


def tied_loss(params, tokens, target):
    both = [params["first"], {**params["last"], "table": params["first"]["table"]}]
    return in_one_piece(both, tokens, target)


def test_shared_weights_have_one_gradient_and_one_state_of_the_optimiser(slices):
    batches = [batch(6, seed) for seed in range(3)]
    params = weights()
    params[1]["table"] = params[0]["table"]

    pipe = ml.pipeline(
        [first, last],
        slices=slices,
        num_microbatches=3,
        tied=[[(0, "table"), (-1, "table")]],
    )
    step = pipe.train_step(loss_fn, ADAM)
    losses, trained = pipelined(step, params, batches)
    tree = {"first": params[0], "last": {"mix": params[1]["mix"]}}
    expected, whole = unpipelined(ADAM, tree, batches, tied_loss)
    assert_same(
        (losses, [trained[0], trained[1]["mix"]]),
        (expected, [whole["first"], whole["last"]["mix"]]),
    )
    np.testing.assert_array_equal(trained[0]["table"], trained[1]["table"])
    state = step.init(params).replicas[0].optimiser
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(each)) for each in state]
    mix, table = WIDTH * WIDTH, CLASSES * WIDTH
    assert sizes == [1 + 2 * (mix + table), 1 + 2 * mix]


def test_replicas_on_two_islands_and_more_on_each_train_as_one(client):
    batches = [batch(8, seed) for seed in range(3)]
    replicas = [
        [client.slice({"data": 1}, island=f"island-{i // 2}") for _ in range(2)]
        for i in range(4)
    ]
    pipe = ml.pipeline([first, last], slices=replicas, num_microbatches=2)
    step = pipe.train_step(loss_fn, ADAM)
    state, losses = step.init(weights()), []
    for each in batches:
        state, loss = step(state, *each)
        losses.append(float(loss))
    assert_same((losses, state.params), unpipelined(ADAM, weights(), batches))
    of_all = [jax.tree.leaves(each.params) for each in state.replicas]
    for leaves in zip(*of_all, strict=True):
        first_of_all, *others = map(np.asarray, leaves)
        for each in others:
            np.testing.assert_array_equal(each, first_of_all)


def test_weights_that_lie_cut_on_one_slice_lie_so_on_those_of_all_replicas(client):
    wide = [client.slice({"model": 2}, island=f"island-{i}") for i in range(2)]
    specs = {"mix": P(None, "model"), "table": P()}
    shardings = {name: wide[0].sharding(each) for name, each in specs.items()}
    params = [client.put(tree, shardings) for tree in weights()]
    pipe = ml.pipeline(
        [first, last], slices=[[each] for each in wide], schedule="gpipe",
        num_microbatches=1,
    )  # fmt: skip
    step = pipe.train_step(loss_fn, SGD)
    state, loss = step(step.init(params), *batch(8))

    expected = unpipelined(SGD, weights(), [batch(8)])
    assert_same(([float(loss)], state.params), expected)
    for replica, slice_ in zip(state.replicas, wide, strict=True):
        assert all(each["mix"].slice is slice_ for each in replica.params)
        assert all(each["mix"].spec == (None, "model") for each in replica.params)


def clipping(limit):
    return optax.chain(optax.clip_by_global_norm(limit), SGD)


@pytest.mark.parametrize("limit", [0.05, 100.0])
def test_gradients_are_clipped_by_the_norm_of_all_stages(pipe, limit):
    batches = [batch(6, seed) for seed in range(3)]
    step = pipe.train_step(loss_fn, SGD, clip_norm=limit)
    expected = unpipelined(clipping(limit), weights(), batches)
    assert_same(pipelined(step, weights(), batches), expected)
    freely = unpipelined(SGD, weights(), batches)
    moved = np.abs(freely[1][0]["mix"] - expected[1][0]["mix"]).max()
    assert (moved > 100 * TOLERANCE) == (limit < 1)


def test_replicas_are_clipped_alike_and_shared_weights_count_once(client):
    batches, limit = [batch(8, seed) for seed in range(2)], 0.05
    params = weights()
    params[1]["table"] = params[0]["table"]
    pipe = ml.pipeline(
        [first, last],
        slices=[
            [client.slice({"data": 1}, island=f"island-{i}") for _ in range(2)]
            for i in range(2)
        ],
        num_microbatches=2,
        tied=[[(0, "table"), (-1, "table")]],
    )
    step = pipe.train_step(loss_fn, SGD, clip_norm=limit)
    state, losses = step.init(params), []
    for each in batches:
        state, loss = step(state, *each)
        losses.append(float(loss))
    tree = {"first": params[0], "last": {"mix": params[1]["mix"]}}
    expected, whole = unpipelined(clipping(limit), tree, batches, tied_loss)
    assert_same(
        (losses, [state.params[0], state.params[1]["mix"]]),
        (expected, [whole["first"], whole["last"]["mix"]]),
    )
    ours, theirs = (jax.tree.leaves(each.params) for each in state.replicas)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_norm_that_nothing_can_be_clipped_to_is_refused(pipe):
    with pytest.raises(ConfigError, match=r"got 0; expected a number above 0"):
        pipe.train_step(loss_fn, SGD, clip_norm=0)


def test_rows_are_cut_over_the_devices_of_a_stage(client):
    batches = [batch(8, seed) for seed in range(2)]
    wide = [client.slice({"data": 2}, island=f"island-{i}") for i in range(2)]
    pipe = ml.pipeline([first, last], slices=wide, num_microbatches=2, schedule="zb-h1")
    ours = pipelined(pipe.train_step(loss_fn, ADAM), weights(), batches)
    assert_same(ours, unpipelined(ADAM, weights(), batches))


@pytest.mark.slow
def test_a_tree_between_stages_carries_a_loss_of_the_way(slices):
    def bottom(params, tokens):
        y = first(params, tokens)
        return {"y": y, "penalty": jnp.sum(y**2, (1, 2)), "rows": tokens}

    def top(params, x):
        return last(params, x["y"]), x["penalty"], x["rows"]

    def both(outputs, target):
        logits, penalty, rows = outputs
        total, count = loss_fn(logits, target)
        return total + 0.1 * jnp.sum(penalty) + 0.0 * jnp.sum(rows), count

    def whole(params, tokens, target):
        total, count = both(top(params[1], bottom(params[0], tokens)), target)
        return total / count

    batches = [batch(6)]
    expected = unpipelined(SGD, weights(), batches, whole)
    pipe = ml.pipeline([bottom, top], slices=slices, num_microbatches=3)
    for schedule in ("1f1b", "zb-h1"):
        step = pipe.with_schedule(schedule).train_step(both, SGD)
        assert_same(pipelined(step, weights(), batches), expected)


MOE = ml.MoE(num_experts=4, top_k=2, d_ff=3)


def with_experts(params, x):
    out, routed = MOE.dense(params, x)
    return {"y": x + out, "balance": balance(routed.sums)}


def with_experts_too(params, x):
    out, routed = MOE.dense(params, x["y"])
    return x["y"] + out, x["balance"] + balance(routed.sums)


def balanced_loss(outputs, target):
    y, of_routers = outputs
    return jnp.sum((y - target) ** 2) + of_routers, jnp.float32(len(target))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_losses_of_routers_have_the_same_gradients_if_backward_is_split(
    slices, schedule
):
    rng = np.random.default_rng(2)
    x, target = rng.normal(size=(2, 10, WIDTH)).astype(np.float32)
    params = [MOE.init(jax.random.key(seed), x) for seed in (1, 2)]
    pipe = ml.pipeline(
        [with_experts, with_experts_too], slices=slices, schedule=schedule,
        num_microbatches=2,
    )  # fmt: skip
    step = pipe.train_step(balanced_loss, SGD)
    state, loss = step(step.init(params), x, target)

    def in_microbatches(params):
        halves = zip(np.split(x, 2), np.split(target, 2), strict=True)
        both = [
            balanced_loss(with_experts_too(params[1], with_experts(params[0], a)), b)[0]
            for a, b in halves
        ]
        return sum(both) / len(x)

    value, gradients = jax.jit(jax.value_and_grad(in_microbatches))(params)
    expected = jax.tree.map(lambda a, b: a - 0.1 * b, params, gradients)
    assert_same(([float(loss)], state.params), ([float(value)], expected))


def test_no_more_residuals_live_at_once_than_the_formulas_say(pipe):
    record = ml.PipelineRecord()
    many = pipe.with_schedule("1f1b", 6)
    step = many.train_step(loss_fn, SGD)
    params, (tokens, target) = weights(), batch(12)
    step(step.init(params), tokens, target, record=record)
    peaks = tuple(record.peak_live.values())
    assert peaks == peak_by_stage(many.schedule) == (2, 1)
    hidden = jax.eval_shape(first, params[0], tokens[:2])
    assert record.peak_bytes[0] >= 2 * hidden.size * hidden.dtype.itemsize
    record.timeline()
    assert tuple(record.peak_live.values()) == peaks


def test_a_step_is_started_without_waiting_for_one_result(pipe):
    step = pipe.train_step(loss_fn, SGD)
    state = step.init(weights())
    state, loss = step(state, *batch(6))
    assert isinstance(loss, ml.Handle)
    assert all(isinstance(leaf, ml.Handle) for leaf in jax.tree.leaves(state.params))


def test_the_interpreter_takes_a_schedule_of_ones_own(pipe):
    batches = [batch(6)]
    own = pipe.with_schedule(gpipe(2, 2), 2)
    ours = pipelined(own.train_step(loss_fn, SGD), weights(), batches)
    assert_same(ours, unpipelined(SGD, weights(), batches))


def mean_loss(logits, target):
    total, count = loss_fn(logits, target)
    return total / count


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "zbv"}, "1 stages for each slice; expected 2"),
        ({"schedule": "fastest"}, "unknown name; expected one of gpipe"),
        ({"num_microbatches": None}, "no number of microbatches"),
        ({"schedule": gpipe(3, 3)}, "3 stages on 3 ranks; expected 2 on 2"),
        ({"schedule": gpipe(2, 4)}, "4 microbatches; expected 3"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(slices, options, says):
    with pytest.raises(ScheduleError, match=says):
        ml.pipeline([first, last], slices=slices, **{"num_microbatches": 3, **options})


def test_a_loss_that_is_a_mean_is_refused(pipe):
    step = pipe.train_step(mean_loss, SGD)
    with pytest.raises(
        ConfigError, match=r"no pair of scalars; got \(\); .*do not div"
    ):
        step(step.init(weights()), *batch(6))


def test_an_optimiser_that_looks_across_stages_is_refused_and_others_are_not(pipe):
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    says = r"stage 0 depends on gradients .* \[1\].*; leave that clipping to clip_norm="
    with pytest.raises(ConfigError, match=says):
        pipe.train_step(loss_fn, clipped).init(weights())
    each = optax.chain(optax.clip(1.0), optax.clip_by_block_rms(1.0), optax.adamw(0.1))
    pipe.train_step(loss_fn, each).init(weights())


def test_a_stage_that_cannot_be_traced_names_the_line(slices):
    def wrong(params, x):
        return x @ params["table"]

    pipe = ml.pipeline([first, wrong], slices=slices, num_microbatches=3)
    step = pipe.train_step(loss_fn, SGD)
    with pytest.raises(TraceError, match="table") as caught:
        step(step.init(weights()), *batch(6))
    assert 'return x @ params["table"]' in str(caught.value.where)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda step: step.init(weights()[:1]), "got 1 trees; expected one for each"),
        (
            lambda step: step.init([{"mix": np.arange(3)}, weights()[1]]),
            "stage 0 has a weight that cannot be trained; got int64",
        ),
        (lambda step: step(step.init(weights()), *batch(2)), "got 2 rows"),
        (
            lambda step: step.on_microbatches(step.init(weights()), [batch(2)]),
            "got 1; expected 3 for each of 1 replicas",
        ),
    ],
)
def test_what_does_not_fit_is_refused_at_the_call(pipe, ask, says):
    with pytest.raises(ConfigError, match=says):
        ask(pipe.train_step(loss_fn, SGD))


@pytest.mark.parametrize(
    ("tied", "says"),
    [
        ([[(0, "tables"), (1, "table")]], r"no such leaf; expected one of \['mix'\]"),
        ([[(0, "table"), (1, "mix")]], "expected two or more of one shape"),
        ([[(0, "table"), (2, "table")]], "no stage 2"),
        ([[(0, "mix"), (1, "mix")], [(0, "mix"), (1, "mix")]], "named twice"),
    ],
)
def test_ties_of_what_is_not_there_are_refused(slices, tied, says):
    pipe = ml.pipeline([first, last], slices=slices, num_microbatches=2, tied=tied)
    with pytest.raises(ConfigError, match=says):
        pipe.train_step(loss_fn, SGD).init(weights())
