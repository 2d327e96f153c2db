"""Programs that span islands: several orders that never wait for each other.

Each island has an order of its own. Two programs that cross two islands in opposite
directions could then block both: on each island the first in order waits for what is
second in order on the other. It cannot happen here, because of one rule: **a gang is
ordered only after everything it needs is ordered, on whatever island**. All orders are
made in one place, so of two gangs one is ordered first; every wait, for an input or for
a device, is then for something that was ordered earlier, and waits form no circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from timelyml.errors import ProgramError
from timelyml.ml.scheduling.scheduler import GangScheduler
from timelyml.ml.scheduling.values import (
    Effect,
    Gang,
    GangDone,
    GangGraph,
    Grant,
    Outcome,
    ProgramDone,
    Report,
    Submission,
)
from timelyml.progress import new_tuple


class Dispatch(StrEnum):
    """When a gang counts as there for those that need it (the paper's section 4.5)."""

    PARALLEL = "parallel"
    """Once it is ordered: hosts prepare and launch successors while it runs."""
    SEQUENTIAL = "sequential"
    """Once it is over, also within an island; for comparison, and for gangs whose
    successors depend on what it computes."""


_Place: TypeAlias = tuple[str, int]
"""An island, and the index of a gang among those of the program there."""


@dataclass(frozen=True, slots=True)
class PlacedGang:
    """A gang of a program that may span islands.

    Attributes:
        needs: Indices of earlier gangs of the program, on any island.
        carries: Pairs of the index of any gang of the program and a distance: the gang
            needs what that gang computed so many iterations before, or needs it to have
            made room, which keeps one island from running ahead of another for ever.
    """

    island: str
    computation: str
    placement: str
    needs: tuple[int, ...] = ()
    carries: tuple[tuple[int, int], ...] = ()
    num_external: int = 0
    estimate_ns: int | None = None


class SpreadGraph:
    """The gangs of a program, taken apart by island; made once, submitted often."""

    __slots__ = ("dispatch", "graphs", "indices", "opens", "opens_at_first", "places")

    def __init__(
        self, gangs: Sequence[PlacedGang], dispatch: Dispatch = Dispatch.PARALLEL
    ) -> None:
        self.dispatch = dispatch
        indices: dict[str, list[int]] = {}
        for index, gang in enumerate(gangs):
            indices.setdefault(gang.island, []).append(index)
        self.indices = {island: tuple(each) for island, each in indices.items()}
        self.places = {
            index: (island, local)
            for island, each in indices.items()
            for local, index in enumerate(each)
        }
        self.opens: dict[_Place, list[tuple[_Place, int]]] = {}
        self.opens_at_first: list[tuple[_Place, int]] = []
        parts: dict[str, list[Gang]] = {island: [] for island in indices}
        for index, gang in enumerate(gangs):
            parts[gang.island].append(self._part(index, gangs))
        self.graphs = {island: GangGraph(part) for island, part in parts.items()}

    def _part(self, index: int, gangs: Sequence[PlacedGang]) -> Gang:
        """Keep needs within the island; count those across as inputs from elsewhere."""
        gang = gangs[index]
        needs = []
        num_external = gang.num_external
        links = [(needed, 0) for needed in gang.needs]
        for other, distance in (*links, *gang.carries):
            self._check(index, other, distance, gangs)
            if self._is_inside(gangs[other], gang):
                # An iteration begins once the one before it is all ordered.
                needs += [] if distance else [self.places[other][1]]
                continue
            target = self.places[index], num_external
            self.opens.setdefault(self.places[other], []).append(target)
            self.opens_at_first += [target] * distance
            num_external += 1
        return Gang(
            gang.computation,
            gang.placement,
            tuple(needs),
            num_external,
            gang.estimate_ns,
        )

    def _is_inside(self, needed: PlacedGang, gang: PlacedGang) -> bool:
        return self.dispatch is Dispatch.PARALLEL and needed.island == gang.island

    def _check(
        self, index: int, other: int, distance: int, gangs: Sequence[PlacedGang]
    ) -> None:
        limit = len(gangs) if distance else index
        if not 0 <= other < limit or distance < 0:
            raise ProgramError(
                f"gang {index} ({gangs[index].computation}) needs a gang that cannot be "
                f"there; got gang {other} at distance {distance}; expected gangs 0 to "
                f"{limit - 1}; list gangs in an order in which they could run",
                gang=index,
            )


class _Spread:
    """A program under way, perhaps on several islands."""

    __slots__ = ("graph", "is_apart", "islands_left", "outcome")

    def __init__(self, graph: SpreadGraph, *, is_apart: bool) -> None:
        self.graph = graph
        self.islands_left = set(graph.graphs)
        self.is_apart = is_apart
        self.outcome = Outcome.FINISHED


class Islands:
    """The gang schedulers of all islands, and the programs that span them.

    Effects are returned with the island they belong to; gangs are numbered as in the
    program, and a program is done once, when it is on all of its islands.
    """

    def __init__(self) -> None:
        self.schedulers: dict[str, GangScheduler] = {}
        self._spreads: dict[str, _Spread] = {}
        self._ended: set[str] = set()  # to be forgotten once no program spans them

    def add(self, island: str, scheduler: GangScheduler) -> None:
        """Make an island known."""
        self.schedulers[island] = scheduler

    def remove(self, island: str) -> None:
        """Forget an island of which nothing is left, once no program has to do with it."""
        self._ended.add(island)
        self._forget_ended()

    def _forget_ended(self) -> None:
        used = {x for spread in self._spreads.values() for x in spread.graph.graphs}
        for island in self._ended - used:
            self._ended.discard(island)
            self.schedulers.pop(island, None)

    def submit(
        self, client: str, program: str, graph: SpreadGraph, *,
        iterations: int | None = 1, priority: int = 0, is_apart: bool = False,
    ) -> list[tuple[str, Effect]]:  # fmt: skip
        """Take a program on all of its islands, or raise and take it on none.

        Args:
            client: Whose it is.
            program: Name of this call.
            graph: Its gangs.
            iterations: As of `Submission`.
            priority: As of `Submission`.
            is_apart: Where one part of it does not come to its end, the others go on;
                those that wait for it find that it brought nothing.
        """
        parts: dict[str, Submission] = {}
        for island, part in graph.graphs.items():
            fields = client, program, part, iterations, priority
            parts[island] = new_tuple(Submission, fields)
        for island, submission in parts.items() if len(parts) > 1 else ():
            self.schedulers[island].check(submission)  # the only one does so itself
        # All parts are there before news of one reaches another.
        effects = [
            (island, effect)
            for island, submission in parts.items()
            for effect in self.schedulers[island].submit(submission)
        ]
        for (island, gang), slot in graph.opens_at_first:
            opened = self.schedulers[island].open(program, gang, slot)
            effects += [(island, effect) for effect in opened]
        self._spreads[program] = _Spread(graph, is_apart=is_apart)
        return self._follow(effects)

    def finished(
        self, island: str, reports: Iterable[Report]
    ) -> list[tuple[str, Effect]]:
        """Take the word of hosts of an island that launches are over."""
        return self.follow(island, self.schedulers[island].finished(reports))

    def open(self, program: str, gang: int, slot: int = 0) -> list[tuple[str, Effect]]:
        """Count an input from outside of the program; `gang` as in the program."""
        spread = self._spreads.get(program)
        if spread is None:
            return []
        island, local = spread.graph.places[gang]
        return self.follow(island, self.schedulers[island].open(program, local, slot))

    def cancel(self, program: str) -> list[tuple[str, Effect]]:
        """Drop what of a program is not ordered, on all islands.

        What is ordered has all that it needs, so it comes to its end.
        """
        spread = self._spreads.get(program)
        effects: list[tuple[str, Effect]] = []
        if spread is not None:
            spread.is_apart = False  # nothing goes on
        for island in sorted(spread.islands_left) if spread else ():
            effects += self.follow(island, self.schedulers[island].cancel(program))
        return effects

    def cancel_part(self, island: str, program: str) -> list[tuple[str, Effect]]:
        """Drop what of a program is not ordered on one island."""
        return self.follow(island, self.schedulers[island].cancel(program))

    def stop(self, program: str) -> None:
        """End a loop after the same iteration everywhere."""
        spread = self._spreads.get(program)
        if spread is None:
            return
        parts = [self.schedulers[island] for island in sorted(spread.islands_left)]
        last = max((part.iteration_of(program) or 0 for part in parts), default=0)
        for part in parts:
            part.stop(program, last + 1)

    def follow(
        self, island: str, effects: Iterable[Effect]
    ) -> list[tuple[str, Effect]]:
        """Take in what a scheduler returned that was called directly."""
        return self._follow([(island, effect) for effect in effects])

    def _follow(
        self, effects: Iterable[tuple[str, Effect]]
    ) -> list[tuple[str, Effect]]:
        """Tell other islands what they waited for, until nothing more follows."""
        found: list[tuple[str, Effect]] = []
        pending = deque(effects)
        while pending:
            island, effect = pending.popleft()
            if isinstance(effect, ProgramDone):
                whole = self._end_part(island, effect, pending)
                found += [] if whole is None else [(island, whole)]
            elif isinstance(effect, Grant | GangDone):
                spread = self._spreads.get(effect.key.program)
                if spread is not None:
                    self._open_successors(island, effect, spread, pending)
                    effect = _renumbered(island, effect, spread.graph)
                found.append((island, effect))
            else:
                found.append((island, effect))
        return found

    def _open_successors(
        self,
        island: str,
        effect: Grant | GangDone,
        spread: _Spread,
        pending: deque[tuple[str, Effect]],
    ) -> None:
        if not spread.graph.opens:
            return
        is_sequential = spread.graph.dispatch is Dispatch.SEQUENTIAL
        if isinstance(effect, GangDone) != is_sequential:
            return
        targets = spread.graph.opens.get((island, effect.key.gang), ())
        for (target, gang), slot in targets:
            opened = self.schedulers[target].open(effect.key.program, gang, slot)
            pending.extend((target, each) for each in opened)

    def _open_all(
        self,
        island: str,
        program: str,
        spread: _Spread,
        pending: deque[tuple[str, Effect]],
    ) -> None:
        """Open what the gangs of an island would have opened elsewhere."""
        for (origin, _), targets in spread.graph.opens.items():
            for (target, gang), slot in targets if origin == island else ():
                opened = self.schedulers[target].open(program, gang, slot)
                pending.extend((target, each) for each in opened)

    def _end_part(
        self, island: str, done: ProgramDone, pending: deque[tuple[str, Effect]]
    ) -> ProgramDone | None:
        spread = self._spreads.get(done.program)
        if spread is None:
            return done
        spread.islands_left.discard(island)
        if done.outcome is not Outcome.FINISHED and spread.is_apart:
            spread.outcome = done.outcome
            self._open_all(island, done.program, spread, pending)
        elif (
            done.outcome is not Outcome.FINISHED and spread.outcome is Outcome.FINISHED
        ):
            spread.outcome = done.outcome
            for other in sorted(spread.islands_left):
                dropped = self.schedulers[other].cancel(done.program)
                pending.extend((other, each) for each in dropped)
        if spread.islands_left:
            return None
        del self._spreads[done.program]
        if self._ended:
            self._forget_ended()
        is_same = done.outcome is spread.outcome
        return done if is_same else done._replace(outcome=spread.outcome)


def _renumbered(
    island: str, effect: Grant | GangDone, graph: SpreadGraph
) -> Grant | GangDone:
    if len(graph.indices) == 1:
        return effect  # all on one island, where gangs have the program's numbers
    gang = graph.indices[island][effect.key.gang]
    return effect._replace(key=effect.key._replace(gang=gang))
