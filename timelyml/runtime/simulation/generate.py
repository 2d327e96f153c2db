"""Random graphs: operators, pacts, placements, scopes and loops, from a generator.

Whatever comes out is legal, ends, and sends the same whatever the schedule is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from timelyml.graph import (
    Broadcast,
    Contiguous,
    Custom,
    Direct,
    Exchange,
    Gather,
    GraphBuilder,
    InputSpec,
    Pact,
    Pipeline,
    Placement,
    RoundRobin,
    ScopeRef,
    StreamRef,
)
from timelyml.runtime.run_state import COLLECT_TAG
from timelyml.runtime.simulation.behaviour import Behaviour, Moves, Style
from timelyml.runtime.simulation.plan import GraphPlan
from timelyml.runtime.simulation.reference import Reference, TooMuchError
from timelyml.runtime.simulation.routes import DirectBy, KeyBy, RouteBy
from timelyml.runtime.simulation.rules import FOLDING, Kind, Rule
from timelyml.runtime.simulation.sources import Source
from timelyml.runtime.simulation.trace import TRACE

STATELESS = (Kind.MAP, Kind.FILTER, Kind.FLAT_MAP, Kind.BRANCH, Kind.DELAY)
MAX_LOOP_DEPTH = 2


def random_plan(
    rng: random.Random, num_workers: int, max_epochs_ahead: int, *, max_records: int
) -> GraphPlan:
    """Return a random graph whose evaluation moves at most `max_records`."""
    while True:
        plan = _Generator(rng, num_workers, max_epochs_ahead).generate()
        try:
            Reference(plan.graph, plan.operators, max_records=max_records).run(
                plan.planned()
            )
        except TooMuchError:
            continue
        return plan


@dataclass(frozen=True, slots=True)
class _Open:
    """A stream that operators to come may use, and what is known of it."""

    stream: StreamRef
    is_regular: bool = False
    direct: DirectBy | None = None


class _Generator:
    """Makes one graph."""

    def __init__(
        self, rng: random.Random, num_workers: int, max_epochs_ahead: int
    ) -> None:
        self._rng = rng
        self._num_workers = num_workers
        self._max_lag = max_epochs_ahead - 1
        self._may_lag = self._max_lag > 0 and rng.random() < 0.3
        self._num_shards = self._some_shards()
        self._builder = GraphBuilder("random", num_shards=self._num_shards)
        self._operators: list[Behaviour | Source] = []
        self._heeded: list[StreamRef] = []  # with a reader whom the producer names
        self._is_columns = rng.random() < 0.5
        self._in_cycle = False

    def generate(self) -> GraphPlan:
        """Return the graph, resolved for the workers."""
        rng = self._rng
        num_sources = rng.choice((1, 1, 1, 2, 2, 3))
        pool = [each for _ in range(num_sources) for each in self._source()]
        pool = self._grow(pool, None, rng.randint(1, 6))
        if rng.random() < 0.2:
            pool = self._epoch_loop(pool)
            pool = self._grow(pool, None, rng.randint(0, 2))
        for each in pool:
            self._end(each)
        graph = self._builder.build().resolve(self._num_workers)
        return GraphPlan(graph, tuple(self._operators))

    def _grow(
        self, pool: list[_Open], scope: ScopeRef | None, count: int
    ) -> list[_Open]:
        """Add operators, and loops, behind the streams of one scope."""
        for _ in range(count):
            depth = len(scope.path) if scope else 0
            may_loop = depth < MAX_LOOP_DEPTH and not self._in_cycle
            if may_loop and self._rng.random() < 0.2:
                pool = self._loop(pool, scope)
            else:
                pool = self._operator(pool, depth)
        return pool

    def _loop(self, pool: list[_Open], scope: ScopeRef | None) -> list[_Open]:
        """Enter a new scope, go round in it, and leave."""
        builder, rng = self._builder, self._rng
        inner = builder.scope(parent=scope)
        depth = len(inner.path)
        first, rest = self._pick(pool)
        (first,) = self._add(
            self._rule(Kind.REFRESH, depth - 1, 1, 1, level=depth), [first]
        )
        entered = [replace(first, stream=builder.enter(first.stream, inner))]
        if rest and rng.random() < 0.3:
            second, rest = self._pick(rest)
            entered.append(replace(second, stream=builder.enter(second.stream, inner)))
        shards = self._some_shards()
        loop = builder.feedback(inner, by=rng.choice((1, 1, 2)), num_shards=shards)
        head = self._rule(Kind.MAP, depth, 2, 1)
        body = self._add(head, [entered[0], _Open(loop.stream)])
        body = self._grow([*body, *entered[1:]], inner, rng.randint(0, 3))
        again, *others = body
        switch = self._rule(Kind.SWITCH, depth, 1, 2, level=depth)
        back, out = self._add(switch, [again], num_shards=shards)
        loop.connect(back.stream)
        leaving = [out, *(o for o in others if rng.random() < 0.7)]
        for each in others:
            if each not in leaving:
                self._end(each)
        return [*rest, *(_left(builder, each) for each in leaving)]

    def _epoch_loop(self, pool: list[_Open]) -> list[_Open]:
        """Go round at the top level, an epoch later each time."""
        rng = self._rng
        first, rest = self._pick(pool)
        (first,) = self._add(self._rule(Kind.REFRESH, 0, 1, 1, level=1), [first])
        shards = self._some_shards()
        loop = self._builder.feedback(None, num_shards=shards)
        self._in_cycle = True
        body = self._add(self._rule(Kind.MAP, 0, 2, 1), [first, _Open(loop.stream)])
        body = self._grow(body, None, rng.randint(0, 2))
        again, *others = body
        switch = self._rule(Kind.SWITCH, 0, 1, 2, level=1)
        back, out = self._add(switch, [again], num_shards=shards)
        loop.connect(back.stream)
        self._in_cycle = False
        return [*rest, *others, out]

    def _operator(self, pool: list[_Open], depth: int) -> list[_Open]:
        """Add one operator of a random kind behind one stream or two."""
        rng = self._rng
        kind = rng.choice((*STATELESS, Kind.MAP, *FOLDS, *FOLDS))
        first, rest = self._pick(pool)
        inputs = [first]
        wants_two = kind is Kind.PAIR or (
            kind in (Kind.MAP, Kind.FOLD) and rng.random() < 0.4
        )
        if wants_two:
            if rest and rng.random() < 0.8:
                second, rest = self._pick(rest)
                inputs.append(second)
            else:
                inputs.append(first)  # a diamond
        outputs = {Kind.BRANCH: 2, Kind.PAIR: len(inputs)}.get(kind, 1)
        if kind is Kind.FOLD and rng.random() < 0.2:
            outputs = 2
        rule = self._rule(kind, depth, len(inputs), outputs)
        made = self._add(rule, inputs, num_shards=self._maybe_shards())
        if rng.random() < 0.25:
            rest = [*rest, first]  # a fan-out
        return [*rest, *made]

    def _pick(self, pool: list[_Open]) -> tuple[_Open, list[_Open]]:
        index = self._rng.randrange(len(pool))
        return pool[index], [*pool[:index], *pool[index + 1 :]]

    def _source(self) -> list[_Open]:
        rng = self._rng
        is_regular = rng.random() < 0.5
        num_outputs = rng.choice((1, 1, 1, 2))
        rule = replace(
            self._rule(Kind.SOURCE, 0, 0, num_outputs),
            num_epochs=rng.choice((0, 1, 2, 3, 5, 8)),
            batch_records=rng.choice((1, 2, 3, 6)),
        )
        source = Source(
            len(self._operators),
            rule,
            is_columns=self._is_columns,
            is_regular=is_regular,
            is_fed=not is_regular and rng.random() < 0.25,
            pause_s=rng.choice((0.0, 0.0, 0.002, 0.02)),
            is_slow=rng.random() < 0.5,
        )
        shards = self._maybe_shards() or self._num_shards
        streams = self._builder.add_operator(
            f"source{source.operator}",
            "input" if source.is_fed else "source",
            num_outputs=num_outputs,
            logic=source.logic(),
            states=("state", TRACE),
            num_shards=shards,
            regular=is_regular,
            is_source=True,
            placement=self._placement(shards),
        )
        self._operators.append(source)
        return [_Open(stream, is_regular) for stream in streams]

    def _rule(
        self,
        kind: Kind,
        depth: int,
        num_inputs: int,
        num_outputs: int,
        *,
        level: int = 1,
    ) -> Rule:
        rng = self._rng
        ahead = [0] * (depth + 1)
        if kind is Kind.DELAY or (kind in FOLDING and rng.random() < 0.2):
            ahead[rng.randrange(depth + 1)] = 1
        may_advance = kind in (Kind.MAP, Kind.DELAY, Kind.FILTER, Kind.FOLD)
        return Rule(
            kind,
            rng.randrange(1 << 16),
            depth,
            num_inputs,
            num_outputs,
            level=level,
            share=rng.choice((0, 1, 2, 3)),
            ahead=tuple(ahead),
            spread=rng.choice((1, 1, 1, 2, 3)),
            carry_until=rng.choice((0, 0, 4, 6)) if kind is Kind.FOLD else 0,
            is_advancing=may_advance and num_inputs == 1 and rng.random() < 0.1,
        )

    def _add(
        self, rule: Rule, inputs: list[_Open], *, num_shards: int | None = None
    ) -> list[_Open]:
        """Add an operator; return its outputs."""
        rng = self._rng
        shards = num_shards or inputs[0].stream.num_shards or self._num_shards
        inputs = [self._within(each, shards) for each in inputs]
        specs = [InputSpec(each.stream, self._pact(each, shards)) for each in inputs]
        dense = tuple(p for p, spec in enumerate(specs) if self._tells(spec, shards))
        is_regular = rule.kind is Kind.FOLD and bool(dense) and rng.random() < 0.7
        if rule.is_folding and any(spec.pact.dense for spec in specs):
            # A dense input tells of a time alone, not of those before it.
            rule = replace(rule, ahead=(0,) * (rule.depth + 1), spread=1, carry_until=0)
        if is_regular:
            rule = replace(rule, is_advancing=False)
        behaviour = self._behaviour(rule, dense if is_regular else None)
        behaviour = replace(behaviour, is_regular=is_regular)
        streams = self._builder.add_operator(
            f"{rule.kind.value}{behaviour.operator}",
            COLLECT_TAG if rule.kind is Kind.SINK else rule.kind.value,
            inputs=specs,
            num_outputs=rule.num_outputs,
            summaries=rule.summaries(),
            logic=behaviour.logic(),
            states=("state", TRACE),
            num_shards=shards,
            regular=is_regular,
            placement=self._placement(shards),
        )
        self._operators.append(behaviour)
        return [_Open(each, is_regular, behaviour.direct) for each in streams]

    def _within(self, each: _Open, shards: int) -> _Open:
        """A stream whose producer names no shards beyond the last one."""
        while each.direct is not None and each.direct.num_targets > shards:
            targets = each.direct.num_targets
            (each,) = self._add(
                self._rule(Kind.MAP, each.stream.depth, 1, 1),
                [each],
                num_shards=targets,
            )
        return each

    def _behaviour(self, rule: Rule, dense: tuple[int, ...] | None) -> Behaviour:
        rng = self._rng
        styles = [Style.NOW, Style.NOW, Style.STEPS]
        if not rule.is_folding and rule.num_outputs:
            styles += [Style.TIMER, Style.HELD, Style.NOTIFY]
        if rule.kind is Kind.SINK:
            styles = [Style.NOW, Style.NOTIFY]
        style = rng.choice(styles)
        lag = 0
        if style is Style.HELD and self._may_lag and not rule.depth:
            lag = 0 if self._in_cycle else rng.randint(1, self._max_lag)
            self._may_lag = False  # several in a row would need more epochs open
        direct = None
        if rule.num_outputs == 1 and rng.random() < (0.1 if dense is None else 0.4):
            by_rows = dense is not None or rng.random() < 0.5
            direct = DirectBy(rng.randrange(1 << 16), rng.randint(1, 3), by_rows)
        return Behaviour(
            len(self._operators),
            rule,
            style=style,
            is_columns=self._is_columns,
            told_ports=tuple(range(rule.num_inputs)) if dense is None else dense,
            all_ports=rule.kind is not Kind.PAIR or rng.random() < 0.5,
            chunk=rng.choice((0, 0, 1, 2)),
            lag=lag,
            delay_s=rng.choice((0.0, 0.0001, 0.003, 0.05)),
            moves=rng.choice(tuple(Moves)),
            lingers=rng.random() < 0.5,
            direct=direct,
            in_order=rng.random() < (0.6 if rule.depth else 0.2),
        )

    def _end(self, each: _Open) -> None:
        """Collect a stream, probe it, or leave it alone."""
        chance = self._rng.random()
        if chance < 0.1 and len(self._operators) > 1:
            return
        depth = each.stream.depth
        kind = Kind.PROBE if chance < 0.25 else Kind.SINK
        self._add(self._rule(kind, depth, 1, 0), [each])

    def _pact(self, each: _Open, shards: int) -> Pact:
        rng, stream = self._rng, each.stream
        choices: list[Pact] = [
            Exchange(route=RouteBy(rng.randrange(1 << 16))),
            Exchange.by_key(KeyBy(rng.randrange(1 << 16))),
            Gather(rng.randrange(shards)),
        ]
        if shards <= 8:
            choices.append(Broadcast())
        if stream.num_shards == shards:
            choices += [Pipeline()] * 3
        is_first = stream not in self._heeded
        if each.direct is not None and (rng.random() < 0.8 or is_first):
            choices = [Direct()]
            self._heeded.append(stream)
        pact = rng.choice(choices)
        if each.is_regular and rng.random() < 0.8:
            return replace(pact, dense=True)
        return pact

    def _tells(self, spec: InputSpec, shards: int) -> bool:
        """Whether every shard of the consumer hears of every time."""
        pact = spec.pact
        return pact.dense and (not isinstance(pact, Gather) or shards == 1)

    def _some_shards(self) -> int:
        rng = self._rng
        few = rng.choice((1, 2, 3, self._num_workers, self._num_workers + 1))
        return few if rng.random() < 0.9 else rng.choice((8, 16, 64))

    def _maybe_shards(self) -> int | None:
        return self._some_shards() if self._rng.random() < 0.3 else None

    def _placement(self, num_shards: int) -> Placement | None:
        rng = self._rng
        choice = rng.randrange(4)
        if choice == 0:
            return RoundRobin()
        if choice == 1:
            return Contiguous()
        if choice == 2:
            return Custom(
                tuple(rng.randrange(self._num_workers) for _ in range(num_shards))
            )
        return None


FOLDS = (Kind.FOLD, Kind.FOLD, Kind.PAIR)


def _left(builder: GraphBuilder, each: _Open) -> _Open:
    return replace(each, stream=builder.leave(each.stream), is_regular=False)
