"""Random acyclic keyed dataflows over integers, and three ways to run each.

A plan is a list of steps, each of which reads earlier ones; the leaves are what it
gives. Bytewax and timelyml run it as their own operators; the third way is the
definition, by brute force.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import reduce

from hypothesis import strategies as st

from timelyml import Dataflow

MAPS = (lambda n: n + 1, lambda n: 3 * n, lambda n: n // 2, lambda n: -n)
FILTERS = (lambda n: n % 2 == 0, lambda n: n > 3, lambda n: n % 3 != 1)
FLAT_MAPS = (lambda n: range(n % 4), lambda n: [n, -n], lambda n: [])
KEYS = (lambda n: n % 3, lambda n: n % 7, lambda n: n)
COMBINES = (lambda a, b: a + b, max, min)


@dataclass(frozen=True)
class Step:
    """One operator: its kind, the steps that it reads, and what varies in it."""

    kind: str
    inputs: tuple[int, ...] = ()
    choice: int = 0
    key: int = 0
    records: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Steps in an order in which each reads earlier ones only."""

    steps: tuple[Step, ...]

    @property
    def leaves(self):
        read = {index for step in self.steps for index in step.inputs}
        return [index for index in range(len(self.steps)) if index not in read]


@st.composite
def plans(draw):
    """A plan of one to three sources and up to eight further steps."""
    records = st.lists(st.integers(-20, 20), max_size=25).map(tuple)
    num_sources = draw(st.integers(1, 3))
    steps = [Step("source", records=draw(records)) for _ in range(num_sources)]
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(sorted(ARITY)))
        earlier = st.integers(0, len(steps) - 1)
        inputs = tuple(draw(earlier) for _ in range(ARITY[kind]))
        choices = draw(st.integers(0, 5)), draw(st.integers(0, 5))
        steps.append(Step(kind, inputs, *choices))
    return Plan(tuple(steps))


ARITY = {
    "map": 1,
    "filter": 1,
    "flat_map": 1,
    "merge": 2,
    "reduce": 1,
    "fold": 1,
    "count": 1,
    "join": 2,
}


def pick(functions, step):
    return functions[step.choice % len(functions)]


def key_of(step):
    return KEYS[step.key % len(KEYS)]


def flat(key, value):
    """A keyed result as an integer, so that every step can read every other."""
    return 1000 * key + value


def joined(left, right):
    return 31 * left + right


def by_definition(plan):
    """What each leaf gives, as a multiset."""
    results = []
    for step in plan.steps:
        inputs = [results[index] for index in step.inputs]
        results.append(list(DEFINITIONS[step.kind](step, *inputs)))
    return {leaf: Counter(results[leaf]) for leaf in plan.leaves}


def groups(step, records):
    found = {}
    for record in records:
        found.setdefault(key_of(step)(record), []).append(record)
    return found.items()


DEFINITIONS = {
    "source": lambda step: step.records,
    "map": lambda step, up: map(pick(MAPS, step), up),
    "filter": lambda step, up: filter(pick(FILTERS, step), up),
    "flat_map": lambda step, up: [y for x in up for y in pick(FLAT_MAPS, step)(x)],
    "merge": lambda step, left, right: left + right,
    "reduce": lambda step, up: [
        flat(key, reduce(pick(COMBINES, step), values))
        for key, values in groups(step, up)
    ],
    "fold": lambda step, up: [
        flat(key, sum(n * n for n in values)) for key, values in groups(step, up)
    ],
    "count": lambda step, up: [
        flat(key, len(values)) for key, values in groups(step, up)
    ],
    "join": lambda step, left, right: [
        flat(key_of(step)(a), joined(a, b))
        for a in left
        for b in right
        if key_of(step)(a) == key_of(step)(b)
    ],
}


def timelyml_flow(plan, num_shards):
    """The plan as a timelyml flow that collects its leaves."""
    flow = Dataflow("plan", num_shards=num_shards)
    streams = []
    for step in plan.steps:
        inputs = [streams[index] for index in step.inputs]
        streams.append(TIMELYML[step.kind](flow, step, *inputs))
    for leaf in plan.leaves:
        streams[leaf].collect(f"leaf {leaf}")
    return flow


