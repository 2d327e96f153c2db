"""Random operators that fire by rules, and by definition what each firing must see."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations

from timelyml import Dataflow
from timelyml.errors import ConfigError
from timelyml.fluent import Stream
from timelyml.graph import Broadcast, InputSpec, Pipeline, ScopeRef
from timelyml.ml import Firing, Rule, add_firing_operator
from timelyml.operators.edges import as_input
from timelyml.testing import FlowTester

ROUNDS = 4  # a row of value v goes round v % ROUNDS times


@dataclass(frozen=True)
class Port:
    """Rows by source shard and epoch; on a dense port they stay on their shard."""

    rows: dict[tuple[int, int], list[int]]
    num_epochs: int
    is_dense: bool
    is_fed: bool
    """Whether the driver decides when rows come, here or through a gate."""


@dataclass(frozen=True)
class Log:
    """Notes that a rule fired, and what had fired before on the same shard."""

    rule: int

    def __call__(self, firing: Firing) -> None:
        seen = firing.state.setdefault("seen", [])
        firing.shard.emit("fired", (self.rule, firing.time, tuple(seen)))
        seen.append((self.rule, firing.time))


@dataclass(frozen=True)
class Case:
    """One operator in the midst of its inputs, alone or in a loop."""

    num_shards: int
    num_workers: int
    is_loop: bool
    ports: list[Port]
    rules: list[Rule]

    def run(self, seed: int, mode: str) -> list:
        """Return (rule, shard, time, what fired before) of every firing."""
        rng, fired = random.Random(f"{seed} feed"), []
        with FlowTester(self.num_workers, seed=seed) as tester:
            run = tester.start(
                self.flow(),
                progress_mode=mode,
                on_message=lambda operator, shard, tag, body: fired.append(
                    (body[0], shard, *body[1:])
                ),
            )
            handles = {
                number: run.input(f"port {number}")
                for number, port in enumerate(self.ports)
                if port.is_fed
            }
            while handles:  # one port may be far ahead of another
                number = rng.choice(list(handles))
                handle, port = handles[number], self.ports[number]
                for _ in range(rng.randint(1, 5)):
                    for shard in range(self.num_shards):
                        handle.send(port.rows[shard, handle.time])
                    if handle.time + 1 == port.num_epochs:
                        handles.pop(number).close()
                        break
                    handle.advance_to(handle.time + 1)
                if rng.random() < 0.5:
                    tester.settle()
            run.result()
        return fired

    def flow(self) -> Dataflow:
        flow = Dataflow("f", num_shards=self.num_shards)
        scope = flow.scope("rounds") if self.is_loop else None
        add_firing_operator(
            flow.builder,
            "meet",
            [self._input(flow, number, scope) for number in range(len(self.ports))],
            self.rules,
            num_outputs=len(self.rules),
            num_shards=self.num_shards,
        )
        return flow

    def _input(self, flow: Dataflow, number: int, scope: ScopeRef | None) -> InputSpec:
        port, name = self.ports[number], f"port {number}"
        if port.is_dense:
            stream = flow.source(_reader(port), name=f"dense {number}", regular=True)
            if port.is_fed:
                stream = _gated(flow, stream, name)
            ref = stream.ref if scope is None else stream.enter(scope).ref
            return InputSpec(ref, Pipeline(dense=True))
        stream = flow.input(name)
        if scope is not None:
            loop = flow.feedback(scope)
            stream = stream.enter(scope).concat(loop.stream)
            loop.connect(stream.flat_map(lambda v: [v - 1] if v % ROUNDS else []))
        return as_input(stream.exchange(lambda v: v // ROUNDS).ref)

    def times_of(self, rule: Rule, shard: int) -> set:
        """By definition: when the rule has to fire on a shard."""
        times = set()
        for number in rule.triggers:
            port = self.ports[number]
            for (source, epoch), rows in port.rows.items():
                if port.is_dense:
                    if source == shard:
                        times.add((epoch, 0))
                    continue
                for value in rows:
                    rounds = value % ROUNDS if self.is_loop else 0
                    if value // ROUNDS % self.num_shards == shard:
                        times |= {(epoch, again) for again in range(rounds + 1)}
        return times if self.is_loop else {epoch for epoch, _ in times}


def random_case(seed: int) -> Case:
    rng = random.Random(f"{seed} firing")
    num_shards, is_loop = rng.randint(1, 4), rng.random() < 0.5
    ports = [_random_port(rng, num_shards) for _ in range(rng.randint(1, 3))]
    numbers = range(len(ports))
    subsets = [each for size in numbers for each in combinations(numbers, size + 1)]
    chosen = rng.sample(subsets, rng.randint(1, min(4, len(subsets))))
    rules = [
        Rule(
            subset,
            Log(index),
            outputs=(index,),
            asked_by=(rng.choice(subset),) if rng.random() < 0.4 else (),
        )
        for index, subset in enumerate(chosen)
    ]
    for index, rule in enumerate(rules):
        for other in rng.sample(range(len(rules)), len(rules)):
            is_part = set(rule.ports) <= set(rules[other].ports)
            if is_part or set(rule.ports) > set(rules[other].ports):
                continue
            tried = [*rules]
            tried[index] = _with_later(rules[index], other)
            if rng.random() < 0.6 and _has_order(tried, len(ports)):
                rules = tried
    return Case(num_shards, rng.randint(1, 6), is_loop, ports, rules)


def _random_port(rng: random.Random, num_shards: int) -> Port:
    num_epochs = rng.randint(1, 5)
    share = rng.choice((0.2, 0.6, 1.0))  # of epochs in which a shard has rows
    rows = {
        (shard, epoch): [rng.randrange(64) for _ in range(rng.randint(1, 3))]
        if rng.random() < share
        else []
        for shard in range(num_shards)
        for epoch in range(num_epochs)
    }
    is_dense = rng.random() < 0.4
    return Port(rows, num_epochs, is_dense, not is_dense or rng.random() < 0.6)


def _with_later(rule: Rule, output: int) -> Rule:
    return Rule(
        rule.ports,
        rule.run,
        outputs=rule.outputs,
        later=(*rule.later, output),
        asked_by=rule.asked_by,
    )


def _has_order(rules: list[Rule], num_ports: int) -> bool:
    flow = Dataflow("f", num_shards=1)
    up = flow.source([1])
    try:
        add_firing_operator(
            flow.builder,
            "meet",
            [InputSpec(up.ref)] * num_ports,
            rules,
            num_outputs=len(rules),
        )
    except ConfigError:
        return False
    return True


def _gated(flow: Dataflow, stream: Stream, name: str) -> Stream:
    """Hold each epoch of a dense stream back until an input has passed it."""
    opens = InputSpec(flow.input(name).ref, Broadcast())
    (ref,) = add_firing_operator(
        flow.builder,
        f"gate of {name}",
        [InputSpec(stream.ref, Pipeline(dense=True)), opens],
        [Rule((0, 1), _pass, outputs=(0,), asked_by=(0,))],
        num_outputs=1,
        regular=True,
    )
    return Stream(flow, ref)


def _pass(firing: Firing) -> None:
    firing.send(0, firing.inputs[0].rows)


def _reader(port: Port):
    def read(shard, num_shards):
        return (port.rows[shard, epoch] for epoch in range(port.num_epochs))

    return read


def check(case: Case, fired: list) -> None:
    """Compare what was seen with what the rules say about each pair of them."""
    for shard in range(case.num_shards):
        times = [case.times_of(rule, shard) for rule in case.rules]
        mine = [(rule, time, seen) for rule, at, time, seen in fired if at == shard]
        for index, expected in enumerate(times):
            assert [t for rule, t, _ in mine if rule == index] == sorted(expected)
        for index, time, seen in mine:
            for other, rule in enumerate(case.rules):
                sees = _sees(case.rules[index], rule)
                if sees is not None:
                    wanted = {
                        t for t in times[other] if t < time or (sees and t == time)
                    }
                    assert {t for r, t in seen if r == other} == wanted


def _sees(rule: Rule, other: Rule) -> bool | None:
    """Whether `rule` sees what `other` did at its own time; None: it is left open."""
    if rule is other:
        return False
    if set(other.later) & set(rule.outputs):
        return False
    if set(rule.later) & set(other.outputs):
        return True
    if set(other.ports) < set(rule.ports):
        return True
    if set(rule.ports) < set(other.ports):
        return False
    return None
