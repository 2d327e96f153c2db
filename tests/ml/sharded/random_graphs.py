"""Random dataflow functions, written once and run twice: as a dataflow, and by JAX alone.

A drawn program is a list of steps over named values. `Flow` does a step in the
vocabulary of dataflows; `Plain` does it on lists of arrays, one for each shard, by the
definition of each step and in one program, so that `jax.grad` differentiates it.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from timelyml import Dataflow
from timelyml.ml import sharded
from timelyml.operators import collect

WIDTH = 3
STEPS = (
    "layer",
    "both",
    "experts",
    "broadcast",
    "gather",
    "total",
    "branch",
    "repeat",
    "concat",
)


def layer(weight, rows):
    return jnp.tanh(rows @ weight)


def both(rows, others):
    return rows * jnp.cos(others)


def destinations(num_shards, copies, rows):
    """From the number of rows alone: by no rounding can a choice differ."""
    slots = jnp.arange(rows.shape[0] * copies)
    return (slots * 7 // 2 % num_shards).reshape(rows.shape[0], copies)


def kept(to):
    return (jnp.arange(to.size).reshape(to.shape) % 5) != 3


def tags(num_groups, to):
    return jnp.arange(to.size).reshape(to.shape) % num_groups


def expert(weight, rows):
    return jnp.sin(rows @ weight)


def mixed(placed, rows):
    return placed.sum(axis=1) + rows


def with_sum(every, rows):
    return rows + jnp.tanh(every.sum(axis=0))


def column_sums(rows):
    return rows.sum(axis=0)


def with_total(total, rows):
    return rows - 0.1 * total


def parity(rows):
    return jnp.arange(rows.shape[0]) % 2


def halves(rows):
    return rows[: (rows.shape[0] + 1) // 2], rows[(rows.shape[0] + 1) // 2 :]


def loss_of(rows):
    return jnp.sum(rows**2 * jnp.arange(1, WIDTH + 1))[None]


@dataclass(frozen=True)
class Program:
    """Steps `(kind, input, number)`, and the inputs that make the loss."""

    steps: list
    num_shards: int
    rows: list[int]
    """Of each shard; may be 0."""
    num_weights: int
    expert_shards: int
    groups: int
    keeps: bool

    @classmethod
    def draw(cls, seed: int) -> Program:
        rng = random.Random(f"{seed} graph")
        num_shards = rng.randint(1, 3)
        steps = [
            (rng.choice(STEPS), rng.randrange(i + 1), i)
            for i in range(rng.randint(1, 4))
        ]
        rows = [rng.choice((0, 4, 4)) for _ in range(num_shards)]
        return cls(
            steps,
            num_shards,
            rows if sum(rows) else [2] * num_shards,
            rng.randint(1, 3),
            rng.randint(1, 3),
            rng.randint(1, 2),
            rng.random() < 0.5,
        )

    def params(self, dtype) -> dict:
        rng = np.random.default_rng(self.num_weights)
        shape = (self.expert_shards * self.groups, WIDTH, WIDTH)
        return {
            "whole": [
                rng.standard_normal((WIDTH, WIDTH)).astype(dtype)
                for _ in range(self.num_weights)
            ],
            "split": rng.standard_normal(shape).astype(dtype),
        }

    def blocks(self, time: int, dtype) -> list:
        rng = np.random.default_rng([time, self.num_shards])
        return [rng.standard_normal((n, WIDTH)).astype(dtype) for n in self.rows]

    def run(self, ops, params, rows):
        """Give the parts of the loss; with `ops`, in either form."""
        values = [rows]
        for kind, at, number in self.steps:
            weight = params["whole"][number % self.num_weights]
            step = getattr(self, f"_{kind}")
            values.append(step(ops, (params, weight), values[at], number))
        return [ops.call(loss_of, value) for value in values[-3:]]

    def _layer(self, ops, weights, rows, number):
        _, weight = weights
        return ops.call(layer, weight, rows)

    def _both(self, ops, weights, rows, number):
        _, weight = weights
        return ops.call(both, rows, ops.call(layer, weight, rows))

    def _experts(self, ops, weights, rows, number):
        params, weight = weights
        copies = 1 + number % 2
        pick = functools.partial(destinations, self.expert_shards, copies)
        to = ops.call(pick, rows)
        where = ops.call(kept, to) if number % 3 else None
        tag = ops.call(functools.partial(tags, self.groups), to)
        given = ops.experts(
            params["split"],
            rows,
            (to, where, tag if self.groups > 1 else None),
            (self.expert_shards, weight if number % 2 else None),
        )
        return ops.call(mixed, given, rows)

    def _broadcast(self, ops, weights, rows, number):
        return ops.call(with_sum, ops.broadcast(rows, self.num_shards), rows)

    def _gather(self, ops, weights, rows, number):
        one = ops.call(both, *[ops.gather(rows)] * 2)
        return ops.call(with_sum, ops.broadcast(one, self.num_shards), rows)

    def _total(self, ops, weights, rows, number):
        return ops.call(with_total, ops.total(ops.call(column_sums, rows)), rows)

    def _branch(self, ops, weights, rows, number):
        _, weight = weights
        index = ops.call(parity, rows)
        even, odd = ops.branch(rows, index)
        return ops.merge((ops.call(layer, weight, even), odd), index)

    def _repeat(self, ops, weights, rows, number):
        _, weight = weights
        return ops.repeat(3, lambda now: ops.call(layer, weight, now), rows)

    def _concat(self, ops, weights, rows, number):
        _, weight = weights
        first, rest = ops.call(halves, rows)
        return ops.call(layer, weight, ops.concat(rest, first))


class Flow:
    """Does steps in a dataflow."""

    def __init__(self, keeps):
        self.call = functools.partial(sharded.call, keeps=keeps)
        self.gather, self.total = sharded.gather, sharded.total
        self.merge, self.repeat = sharded.merge, sharded.repeat
        self.concat = sharded.concat

    def branch(self, rows, index):
        return sharded.branch(rows, index, 2)

    def broadcast(self, rows, num_shards):
        return sharded.broadcast(rows, num_shards=num_shards)

    def experts(self, weights, rows, routing, spread):
        (to, where, tag), (num_shards, after) = routing, spread
        sent = sharded.exchange(rows, to, num_shards=num_shards, where=where, tag=tag)
        split = sharded.split(weights)
        given = sharded.by_group(expert, split, sent.rows, index=sent.tag)
        if after is not None:  # another call reads the rows: they arrive only once
            given = self.call(both, given, sent.rows)
        return sharded.give_back(given, sent)


class Plain:
    """Does steps on lists of arrays, by their definition."""

    def call(self, function, *arguments):
        count = next(len(a) for a in arguments if isinstance(a, list))
        found = [
            function(*(a[s] if isinstance(a, list) else a for a in arguments))
            for s in range(count)
        ]
        if isinstance(found[0], tuple):
            return tuple(map(list, zip(*found, strict=True)))
        return found

    def broadcast(self, rows, num_shards):
        return [jnp.concatenate(rows)] * num_shards

    def gather(self, rows):
        return [jnp.concatenate(rows)]

    def total(self, arrays):
        return [sum(arrays)] * len(arrays)

    def concat(self, *several):
        return [jnp.concatenate(parts) for parts in zip(*several, strict=True)]

    def repeat(self, count, function, carry):
        for _ in range(count):
            carry = function(carry)
        return carry

    def branch(self, rows, index):
        return [
            [r[np.flatnonzero(i == part)] for r, i in zip(rows, index, strict=True)]
            for part in range(2)
        ]

    def merge(self, parts, index):
        whole = []
        for even, odd, chosen in zip(*parts, index, strict=True):
            merged = jnp.zeros((len(chosen), WIDTH), even.dtype)
            merged = merged.at[np.flatnonzero(chosen == 0)].set(even)
            whole.append(merged.at[np.flatnonzero(chosen == 1)].set(odd))
        return whole

    def experts(self, weights, rows, routing, spread):
        (to, where, tag), (num_shards, after) = routing, spread
        groups = weights.shape[0] // num_shards
        placed = []
        for shard, block in enumerate(rows):
            group = 0 if tag is None else tag[shard]
            which = to[shard] * groups + group  # (rows, copies)
            each = [
                [expert(weights[w], block[r][None])[0] for w in which[r].tolist()]
                for r in range(len(block))
            ]
            given = jnp.array(each).reshape(*which.shape, WIDTH)
            if after is not None:
                given = both(given, block[:, None])
            if where is not None:
                given = jnp.where(where[shard][:, :, None], given, 0)
            placed.append(given.astype(block.dtype))
        return placed


def expected(program, params, blocks):
    """Value and gradients by parameters and rows, of one program."""

    def loss(params, blocks):
        return sum(
            jnp.sum(part)
            for parts in program.run(Plain(), params, blocks)
            for part in parts
        )

    return jax.value_and_grad(loss, argnums=(0, 1))(params, blocks)


def flow_of(program, params, dtype, num_times=2):
    """The dataflow that gives the same at each time, and how to read its results."""
    flow = Dataflow("random")

    def read(shard, num_shards):
        return (program.blocks(time, dtype)[shard] for time in range(num_times))

    source = flow.source(read, num_shards=program.num_shards, regular=True, name="x")
    like = np.zeros((5, WIDTH), dtype)
    build = sharded.value_and_grad(
        functools.partial(program.run, Flow(program.keeps)), argnums=(0, 1)
    )
    value, (by_params, by_rows) = build(params, sharded.rows(source, like))
    streams = {"value": value, "rows": by_rows}
    leaves = enumerate(jax.tree.leaves(by_params, is_leaf=lambda leaf: leaf is None))
    streams |= {f"param {index}": stream for index, stream in leaves}
    for name, stream in streams.items():
        if stream is not None:
            collect(stream, name=name)
    return flow.build(), [name for name, each in streams.items() if each is not None]


def check(program, dtype, run, tolerance):
    """Compare the dataflow with one program, leaf by leaf."""
    params = program.params(dtype)
    graph, names = flow_of(program, params, dtype)
    result = run(graph)
    for time in range(2):
        value, (by_params, by_rows) = expected(
            program, params, [jnp.asarray(b) for b in program.blocks(time, dtype)]
        )
        leaves = jax.tree.leaves(by_params)
        wanted = {"value": value[None], "rows": np.concatenate(by_rows)}
        wanted |= {f"param {i}": leaf for i, leaf in enumerate(leaves)}
        for name, leaf in wanted.items():
            if name not in names:
                assert not np.any(leaf), name  # nothing in the graph depends on it
                continue
            got = [rows for at, rows in result.batches(name) if at == time]
            got = np.concatenate(got).reshape(np.shape(leaf))
            assert got.dtype == np.dtype(dtype), name
            scale = np.abs(leaf).max(initial=0) or 1.0
            assert np.abs(got - leaf).max(initial=0) <= tolerance * scale, name
