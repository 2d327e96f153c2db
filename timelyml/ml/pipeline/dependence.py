"""What in a traced function depends on what, and the function cut along it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, Var

from timelyml.ml.pipeline.flattening import UNNAMED, num_products


def variables(atoms: Iterable[Any]) -> list[Var]:
    """Return those that are no constants."""
    return [each for each in atoms if not isinstance(each, Literal)]


class Dependence:
    """The equations of a flat function by what they make.

    Args:
        jaxpr: The function; its equations are taken whole.
    """

    def __init__(self, jaxpr: ClosedJaxpr) -> None:
        self.jaxpr = jaxpr
        self._makers = {
            var: index
            for index, eqn in enumerate(jaxpr.jaxpr.eqns)
            for var in eqn.outvars
        }

    def following_freely(self, sources: Iterable[Var]) -> set[Var]:
        """Return what follows from `sources` and constants alone, without a product."""
        known = {*sources, *self.jaxpr.jaxpr.constvars}
        found: set[Var] = set()
        for eqn in self.jaxpr.jaxpr.eqns:
            is_free = not num_products([eqn])
            if is_free and known.issuperset(variables(eqn.invars)):
                known.update(eqn.outvars)
                found.update(eqn.outvars)
        return found

    def made_for(self, targets: Iterable[Var]) -> set[Var]:
        """Return all that equations make on the way to `targets`."""
        eqns = self.jaxpr.jaxpr.eqns
        indices = self._equations(targets, known=())
        return {var for index in indices for var in eqns[index].outvars}

    def read_by(
        self, targets: Iterable[Any], *, known: Collection[Var], until: Collection[Var]
    ) -> list[Var]:
        """Return what is read on the way to `targets` of `until`, or is there unasked.

        Args:
            targets: What is to be computed.
            known: What may be read, or is computed again.
            until: What is not computed again.
        """
        reads = self.leaves(targets, until=until)
        return [var for var in reads if var not in known]

    def leaves(self, targets: Iterable[Any], until: Collection[Var] = ()) -> list[Var]:
        """Return what is read on the way to `targets` and not made on it, once each."""
        wanted = variables(targets)
        eqns = self.jaxpr.jaxpr.eqns
        for index in self._equations(wanted, known=until):
            wanted += variables(eqns[index].invars)
        consts = set(self.jaxpr.jaxpr.constvars)
        return list(
            dict.fromkeys(
                var
                for var in wanted
                if (var not in self._makers or var in until) and var not in consts
            )
        )

    def furthest(self, targets: Sequence[Var]) -> list[Var]:
        """Return the one of `targets` with the most products on the way to it."""
        if not targets:
            return []
        return [max(targets, key=self._cost)]

    def cut(self, invars: Sequence[Var], outvars: Sequence[Any]) -> ClosedJaxpr:
        """Return the function from some variables to others, with nothing beside it."""
        inner = self.jaxpr.jaxpr
        eqns = [inner.eqns[i] for i in self._equations(outvars, known=invars)]
        read = {v for eqn in eqns for v in variables(eqn.invars)} | {
            *variables(outvars)
        }
        consts = [
            (var, value)
            for var, value in zip(inner.constvars, self.jaxpr.consts, strict=True)
            if var in read
        ]
        part = inner.replace(
            constvars=[var for var, _ in consts],
            invars=list(invars),
            outvars=list(outvars),
            eqns=eqns,
            debug_info=UNNAMED,
        )
        return ClosedJaxpr(part, [value for _, value in consts])

    def _cost(self, target: Var) -> tuple[int, int]:
        eqns = [self.jaxpr.jaxpr.eqns[i] for i in self._equations([target], known=())]
        return num_products(eqns), len(eqns)

    def _equations(self, targets: Iterable[Any], known: Collection[Var]) -> list[int]:
        """Return the equations on the way from `known` to `targets`, in their order."""
        known = set(known)
        found: set[int] = set()
        pending = [v for v in variables(targets) if v not in known]
        while pending:
            index = self._makers.get(pending.pop())
            if index is not None and index not in found:
                found.add(index)
                read = variables(self.jaxpr.jaxpr.eqns[index].invars)
                pending += [v for v in read if v not in known]
        return sorted(found)