def in_timelyml(plan, run, num_shards):
    """What each leaf gives, as a multiset."""
    result = run(timelyml_flow(plan, num_shards))
    return {leaf: Counter(result[f"leaf {leaf}"]) for leaf in plan.leaves}


def unkeyed(stream):
    return stream.map(lambda pair: flat(*pair))


TIMELYML = {
    "source": lambda flow, step: flow.source(list(step.records), batch_size=4),
    "map": lambda flow, step, up: up.map(pick(MAPS, step)),
    "filter": lambda flow, step, up: up.filter(pick(FILTERS, step)),
    "flat_map": lambda flow, step, up: up.flat_map(pick(FLAT_MAPS, step)),
    "merge": lambda flow, step, left, right: left.concat(right),
    "reduce": lambda flow, step, up: unkeyed(
        up.reduce(key_of(step), pick(COMBINES, step))
    ),
    "fold": lambda flow, step, up: unkeyed(
        up.exchange(key_of(step))
        .fold({}, lambda sums, n: add_square(sums, key_of(step)(n), n))
        .flat_map(lambda sums: sums.items())
    ),
    "count": lambda flow, step, up: unkeyed(up.count(key_of(step))),
    "join": lambda flow, step, left, right: left.join(right, key=key_of(step)).map(
        lambda row: flat(row[0], joined(row[1], row[2]))
    ),
}


def add_square(sums, key, n):
    sums[key] = sums.get(key, 0) + n * n
    return sums


def in_bytewax(plan):
    """What each leaf gives, as a multiset, by Bytewax's engine in this thread."""
    import bytewax.operators as op
    from bytewax.dataflow import Dataflow as BytewaxDataflow
    from bytewax.testing import TestingSink, TestingSource, run_main

    flow = BytewaxDataflow("plan")
    streams, results = [], {leaf: [] for leaf in plan.leaves}
    for index, step in enumerate(plan.steps):
        inputs = [streams[position] for position in step.inputs]
        if step.kind == "source":
            source = TestingSource(list(step.records), 4)
            streams.append(op.input(f"step{index}", flow, source))
        else:
            streams.append(BYTEWAX[step.kind](op, f"step{index}", step, *inputs))
    for leaf, found in results.items():
        op.output(f"leaf{leaf}", streams[leaf], TestingSink(found))
    run_main(flow)
    return {leaf: Counter(found) for leaf, found in results.items()}


def keyed(op, name, step, up):
    return op.key_on(f"{name}_key", up, lambda n: str(key_of(step)(n)))


def unkeyed_there(op, name, up):
    return op.map(f"{name}_flat", up, lambda pair: flat(int(pair[0]), pair[1]))


def bytewax_reduce(op, name, step, up):
    pairs = keyed(op, name, step, up)
    reduced = op.reduce_final(name, pairs, pick(COMBINES, step))
    return unkeyed_there(op, name, reduced)


def bytewax_fold(op, name, step, up):
    pairs = keyed(op, name, step, up)
    folded = op.fold_final(name, pairs, int, lambda total, n: total + n * n)
    return unkeyed_there(op, name, folded)


def bytewax_join(op, name, step, left, right):
    sides = [keyed(op, f"{name}_{n}", step, up) for n, up in enumerate((left, right))]
    pairs = op.join(name, *sides, insert_mode="product", emit_mode="final")
    whole = op.filter(f"{name}_inner", pairs, lambda pair: None not in pair[1])
    values = op.map(f"{name}_both", whole, lambda pair: (pair[0], joined(*pair[1])))
    return unkeyed_there(op, name, values)


BYTEWAX = {
    "map": lambda op, name, step, up: op.map(name, up, pick(MAPS, step)),
    "filter": lambda op, name, step, up: op.filter(name, up, pick(FILTERS, step)),
    "flat_map": lambda op, name, step, up: op.flat_map(name, up, pick(FLAT_MAPS, step)),
    "merge": lambda op, name, step, left, right: op.merge(name, left, right),
    "reduce": bytewax_reduce,
    "fold": bytewax_fold,
    "count": lambda op, name, step, up: unkeyed_there(
        op, name, op.count_final(name, up, lambda n: str(key_of(step)(n)))
    ),
    "join": bytewax_join,
}
