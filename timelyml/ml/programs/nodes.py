"""The nodes of programs, and the values between them.

A sharded computation is one node, however many devices it runs on, and so is a sharded
transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from timelyml.ml.functions import ArrayType, Computation, Spec


class Ref(NamedTuple):
    """An output of a node."""

    node: int
    output: int = 0


@dataclass(frozen=True, slots=True)
class Value:
    """What an output is, and where.

    Attributes:
        spec: How it is sharded over the mesh of its slice; None on the client.
        slice: The name of its slice; None for a host array that the client sends.
    """

    type: ArrayType
    spec: Spec | None = None
    slice: str | None = None


class _Source:
    """A node whose value was made before, or elsewhere."""

    __slots__ = ()
    value: Value

    @property
    def operands(self) -> tuple[Ref, ...]:
        """None: it comes from outside."""
        return ()

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The value."""
        return (self.value,)


@dataclass(frozen=True, slots=True)
class Arg(_Source):
    """An argument of the program, or a handle that it captured.

    Attributes:
        position: Among the operands of a call of the program.
        label: What the user calls it.
    """

    position: int
    label: str
    value: Value


@dataclass(frozen=True, slots=True)
class Constant(_Source):
    """A host array that was there when the program was traced."""

    data: bytes
    value: Value


@dataclass(frozen=True, slots=True)
class Call:
    """A computation on a slice.

    Attributes:
        line: The user's, for errors; empty where a pass put it in.
        order: Those on the slice with the same number, but 0, are launched as they stand.
    """

    computation: Computation
    slice: str
    operands: tuple[Ref, ...]
    line: str = ""
    order: int = 0

    @property
    def outputs(self) -> tuple[Value, ...]:
        """All outputs of the computation; those that tell of checks come last."""
        found = self.computation
        pairs = zip(found.out_types, found.out_specs, strict=True)
        return tuple(Value(*each, self.slice) for each in pairs)

    @property
    def donated(self) -> tuple[Ref, ...]:
        """The operands whose memory it takes."""
        return tuple(self.operands[i] for i in self.computation.donated)

    @property
    def has_effects(self) -> bool:
        """Whether it does more than compute its results."""
        return self.computation.has_effects


class Route(StrEnum):
    """How a value gets to another slice."""

    PUT = "put"
    """From the client, or from the program itself, to a slice."""
    WITHIN = "within"
    """From device to device of one island."""
    BETWEEN = "between"
    """From island to island, over the network."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """Of a transfer: rows go where counts say that come when the program runs.

    Attributes:
        is_back: Whether rows go back to where such a transfer brought them from.
    """

    is_back: bool


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value moved to another slice, sharded as it is needed there.

    One node for all shards. A value that only has to be sharded otherwise, on the
    devices where it is, is no transfer: that is a computation.

    Attributes:
        sparse: If only some rows go, to shards that the values decide.
    """

    operand: Ref
    value: Value
    route: Route
    sparse: Sparse | None = None

    @property
    def operands(self) -> tuple[Ref, ...]:
        """What is moved."""
        return (self.operand,)

    @property
    def outputs(self) -> tuple[Value, ...]:
        """What arrives."""
        return (self.value,)


@dataclass(frozen=True, slots=True)
class Region:
    """A block of nodes that a branch or a loop runs, on values that it is given.

    Its `Arg` nodes stand for the operands of the branch or loop, by position; all that
    it uses from outside is among these. It has no constants of its own.
    """

    nodes: tuple[Node, ...]
    results: tuple[Ref, ...]

    def positioned(self, positions: Mapping[Ref, int]) -> Region:
        """Return a region of which some `Arg` nodes stand for other operands."""
        nodes = [
            replace(node, position=positions.get(Ref(index), node.position))
            if isinstance(node, Arg)
            else node
            for index, node in enumerate(self.nodes)
        ]
        return replace(self, nodes=tuple(nodes))


TRAIL = Value(ArrayType((), "trail", 0))
"""What a branch or a loop recorded: which region ran, how often, and values of each run.

It is no array: only a branch or a loop that goes back over it takes it.
"""


@dataclass(frozen=True, slots=True)
class Recalled(_Source):
    """What a run on the way there kept, in a region that goes back over it.

    Attributes:
        number: Among what the region on the way there keeps.
    """

    number: int
    value: Value


