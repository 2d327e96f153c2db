"""Golden layers in the layout of `moe_dense`, and a layer run as the dataflow runs it."""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from timelyml.ml.moe import (
    Groups,
    TokenChoice,
    add_sums,
    balance,
    combine,
    expert_forward,
    moe_dense,
    place_slots,
    plan_dispatch,
    pull_of,
    run_experts,
    run_experts_backward,
    share_of,
    z_loss,
)

GOLDEN = Path(__file__).parents[1] / "golden"

# Ten times the error of an independent float64 derivation against the files.
OUTPUT_TOLERANCE = 2.2e-5
GRADIENT_TOLERANCE = 7.4e-5
LOSS_TOLERANCE = 4e-5
WEIGHT_TOLERANCE = 1.3e-6

# Of Megatron, by the name in the file: the rule, and whether a bias says who is chosen.
MEGATRON_RULES = {
    "softmax_pre": (TokenChoice(4, renormalise=False), False),
    "softmax_post": (TokenChoice(4), False),
    "sigmoid": (TokenChoice(4, score="sigmoid"), False),
    "sigmoid_bias": (TokenChoice(4, score="sigmoid"), True),
    "sigmoid_bias_scale": (TokenChoice(4, score="sigmoid", scale=2.5), True),
    # Four groups of which two are kept; top_k // num_kept scores make a group's.
    "softmax_pre_group": (
        TokenChoice(4, renormalise=False, groups=Groups(4, 2, num_summed=2)),
        False,
    ),
}


def load(name):
    return np.load(GOLDEN / f"{name}.npz")


def flat(array):
    return jnp.asarray(array).reshape(-1, array.shape[-1])


def gated_params(golden, prefix="w_"):
    """Router and gated experts of a transformers layer; its weights are `(out, in)`."""
    return {
        "router": golden[f"{prefix}gate.weight"].T,
        "experts": {
            "gate_up": golden[f"{prefix}experts.gate_up_proj"].transpose(0, 2, 1),
            "down": golden[f"{prefix}experts.down_proj"].transpose(0, 2, 1),
        },
    }


def shared_params(golden, name, prefix="w_"):
    parts = [
        golden[f"{prefix}{name}.{part}_proj.weight"].T
        for part in ("gate", "up", "down")
    ]
    return {"gate_up": np.concatenate(parts[:2], axis=1), "down": parts[2]}


def switch_params(golden, prefix="w_"):
    def stacked(part):
        keys = [f"{prefix}experts.expert_{e}.{part}.weight" for e in range(4)]
        return np.stack([golden[key].T for key in keys])

    return {
        "router": golden[f"{prefix}router.classifier.weight"].T,
        "experts": {"up": stacked("wi"), "down": stacked("wo")},
    }


def assert_trees_close(got, expected, atol):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=atol), got, expected
    )


def random_params(seed, *, d_model=6, d_ff=5, experts=4):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "router": normal(d_model, experts),
        "experts": {
            "gate_up": normal(experts, d_model, 2 * d_ff),
            "down": normal(experts, d_ff, d_model),
        },
    }


def random_rows(seed, tokens, d_model=6):
    rng = np.random.default_rng([seed, 1])
    return rng.standard_normal((tokens, d_model)).astype(np.float32)


class Step(NamedTuple):
    """What a sharded pass gives: everything as the whole batch would have it."""

    outputs: list
    loss: float
    gradients: dict
    sums: object
    sent: np.ndarray
    """`(source shards, experts)`: the exchange matrix."""


@functools.cache
def compiled_expert():
    return jax.jit(expert_forward), jax.jit(pull_of(expert_forward))


@functools.partial(jax.jit, static_argnames="router")
def route(router, params, block):
    return router(params, block)


@functools.partial(jax.jit, static_argnames=("router", "tail", "aux", "z"))
def turn(router, params, parts, whole, *, tail, aux, z):
    """One source shard's share of the loss, and its gradients by router and rows."""
    placed, block, wanted, choice = parts

    def share(params, rows):
        own = router(params, block, replay=choice)
        out = combine(rows, own.weights)
        part = share_of(own.sums, whole)
        loss = tail(out, block, wanted) + aux * balance(part) + z * z_loss(part)
        return loss, out

    return jax.value_and_grad(share, argnums=(0, 1), has_aux=True)(params, placed)


@functools.partial(jax.jit, static_argnames="router")
def dense_pass(router, params, rows, replay=None):
    """Loss `sum(out ** 2)` of the dense layer, beside it all it gave; gradients."""

    def loss(params, rows):
        out, routed = moe_dense(params, rows, router, replay=replay)
        return jnp.sum(out**2), (out, routed)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, rows)


def squared(out, block, wanted):
    return jnp.sum(out**2)


