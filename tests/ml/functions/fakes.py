"""A client and slices that run nothing, and note what they are asked to run."""

from __future__ import annotations

from dataclasses import dataclass, field

from jax.sharding import AbstractMesh

from timelyml.ml.functions import ArrayType

MESH = AbstractMesh((2, 2), ("data", "model"))


@dataclass(eq=False)
class Client:
    """Returns values of the types that calls promise."""

    calls: list = field(default_factory=list)

    def call(self, call):
        self.calls.append(call)
        computation = call.computation
        count = computation.num_results
        pairs = zip(computation.out_types, computation.out_specs, strict=True)
        return [Value(call.slice, *each) for each in list(pairs)[:count]]

    def call_program(self, call):
        self.calls.append(call)
        values = [call.program.value(ref) for ref in call.program.results]
        return [Value(Slice(self, each.slice), each.type, each.spec) for each in values]


@dataclass(frozen=True)
class Slice:
    """A slice by name only."""

    client: Client
    name: str = "slice"
    mesh: AbstractMesh = MESH
    platform: str = "cpu"


@dataclass(frozen=True, eq=False)
class Value:
    """A handle without elements."""

    slice: Slice
    type: ArrayType
    spec: tuple

    @property
    def client(self):
        return self.slice.client
