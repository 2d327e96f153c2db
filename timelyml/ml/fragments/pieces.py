"""A written-out function as parts and values between them, and as pieces that run.

What follows from constants alone, such as a mask, belongs to no part: each piece that
needs it makes it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Var

from timelyml.ml.fragments.cutting import Flow, Problem
from timelyml.ml.fragments.labels import label_of
from timelyml.ml.pipeline.dependence import variables
from timelyml.ml.pipeline.flattening import UNNAMED, evaluate


@dataclass(frozen=True, eq=False)
class Piece:
    """Equations that run together in one place; a function of `reads` to `makes`."""

    place: int
    label: str
    jaxpr: ClosedJaxpr
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]

    @property
    def __name__(self) -> str:
        """What traces and errors call it."""
        return self.label

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Compute it."""
        return tuple(evaluate(self.jaxpr, arrays))


class Parts:
    """The parts of a function: its equations that depend on arguments and are used.

    Args:
        jaxpr: A function that was written out.

    Attributes:
        eqns: The parts, each one equation, in an order in which they can run.
        labels: Of each part.
    """

    def __init__(self, jaxpr: ClosedJaxpr) -> None:
        self.jaxpr = jaxpr
        inner = jaxpr.jaxpr
        self._constants = self._following(inner.constvars)
        used = self._used()
        moving = [
            i
            for i, _ in enumerate(inner.eqns)
            if i in used and i not in self._constants
        ]
        self._indices = moving
        self.eqns = [inner.eqns[i] for i in moving]
        self.labels = [label_of(eqn) for eqn in self.eqns]
        self._makers = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self._readers: dict[Var, list[int]] = {}
        for part, eqn in enumerate(self.eqns):
            for var in dict.fromkeys(variables(eqn.invars)):
                self._readers.setdefault(var, []).append(part)

    def readers(self, var: Var) -> tuple[int, ...]:
        """Return the parts that read a value."""
        return tuple(self._readers.get(var, ()))

    def problem(
        self,
        places: Mapping[str, int],
        num_places: int,
        homes: Sequence[int | None],
        end: int | None = None,
    ) -> Problem:
        """Return what is to be assigned: the parts, arguments that lie somewhere, the end.

        Args:
            places: Of labels.
            num_places: How many there are.
            homes: Where each argument lies; None: nowhere yet.
            end: Where results are wanted; None: they stay where they are made.
        """
        fixed = [None if x is None else places[x] for x in self.labels]
        flows = []
        for var, home in zip(self.jaxpr.jaxpr.invars, homes, strict=True):
            producer = None
            if home is not None:
                producer = len(fixed)
                fixed.append(home)
            if self.readers(var):
                flows.append(Flow(_size(var), producer, self.readers(var)))
        wanted = set()
        if end is not None:
            wanted = {*variables(self.jaxpr.jaxpr.outvars)}
            fixed.append(end)
        for var, maker in self._makers.items():
            readers = self.readers(var)
            readers += (len(fixed) - 1,) if var in wanted else ()
            if readers:
                flows.append(Flow(_size(var), maker, readers))
        return Problem(tuple(fixed), tuple(flows), num_places)

    def pieces(self, places: Sequence[int], names: Sequence[str]) -> list[Piece]:
        """Return the function in pieces: few, each all that can run in its place.

        Args:
            places: Of each part.
            names: Of places, for pieces without a label.
        """
        wanted = set(variables(self.jaxpr.jaxpr.outvars))
        runs = self._runs(places)
        if not runs:
            return []
        pieces = []
        for number, run in enumerate(runs):
            inside = set(run)
            made = [
                var
                for part in run
                for var in self.eqns[part].outvars
                if var in wanted or any(x not in inside for x in self.readers(var))
            ]
            if number == len(runs) - 1:  # results that follow from constants alone
                free = self._made_by(self._constants) | {*self.jaxpr.jaxpr.constvars}
                made += [var for var in wanted if var in free]
            labels = dict.fromkeys(self.labels[part] for part in run)
            label = "_".join(each for each in labels if each) or names[places[run[0]]]
            pieces.append(self.piece(run, places[run[0]], label, made))
        return pieces

    def piece(
        self, run: Sequence[int], place: int, label: str, makes: Sequence[Var]
    ) -> Piece:
        """Return some parts as one piece that makes some values."""
        inner = self.jaxpr.jaxpr
        needed = {self._indices[part] for part in run}
        read = {v for part in run for v in variables(self.eqns[part].invars)} | {*makes}
        for index in sorted(self._constants, reverse=True):
            if read & set(inner.eqns[index].outvars):
                needed.add(index)
                read |= set(variables(inner.eqns[index].invars))
        eqns = [inner.eqns[index] for index in sorted(needed)]
        made = {var for eqn in eqns for var in eqn.outvars}
        consts = [
            (var, value)
            for var, value in zip(inner.constvars, self.jaxpr.consts, strict=True)
            if var in read
        ]
        reads = [
            var
            for var in dict.fromkeys(
                (*(v for eqn in eqns for v in variables(eqn.invars)), *makes)
            )
            if var not in made and var not in inner.constvars
        ]
        part = inner.replace(
            constvars=[var for var, _ in consts],
            invars=reads,
            outvars=list(makes),
            eqns=eqns,
            debug_info=UNNAMED,
        )
        closed = ClosedJaxpr(part, [value for _, value in consts])
        return Piece(place, label, closed, tuple(reads), tuple(makes))

    def _runs(self, places: Sequence[int]) -> list[list[int]]:
        """Group parts: all that can run in a place before another has its turn."""
        waiting = {
            part: {self._makers[v] for v in variables(eqn.invars) if v in self._makers}
            for part, eqn in enumerate(self.eqns)
        }
        done: set[int] = set()
        runs: list[list[int]] = []
        while waiting:
            first = next(part for part, needs in waiting.items() if needs <= done)
            run = []
            for part in list(waiting):  # makers stand before readers: once is enough
                if places[part] == places[first] and waiting[part] <= done:
                    run.append(part)
                    done.add(part)
                    del waiting[part]
            runs.append(run)
        return runs

    def _following(self, sources: Sequence[Var]) -> set[int]:
        """Return the equations that depend on constants alone, and do nothing beside."""
        known = set(sources)
        found = set()
        for index, eqn in enumerate(self.jaxpr.jaxpr.eqns):
            if not eqn.effects and known.issuperset(variables(eqn.invars)):
                known.update(eqn.outvars)
                found.add(index)
        return found

    def _used(self) -> set[int]:
        """Return the equations that results depend on, and those that do something."""
        needed = set(variables(self.jaxpr.jaxpr.outvars))
        found = set()
        for index in reversed(range(len(self.jaxpr.jaxpr.eqns))):
            eqn = self.jaxpr.jaxpr.eqns[index]
            if eqn.effects or needed & set(eqn.outvars):
                found.add(index)
                needed |= set(variables(eqn.invars))
        return found

    def _made_by(self, indices: set[int]) -> set[Var]:
        eqns = self.jaxpr.jaxpr.eqns
        return {var for index in indices for var in eqns[index].outvars}


def _size(var: Var) -> int:
    aval: Any = var.aval
    return int(aval.size) * int(aval.dtype.itemsize)