def sharded_step(
    params,
    blocks,
    router,
    tail=squared,
    *,
    wanted=None,
    expert_shards=1,
    rng=None,
    aux=0.0,
    z=0.0,
):
    """Run a layer on blocks of tokens, experts on other shards, and all the way back.

    Rows travel as the dataflow moves them: blocks to each shard of experts, sorted
    there by source, results back in any order, which `rng` draws.

    Args:
        params: Of `moe_dense`, without shared experts.
        blocks: `(tokens, d_model)` of each source shard.
        router: Of the layer.
        tail: From layer output, block and what is wanted to the shard's part of the
            loss.
        wanted: One array per block.
        expert_shards: Divides the experts.
        rng: Shuffles the rows that come back.
        aux: Factor of the balance loss.
        z: Factor of the z-loss.
    """
    weights = {key: value for key, value in params.items() if "router" in key}
    num_experts = params["router"].shape[1]
    routed = [route(router, weights, block) for block in blocks]
    choices = [jax.tree.map(np.asarray, each.choice) for each in routed]
    plans = [
        plan_dispatch(each.chosen, num_experts, kept=each.kept) for each in choices
    ]
    exchange = _Exchange(params["experts"], blocks, plans, expert_shards, rng)
    placed = [
        _placed(rows, plan, choice, exchange.order(len(rows)))
        for rows, plan, choice in zip(exchange.forward(), plans, choices, strict=True)
    ]
    whole = add_sums(*(each.sums for each in routed))
    turned = [
        turn(router, weights, parts, whole, tail=tail, aux=aux, z=z)
        for parts in zip(placed, blocks, wanted or blocks, choices, strict=True)
    ]
    back = [
        np.asarray(cotangent).reshape(-1, blocks[0].shape[1])[plan.slots]
        for (_, (_, cotangent)), plan in zip(turned, plans, strict=True)
    ]
    gradients = jax.tree.map(lambda *g: np.asarray(sum(g)), *(t[1][0] for t in turned))
    gradients["experts"] = exchange.back(back)
    return Step(
        [np.asarray(out) for (_, out), _ in turned],
        sum(float(loss) for (loss, _), _ in turned),
        gradients,
        whole,
        np.stack([plan.counts for plan in plans]),
    )


class _Exchange:
    """Moves rows between source shards and shards of experts, and back."""

    def __init__(self, experts, blocks, plans, expert_shards, rng):
        num_experts = plans[0].counts.shape[0]
        self.experts = [
            jax.tree.map(lambda leaf, e=e: np.asarray(leaf)[e], experts)
            for e in range(num_experts)
        ]
        self.plans, self.rng = plans, rng
        self.owner = np.arange(num_experts) * expert_shards // num_experts
        self.num_shards = expert_shards
        self.rows = [
            np.asarray(block)[plan.tokens]
            for block, plan in zip(blocks, plans, strict=True)
        ]

    def order(self, count):
        return np.arange(count) if self.rng is None else self.rng.permutation(count)

    def forward(self):
        run, _ = compiled_expert()
        results = [np.empty_like(rows) for rows in self.rows]
        for shard in range(self.num_shards):
            rows, experts, counts, where = self._gather(shard, self.rows)
            self._scatter(results, where, run_experts(run, experts, rows, counts))
        return results

    def back(self, cotangents):
        _, pull = compiled_expert()
        gradients = []
        for shard in range(self.num_shards):
            rows, experts, counts, _ = self._gather(shard, self.rows)
            got = self._gather(shard, cotangents)[0]
            gradients += run_experts_backward(pull, experts, rows, got, counts)[0]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *gradients)

    def _gather(self, shard, blocks):
        """Join what all sources send to a shard: by expert, then by source."""
        own = np.flatnonzero(self.owner == shard)
        keys, rows = [], []
        for source, (plan, block) in enumerate(zip(self.plans, blocks, strict=True)):
            mine = np.flatnonzero(self.owner[plan.experts] == shard)
            keys += [(int(plan.experts[at]), source, int(at)) for at in mine]
            rows.append(block[mine])
        order = sorted(range(len(keys)), key=keys.__getitem__)
        counts = np.bincount([key[0] - own[0] for key in keys], minlength=len(own))
        joined = np.concatenate(rows)[order]
        return joined, [self.experts[e] for e in own], counts, [keys[i] for i in order]

    def _scatter(self, results, where, rows):
        for (_, source, at), row in zip(where, rows, strict=True):
            results[source][at] = row


def _placed(rows, plan, choice, order):
    num_slots = choice.chosen.size
    by_slot = place_slots(plan.slots[order], rows[order], num_slots, kept=choice.kept)
    return by_slot.reshape(*choice.chosen.shape, rows.shape[1])
