"""The intermediate representation of programs: a list of nodes, from arguments to results.

What tracing makes names slices and no devices; passes put places in and turn nodes into
others, always from one whole `Program` to another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from timelyml.errors import ProgramError
from timelyml.ml.programs.nodes import (
    CONTROL,
    Arg,
    Branch,
    Call,
    Constant,
    Loop,
    Node,
    Ref,
    Region,
    Value,
)
from timelyml.ml.programs.places import SliceNode
from timelyml.ml.programs.text import flowchart, lines


@dataclass(frozen=True)  # no slots: its identity is kept once it is known
class Program:
    """A graph of computations on slices; nodes stand after those they use.

    Attributes:
        slices: Those that nodes name.
        results: Flat, in the order in which the user sees them.
        num_args: Operands that a call brings, captured handles included.
        is_fusible: Whether the user allows neighbours to become one computation.
    """

    name: str
    slices: tuple[SliceNode, ...]
    nodes: tuple[Node, ...]
    results: tuple[Ref, ...]
    num_args: int
    is_fusible: bool = False

    def __post_init__(self) -> None:
        names = {each.name for each in self.slices}
        counts = [len(node.outputs) for node in self.nodes]
        for index, node in enumerate(self.nodes):
            self._check(node.operands, counts[:index], f"node {index}")
            unknown = {each.slice for each in node.outputs} - names - {None}
            if unknown:
                raise ProgramError(
                    f"program {self.name!r} names a slice that it does not list; got "
                    f"{sorted(map(str, unknown))}; expected one of {sorted(names)}",
                    program=self.name,
                )
        self._check(self.results, counts, "its result")

    def _check(self, refs: Sequence[Ref], counts: Sequence[int], who: str) -> None:
        for ref in refs:
            is_there = 0 <= ref.node < len(counts) and ref.output < counts[ref.node]
            if not is_there:
                raise ProgramError(
                    f"program {self.name!r} is out of order: {who} uses what is not "
                    f"before it; got {tuple(ref)}; expected an output of an earlier node",
                    program=self.name,
                )

    def value(self, ref: Ref) -> Value:
        """Return what an output is."""
        return self.nodes[ref.node].outputs[ref.output]

    def slice_named(self, name: str) -> SliceNode:
        """Return a slice by its name."""
        return next(each for each in self.slices if each.name == name)

    def calls(self) -> Iterator[tuple[int, Call]]:
        """Return the computations, with the index of their node."""
        for index, node in enumerate(self.nodes):
            if isinstance(node, Call):
                yield index, node

    @property
    def is_regular(self) -> bool:
        """Whether all that it runs is known before it runs."""
        return not any(isinstance(node, CONTROL) for node in self.nodes)

    def all_calls(self) -> Iterator[Call]:
        """Return the computations, also those in the regions of branches and loops."""
        yield from _calls_in(self.nodes)

    def inside(self, region: Region) -> Program:
        """Return a region as a program, so that passes can be done on it."""
        return replace(self, nodes=region.nodes, results=region.results)

    @cached_property
    def donated_args(self) -> frozenset[int]:
        """The positions of operands that are dead once the program was called."""
        args = {
            Ref(index): node.position
            for index, node in enumerate(self.nodes)
            if isinstance(node, Arg) and node.value.slice is not None
        }
        donated = {ref for _, call in self.calls() for ref in call.donated}
        return frozenset(args[ref] for ref in donated if ref in args)

    @cached_property
    def identity(self) -> str:
        """A digest: programs with the same one do the same on the same slices."""
        digest = hashlib.sha256(self.pattern.encode())
        digest.update(repr(self.slices).encode())
        return digest.hexdigest()

    @cached_property
    def pattern(self) -> str:
        """A digest: programs with the same one do the same on slices of their own.

        These have the same meshes, and are named in the order in which they are listed.
        """
        slots = {each.name: f"slot {i}" for i, each in enumerate(self.slices)}
        slices = [SliceNode("", each.mesh, each.platform) for each in self.slices]
        text = "\n".join(lines(self.name, slices, self.nodes, self.results))
        if slots:
            names = "|".join(map(re.escape, sorted(slots, key=len, reverse=True)))
            named = re.compile(rf"(?<![\w-])(?:{names})(?![\w-])")
            text = named.sub(lambda found: slots[found.group()], text)
        digest = hashlib.sha256(text.encode())
        for call in self.all_calls():
            digest.update(f"{call.computation.identity} {call.order}".encode())
        for node in self.nodes:
            if isinstance(node, Constant):
                digest.update(node.data)
        digest.update(repr(self.is_fusible).encode())
        return digest.hexdigest()

    def ir(self) -> str:
        """Return the program as text, one line a node."""
        return "\n".join(lines(self.name, self.slices, self.nodes, self.results))

    def mermaid(self) -> str:
        """Return the source of a Mermaid flowchart, one box a node."""
        return "\n".join(flowchart(self.slices, self.nodes, self.results))


def _calls_in(nodes: Sequence[Node]) -> Iterator[Call]:
    for node in nodes:
        if isinstance(node, Call):
            yield node
        elif isinstance(node, Branch | Loop):
            for region in node.regions:
                yield from _calls_in(region.nodes)
