"""What a training step saves is what one program has, and a resumed run is the same."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from tests.ml.moe_cases import random_params, random_rows
from tests.ml.moe_flows import source_of
from timelyml import Cluster, Dataflow
from timelyml.errors import CheckpointError, ConfigError
from timelyml.ml import (
    Checkpoint,
    Checkpoints,
    MoE,
    load_checkpoint,
    rows,
    sharded,
    train_step,
)
from timelyml.ml.moe import updated_bias
from timelyml.operators import collect
from timelyml.testing import FlowTester

STEPS, SHARDS = 5, 2
MOE = MoE(num_experts=4, top_k=2, num_shards=2, bias_rate=0.01)
# Float32 sums in another order, over a few steps.
TOLERANCE = 2e-5
TIMEOUT_S = 100


def adam(rate=1e-2):
    return optax.adam(rate)


def error(out, x):
    return (jnp.sum((out - jnp.sin(x)) ** 2) / 12)[None]


def loss_of(params, batch):
    out, routing = MOE(params, batch["x"])
    return sharded.call(error, out, batch["x"]), routing.sums.counts


def first_params():
    return random_params(0) | {"bias": np.zeros(4, np.float32)}


def blocks_of(first, steps):
    every = [random_rows(step, 6 * SHARDS) for step in range(first, steps)]
    return [[{"x": part} for part in np.split(each, SHARDS)] for each in every]


def built(steps=STEPS, *, first=0, params=None, optimiser=adam, **options):
    """A graph that trains from step `first` up to `steps`."""
    flow = Dataflow("training")
    blocks = blocks_of(first, steps)
    step = train_step(loss_of, optimiser, has_aux=True, clip_norm=0.5, **options)
    batch = rows(source_of(flow, blocks), blocks[0][0])
    trained = step(first_params() if params is None else params, batch)
    collect(trained.loss, name="loss")
    collect(trained.weights, name="weights")
    if trained.saved is not None:
        collect(trained.saved, name="saved")
    return flow.build()


def in_order(graph, seed, num_workers):
    with FlowTester(num_workers, seed=seed) as tester:
        return tester.run(graph)


def learnt(result):
    """Losses, and the bytes of all weights."""
    losses = [block.tobytes() for _, block in result.batches("loss")]
    weights = sharded.assemble(first_params(), result["weights"])
    return losses, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(weights)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Checkpoints of every second step, and of the last one."""
    directory = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(directory, 2, keep=5, about={"seed": 0})
    result = in_order(built(checkpoints=checkpoints), 0, 2)
    files = dict(result["saved"])
    assert list(files) == [2, 4, 5]
    return {step: load_checkpoint(path) for step, path in files.items()}


@pytest.fixture(scope="module")
def uninterrupted():
    return learnt(in_order(built(), 1, 2))


@pytest.mark.parametrize(("step", "num_workers"), [(2, 1), (2, 3), (4, 2)])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    directory, uninterrupted, step, num_workers
):
    graph = built(first=step, resume=directory[step])

    losses, weights = learnt(in_order(graph, step, num_workers))

    assert losses == uninterrupted[0][step:]
    assert weights == uninterrupted[1]


def test_steps_are_counted_on_and_saved_again_in_the_same_bits(directory, tmp_path):
    graph = built(first=2, resume=directory[2], checkpoints=Checkpoints(tmp_path, 4))

    result = in_order(graph, 9, 1)

    assert [step for step, _ in result["saved"]] == [4, 5]
    again = load_checkpoint(tmp_path)
    assert again.step == 5
    for kind in ("params", "state"):
        ours, first = getattr(again, kind), getattr(directory[5], kind)
        assert {k: v.tobytes() for k, v in ours.items()} == {
            k: v.tobytes() for k, v in first.items()
        }


