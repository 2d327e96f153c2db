"""Labels in a traced function: `jax.named_scope`s, and what has to be taken apart.

An equation belongs to the innermost of its scopes that is a label. What calls another
function belongs to one label as a whole, or is written out until it does: calls are
inlined, loops of known length unrolled. The rest is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from timelyml.errors import TraceError
from timelyml.ml import jax_callbacks, jax_private
from timelyml.ml.pipeline.flattening import (
    MAX_UNROLLED,
    alone,
    inner_functions,
    interpreted,
    traced,
    unrolled,
)

_MARK = "timelyml label: "  # around what is written out: the innermost says all
_REASONS = {
    "cond": "which branch is taken is known only when it runs",
    "while": "how often it runs is known only then",
    "remat2": "what jax.checkpoint computes again has to be in one place",
    "custom_jvp_call": "its derivative is given for the whole of it",
    "custom_vjp_call": "its derivative is given for the whole of it",
}


def written_out(
    jaxpr: ClosedJaxpr, labels: Collection[str], function: str
) -> ClosedJaxpr:
    """Return the same function, of which no equation has two labels.

    Args:
        jaxpr: A traced function.
        labels: What counts as labels among its scopes.
        function: Its name, for errors.

    Raises:
        TraceError: Labels are where only one can be, or it calls Python on the host.
    """
    if jax_callbacks.calls_host(jaxpr):
        raise TraceError(
            f"function {function!r} calls Python on the host while it runs; got a "
            f"callback, which only travels as code; expected none; compile that part "
            f"with ml.jit and call it in an ml.program, or leave the callback out",
            function=function,
        )
    writer = _Writer(frozenset(labels), function)
    return traced(functools.partial(writer.run, None, jaxpr), jaxpr.in_avals)


def label_of(eqn: Any) -> str | None:
    """Return the label of an equation of a function that was written out."""
    for scope in reversed(jax_private.scopes_of(eqn)):
        if scope.startswith(_MARK):
            return scope.removeprefix(_MARK) or None
    return None


def scopes_in(jaxpr: ClosedJaxpr | Jaxpr) -> set[str]:
    """Return the names of all scopes in a function, whatever calls it inside."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        found.update(jax_private.scopes_of(eqn))
        for inner in inner_functions(eqn.params.values()):
            found |= scopes_in(inner)
    return found


class _Writer:
    def __init__(self, labels: frozenset[str], function: str) -> None:
        self._labels = labels
        self._function = function

    def run(
        self, label: str | None, jaxpr: ClosedJaxpr | Jaxpr, *arguments: Any
    ) -> list[Any]:
        """Evaluate a function, part of a label, equation by equation."""
        return interpreted(jaxpr, arguments, functools.partial(self._apply, label))

    def _apply(
        self, outer: str | None, jaxpr: Jaxpr, eqn: Any, arguments: list[Any]
    ) -> Sequence[Any]:
        name, own = eqn.primitive.name, self._own(eqn, outer)
        inside = self._inside(eqn, own) - {None}
        if inside <= {own}:
            with _marked(own):
                return alone(jaxpr, eqn, arguments)
        if name == "jit":
            return self.run(own, eqn.params["jaxpr"], *arguments)
        if len(inside) == 1:
            with _marked(*inside):
                return alone(jaxpr, eqn, arguments)
        if name == "scan" and eqn.params["length"] <= MAX_UNROLLED:
            with _marked(own):  # its own slices and stacks
                return unrolled(eqn.params, arguments, functools.partial(self.run, own))
        raise self._refusal(eqn, {str(each) for each in inside})

    def _own(self, eqn: Any, outer: str | None) -> str | None:
        scopes = [each for each in jax_private.scopes_of(eqn) if each in self._labels]
        return scopes[-1] if scopes else outer

    def _inside(self, eqn: Any, own: str | None) -> set[str | None]:
        """The labels of all that an equation calls."""
        found: set[str | None] = set()
        for inner in inner_functions(eqn.params.values()):
            for each in inner.eqns:
                label = self._own(each, own)
                found |= {label} | self._inside(each, label)
        return found

    def _refusal(self, eqn: Any, inside: set[str]) -> TraceError:
        name = eqn.primitive.name
        reason = _REASONS.get(name, "it is taken whole")
        if name == "scan":
            length = eqn.params["length"]
            reason = f"{length} iterations are more than are unrolled, {MAX_UNROLLED}"
        return TraceError(
            f"function {self._function!r} has several labels inside of one {name!r}; "
            f"got {', '.join(sorted(inside))}, though {reason}; expected at most one "
            f"label there; label the whole of it, or put it under one label each",
            function=self._function,
        )


@contextlib.contextmanager
def _marked(label: str | None) -> Iterator[None]:
    with jax.named_scope(f"{_MARK}{label or ''}"):
        yield
