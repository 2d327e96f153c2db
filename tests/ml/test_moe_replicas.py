"""Experts on several shards learn what experts on one do, and stay equal."""

import functools

import numpy as np
import optax
import pytest

from tests.ml.moe_cases import assert_trees_close, random_params
from tests.ml.moe_flows import train
from tests.ml.sharded.test_training import InOrder, blocks_of, check, loss_of, trained
from timelyml.errors import ConfigError
from timelyml.ml import Checkpoints, MoE, load_checkpoint, sharded
from timelyml.ml.moe import ExpertPlacement, replicas_by_load
from timelyml.ml.sharded.parts import Parts

REPLICATED = MoE(num_experts=4, num_shards=2, replicas={1: 2, 2: 2})


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_training_is_that_of_the_dense_layer(clip_norm):
    adam = optax.adam(1e-2)
    clipped = clip_norm and optax.chain(optax.clip_by_global_norm(clip_norm), adam)
    check(REPLICATED, random_params(6), adam, clipped, clip_norm=clip_norm)


def test_replicas_without_rows_keep_up_with_adam():
    params = random_params(7)
    params["router_bias"] = np.array([0, 0, -1e9, -1e9], np.float32)
    check(REPLICATED, params, optax.adam(1e-2))


def test_bits_depend_neither_on_order_nor_on_workers():
    params = random_params(8)
    runs = [
        trained(REPLICATED, params, optax.adam(1e-2), InOrder(seed, 1 + seed % 3))
        for seed in range(4)
    ]
    for losses, weights in runs[1:]:
        assert losses == runs[0][0]
        assert_trees_close(weights, runs[0][1], atol=0)


def test_a_checkpoint_holds_one_copy_and_goes_on_with_other_replicas(tmp_path):
    params, adam, blocks = random_params(9), functools.partial(optax.adam, 1e-2), None
    blocks = blocks_of()

    def run(moe, steps, **options):
        loss = functools.partial(loss_of, moe)
        place = InOrder(1, options.pop("workers", 2))
        losses, _, weights = train(
            loss, params, adam, blocks[steps], place, clip_norm=1.0, **options
        )
        return losses, weights

    whole = run(REPLICATED, slice(None))
    run(REPLICATED, slice(2), checkpoints=Checkpoints(tmp_path, 2))
    saved = load_checkpoint(tmp_path)
    assert saved.params["['experts']['down']"].shape == params["experts"]["down"].shape
    assert sharded.restored(params, saved)
    again = run(REPLICATED, slice(2, None), resume=saved, workers=3)
    assert again[0] == whole[0][2:]
    assert_trees_close(again[1], whole[1], atol=0)

    for replicas in ({}, {0: 2, 3: 2}):
        other = MoE(num_experts=4, num_shards=2, replicas=replicas)
        losses, weights = run(other, slice(2, None), resume=saved)
        np.testing.assert_allclose(losses, whole[0][2:], rtol=1e-5)
        assert_trees_close(weights, whole[1], atol=1e-5)


def test_rows_are_dealt_out_in_turn_to_where_the_expert_stands():
    placement = ExpertPlacement.of(8, 4, {1: 3, 6: 2})
    rng = np.random.default_rng(0)
    chosen = rng.permuted(np.tile(np.arange(8), (40, 1)), axis=1)[:, :2]
    kept = rng.random(chosen.shape) < 0.8

    to, place = (np.asarray(each) for each in placement.place(chosen, kept))

    held = [
        (*range(2 * shard, 2 * shard + 2), *placement.copies[shard])
        for shard in range(4)
    ]
    found = [
        [held[s][p] for s, p in zip(*row, strict=True)]
        for row in zip(to, place, strict=True)
    ]
    assert (np.array(found) == chosen)[kept].all()
    for expert, count in {1: 3, 6: 2, 0: 1}.items():
        rows = np.bincount(to[kept & (chosen == expert)], minlength=4)
        assert np.count_nonzero(rows) == count
        assert rows.max() - rows[rows > 0].min() <= 1


def test_all_who_hold_a_place_come_to_the_same_sum():
    parts = Parts(4, 2, ((2,), (0, 1)))
    rng = np.random.default_rng(0)
    own = [rng.standard_normal((3, 50)), rng.standard_normal((4, 50))]
    told = [{}, {}]
    for shard in (0, 1):
        for here, place, other in parts.mail(shard):
            told[other][place, shard] = own[shard][here]

    sums = [parts.added(shard, own[shard], told[shard]) for shard in (0, 1)]

    places = [parts.places(shard) for shard in (0, 1)]
    for place in range(4):
        every = [
            s[p.index(place)] for s, p in zip(sums, places, strict=True) if place in p
        ]
        assert len({each.tobytes() for each in every}) == 1
        assert len(every) == (1 if place == 3 else 2)
    np.testing.assert_allclose(sums[0][0], own[0][0] + own[1][2])
    assert parts.added(0, None, {}) is None
    (alone,) = {parts.added(0, None, {(0, 1): own[1][2]})[0].tobytes()}
    assert alone == own[1][2].tobytes()


def test_replicas_are_chosen_by_load():
    assert replicas_by_load(np.array([5, 5, 1, 1]), 1, num_shards=2) == {0: 2}
    assert replicas_by_load([1, 100, 1], 4, num_shards=3) == {0: 2, 1: 3, 2: 2}
    assert replicas_by_load([3, 2, 1], 0, num_shards=3) == {}
    counted = MoE(num_experts=4, num_shards=2, replicas={np.int64(1): np.int32(2)})
    assert hash(counted) == hash(MoE(num_experts=4, num_shards=2, replicas=((1, 2),)))
    for counts, extra in (([1, 2, 3], 7), ([1, 2], "x"), ([1, np.nan], 1), ("ab", 0)):
        with pytest.raises(ConfigError, match=f"got {extra!r} more for counts"):
            replicas_by_load(counts, extra, num_shards=3)


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        ({4: 2}, "got replicas of expert 4; expected 0 to 3"),
        ({"hot": 2}, "got replicas of expert 'hot'"),
        ({0: 3}, "got 3 replicas of expert 0; expected 1 to 2"),
        ({0: 0}, "got 0 replicas of expert 0"),
        ({0: 1.5}, "got 1.5 replicas of expert 0"),
        (2, "got 2; expected numbers of shards by expert"),
    ],
)
def test_replicas_that_cannot_be_placed_are_refused(replicas, said):
    with pytest.raises(ConfigError, match=said):
        MoE(num_experts=4, num_shards=2, replicas=replicas)


def test_copies_that_cannot_be_held_are_refused():
    for copies, said in (
        (((0,), ()), "place 0 on shard 0 twice"),
        (((3, 3), ()), "place 3 on shard 0 twice"),
        (((4,), ()), "got place 4; expected 0 to 3"),
        (((2,),), "got 1 lists; expected one for each of 2 shards"),
    ):
        with pytest.raises(ConfigError, match=said):
            Parts(4, 2, copies)