def test_a_checkpoint_holds_what_one_program_has_after_that_step(directory):
    @functools.partial(jax.grad, has_aux=True)
    def gradient_of(params, x):
        out, routed = MOE.dense(params, x)
        return error(out, x)[0], routed.sums.counts

    gradient_of = jax.jit(gradient_of)
    optimiser = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    params = first_params()
    state = optimiser.init(params)
    for blocks in blocks_of(0, 2):
        x = np.concatenate([block["x"] for block in blocks])

        gradients, counts = gradient_of(params, x)
        bias = updated_bias(params["bias"], counts, MOE.bias_rate)
        updates, state = optimiser.update(gradients, state, params)
        params = optax.apply_updates(params, updates) | {"bias": bias}

    names = functools.partial(jax.tree_util.tree_leaves_with_path)
    trained = {jax.tree_util.keystr(path): leaf for path, leaf in names(params)}
    states = {jax.tree_util.keystr(path): leaf for path, leaf in names(state[1])}
    ours = directory[2]
    assert ours.step == 2
    assert ours.about == {"seed": 0}
    assert set(ours.params) == set(trained)
    # The bias is state that is not learnt, and has no moments.
    moments = {f"[0].{kind}['bias']" for kind in ("mu", "nu")}
    assert set(ours.state) == set(states) - moments
    for got, expected in ((ours.params, trained), (ours.state, states)):
        for name, array in got.items():
            assert array.shape == expected[name].shape, name
            np.testing.assert_allclose(array, expected[name], atol=TOLERANCE)


def test_a_checkpoint_of_another_model_is_refused_as_the_step_is_built(directory):
    other = random_params(0, d_ff=4) | {"bias": np.zeros(4, np.float32)}
    with pytest.raises(CheckpointError, match=r"other parameters; got .* for .*down"):
        built(first=2, resume=directory[2], params=other)
    sgd = functools.partial(optax.sgd, 0.1)
    with pytest.raises(CheckpointError, match=r"other states of the optimiser; got"):
        built(first=2, resume=directory[2], optimiser=sgd)


def test_a_full_disk_ends_the_run_with_the_step_and_the_file(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2)
    (tmp_path / "step-000000004.partial").symlink_to("/dev/full")

    with (
        Cluster(workers=2, mode="threads") as cluster,
        pytest.raises(CheckpointError, match=r"step 4 cannot be written; got No space"),
    ):
        cluster.run(built(checkpoints=checkpoints), timeout_s=TIMEOUT_S)

    assert [path.name for path in tmp_path.iterdir()] == ["step-000000002.checkpoint"]
    assert load_checkpoint(tmp_path).step == 2


def test_arrays_of_every_type_and_shape_come_back_and_old_files_go(tmp_path):
    arrays = {
        "count": np.int32(7),
        "half": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        "none": np.zeros((0, 4), np.float32),
        "flags": np.array([True, False]),
        "strided": np.arange(12, dtype=np.float64).reshape(3, 4).T,
    }
    checkpoints = Checkpoints(tmp_path / "new", 1, keep=2)
    for step in (8, 9, 10):
        checkpoints.save(Checkpoint(step, arrays, {"count": np.int64(step)}))

    found = load_checkpoint(tmp_path / "new")

    assert found.step == 10
    assert found.state["count"] == 10
    for name, array in arrays.items():
        assert found.params[name].dtype == array.dtype
        assert found.params[name].shape == array.shape
        assert (found.params[name] == array).all()
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_a_torn_or_damaged_file_is_refused_and_the_one_before_it_is_whole(tmp_path):
    checkpoints = Checkpoints(tmp_path, 1)
    weights = {"w": np.arange(100.0)}
    checkpoints.save(Checkpoint(1, weights, {}))
    path = checkpoints.save(Checkpoint(2, weights, {}))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    torn = [whole[:size] for size in (0, 10, 40, 70, 200, len(whole) - 1)]

    for content in [*torn, bytes(flipped), whole + b"x"]:
        path.write_bytes(content)
        with pytest.raises(
            CheckpointError, match=r"step-000000002.*torn or damaged|torn"
        ):
            load_checkpoint(tmp_path)

    path.unlink()
    assert load_checkpoint(tmp_path).step == 1


def test_what_is_no_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint; got directory"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read; got No such file"):
        load_checkpoint(tmp_path / "none.checkpoint")
    with pytest.raises(ConfigError, match="checkpoints cannot be made; got every 0"):
        Checkpoints(tmp_path, 0)
    with pytest.raises(ConfigError, match="checkpoints cannot be described; got about"):
        Checkpoints(tmp_path, 1, about={"path": tmp_path})