@dataclass(frozen=True, slots=True)
class Branch:
    """One of several regions, chosen by a value on a slice when the program runs.

    Attributes:
        kind: "cond", whose regions are those of false and true, or "switch".
        operands: First what chooses, then what each region is given.
        regions: All with the same results; recorded, each may keep more after these.
        values: Results of the region that runs, and where they are brought.
        line: The user's, for errors.
        is_recorded: Whether its last output is a trail, for a replayed one to take.
        is_replayed: Whether a trail chooses: the region of the one that recorded it.
    """

    kind: str
    operands: tuple[Ref, ...]
    regions: tuple[Region, ...]
    values: tuple[Value, ...]
    line: str
    is_recorded: bool = False
    is_replayed: bool = False

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Its results, and the trail if it is recorded."""
        return (*self.values, TRAIL) if self.is_recorded else self.values

    @property
    def passed(self) -> tuple[Ref, ...]:
        """What each region is given."""
        return self.operands[1:]

    @property
    def has_effects(self) -> bool:
        """Whether a region does more than compute its results."""
        return any(map(has_effects, self.regions))


@dataclass(frozen=True, slots=True)
class Loop:
    """A region that runs again and again, as long as a value on a slice says so.

    As it is traced, `condition` tells whether `body` is to run. Rotated, `condition` is
    None: the first operand tells it of the first run, and the first result of the body
    of the next, so that both are computed together.

    Attributes:
        operands: What is carried from run to run, then what every run is given.
        body: Returns what is carried; recorded, it may keep more after that.
        values: What is carried, at the end.
        max_steps: The body may run so often.
        line: The user's, for errors.
        is_recorded: Whether its last output is a trail, for a replayed one to take.
        is_replayed: Whether the first operand is a trail, and the body runs once for
            each run that it tells of, the last first. It has no condition.
        is_checkpointed: Whether a gradient computes runs again, from what is carried.
    """

    operands: tuple[Ref, ...]
    condition: Region | None
    body: Region
    values: tuple[Value, ...]
    max_steps: int | None
    line: str
    is_recorded: bool = False
    is_replayed: bool = False
    is_checkpointed: bool = False

    @property
    def outputs(self) -> tuple[Value, ...]:
        """What is carried, and the trail if it is recorded."""
        return (*self.values, TRAIL) if self.is_recorded else self.values

    @property
    def kind(self) -> str:
        """What the user calls it."""
        return "while_loop"

    @property
    def passed(self) -> tuple[Ref, ...]:
        """What the body is given at first."""
        return self.operands if self.condition is not None else self.operands[1:]

    @property
    def regions(self) -> tuple[Region, ...]:
        """The condition, if it stands for itself, and the body."""
        return (self.body,) if self.condition is None else (self.condition, self.body)

    @property
    def has_effects(self) -> bool:
        """Whether a region does more than compute its results."""
        return any(map(has_effects, self.regions))


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows that go from shard to shard, as many as a matrix on the source slice says.

    Row `i` of the matrix tells how many rows shard `i` of the source has for each shard
    of the target, in the order in which they lie. It comes in pieces, each small enough
    to ride along with the news that it is computed.

    Attributes:
        operands: First the pieces of the matrix, then what is exchanged.
        num_pieces: How many of them are pieces of the matrix.
        shape: Shards of the source and of the target of the way there.
        sparse: Which way.
        max_rows: What a shard of the target holds of rows at most.
        outputs: What arrives, padded with zeros.
        line: The user's, for errors.
    """

    operands: tuple[Ref, ...]
    num_pieces: int
    shape: tuple[int, int]
    sparse: Sparse
    max_rows: int
    outputs: tuple[Value, ...]
    line: str

    @property
    def kind(self) -> str:
        """What the user calls it."""
        return "unroute" if self.sparse.is_back else "route"

    @property
    def matrix(self) -> tuple[Ref, ...]:
        """The pieces of the matrix."""
        return self.operands[: self.num_pieces]

    @property
    def rows(self) -> tuple[Ref, ...]:
        """What is exchanged."""
        return self.operands[self.num_pieces :]

    @property
    def has_effects(self) -> bool:
        """No: it brings its results and does nothing else."""
        return False

    def reversed(self, operands: Sequence[Ref], homes: Sequence[Value]) -> Exchange:
        """Return the exchange that brings as many rows back, by the same matrix.

        Args:
            operands: The pieces of the matrix, then what comes back.
            homes: What it is where it comes to.
        """
        num_shards = self.shape[1] if self.sparse.is_back else self.shape[0]
        return replace(
            self,
            operands=tuple(operands),
            sparse=Sparse(not self.sparse.is_back),
            max_rows=homes[0].type.shape[0] // num_shards,
            outputs=tuple(homes),
        )


Control: TypeAlias = Branch | Loop | Exchange
"""What values decide when a program runs; `CONTROL` to ask whether a node is one."""

CONTROL = (Branch, Loop, Exchange)

Node: TypeAlias = Arg | Constant | Recalled | Call | Transfer | Control


def has_effects(region: Region) -> bool:
    """Whether a region does more than compute its results."""
    return any(
        each.has_effects
        for each in region.nodes
        if isinstance(each, Call | Branch | Loop)
    )


def replayed(
    node: Branch | Loop,
    operands: Sequence[Ref],
    regions: Sequence[Region],
    values: Sequence[Value],
) -> Branch | Loop:
    """Return what goes back over the trail, its first operand, of a branch or a loop.

    Its regions are the ways back of those of the node; of a loop, of its body.
    """
    given, outputs = tuple(operands), tuple(values)
    if isinstance(node, Loop):
        (body,), most = regions, node.max_steps
        return Loop(given, None, body, outputs, most, node.line, is_replayed=True)
    ways = tuple(regions)
    return Branch(node.kind, given, ways, outputs, node.line, is_replayed=True)


def with_regions(
    node: Branch | Loop, change: Callable[[Region], Region]
) -> Branch | Loop:
    """Return a branch or loop with each of its regions changed."""
    if isinstance(node, Branch):
        return replace(node, regions=tuple(map(change, node.regions)))
    condition = node.condition
    changed = None if condition is None else change(condition)
    return replace(node, condition=changed, body=change(node.body))
