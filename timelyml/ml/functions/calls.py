"""Traced calls, and what there has to be for tracing: slices, values, and who runs calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from timelyml.ml.functions.computation import ArrayType, Computation, Spec
from timelyml.ml.functions.flat import FlatFunction
from timelyml.ml.functions.ragged import Layout, Ragged


class Runner(Protocol):
    """Who executes traced calls: a client, or the recorder of a program."""

    def call(self, call: TracedCall) -> Sequence[Any]:
        """Start a call; return a value, in order, for each result of the function."""


class SliceLike(Protocol):
    """A virtual slice, as far as tracing looks at it."""

    @property
    def name(self) -> str:
        """Its name, unique among the slices of all clients."""

    @property
    def mesh(self) -> jax.sharding.AbstractMesh:
        """Its mesh, without devices."""

    @property
    def platform(self) -> str:
        """What JAX calls its kind of device: "cpu", "cuda" or "tpu"."""

    @property
    def client(self) -> Runner:
        """Whose it is."""


@runtime_checkable
class Operand(Protocol):
    """A value on a slice: a handle, or a placeholder of a program."""

    @property
    def type(self) -> ArrayType:
        """Its shape and element type."""

    @property
    def spec(self) -> Spec | None:
        """How it is sharded over the mesh of its slice; None if it is on none yet."""

    @property
    def slice(self) -> SliceLike | None:
        """The slice that it is on; None if it is on none yet."""

    @property
    def client(self) -> Runner | None:
        """Whose it is; None if that is not known yet."""


class TracedCall(NamedTuple):
    """A call of a compiled function, ready to be run.

    Attributes:
        computation: What is to run.
        slice: Where.
        operands: The arguments that are arrays and are used, flat: operands, or host
            values that become `computation.in_types`. An operand need not lie as
            `in_specs` says, nor on this slice; whoever runs the call moves it.
        out_tree: The structure of the results.
        flat: The Python function, of the operands; its derivative is made of it.
        line: The user's, if it is not the one that calls now.
        order: Calls on the slice with the same number, other than 0, are launched in the
            order in which they are made.
        layout: That of rows which it took, and which its results have too.
    """

    computation: Computation
    slice: SliceLike
    operands: tuple[Any, ...]
    out_tree: Any
    flat: FlatFunction
    line: str = ""
    layout: Layout | None = None
    order: int = 0

    def results(self, values: Iterable[Any]) -> Any:
        """Return what the function returns, of one value for each result."""
        found = jax.tree.unflatten(self.out_tree, values)
        if self.layout is None:
            return found
        return jax.tree.map(lambda rows: Ragged(rows, self.layout), found)


_RECORDER: ContextVar[Runner | None] = ContextVar("timelyml_recorder", default=None)


@contextlib.contextmanager
def recording(recorder: Runner) -> Iterator[None]:
    """Have all calls of compiled functions in this context go to a recorder."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def recorder() -> Runner | None:
    """Return the recorder of the program that is being traced, if one is."""
    return _RECORDER.get()
