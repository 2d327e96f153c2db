"""Passes rewrite programs node by node; this keeps track of what became of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.nodes import (
    Arg,
    Branch,
    Call,
    Exchange,
    Loop,
    Node,
    Ref,
    Region,
    Transfer,
)


class Rebuilder:
    """Collects the nodes of a new program, and where outputs of the old one went."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._moved: dict[Ref, Ref] = {}
        self.nodes: list[Node] = []

    def add(self, node: Node) -> int:
        """Add a node of the new program; return its index."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def graft(self, region: Region, given: Mapping[int, Ref]) -> tuple[Ref, ...]:
        """Add the nodes of a region; return what its results are now.

        Args:
            region: Of any program.
            given: What each of its operands is in the new program, by position.
        """
        inner = Rebuilder(self._program.inside(region))
        inner.nodes = self.nodes
        for index, node in enumerate(region.nodes):
            if isinstance(node, Arg):
                inner.move(Ref(index), given[node.position])
            else:
                inner.keep(index)
        return tuple(map(inner.now, region.results))

    def keep(self, index: int) -> None:
        """Take over a node of the old program, its operands as they are called now."""
        node = self._program.nodes[index]
        node = with_operands(node, tuple(map(self.now, node.operands)))
        added = self.add(node)
        for output in range(len(node.outputs)):
            self.move(Ref(index, output), Ref(added, output))

    def move(self, old: Ref, new: Ref) -> None:
        """Note that an output of the old program is this one of the new."""
        self._moved[old] = new

    def now(self, old: Ref) -> Ref:
        """Return what an output of the old program is in the new one."""
        return self._moved[old]

    def program(self) -> Program:
        """Return the new program."""
        results = tuple(map(self.now, self._program.results))
        return replace(self._program, nodes=tuple(self.nodes), results=results)


def with_operands(node: Node, operands: Sequence[Ref]) -> Node:
    """Return a node that uses other outputs."""
    match node:
        case Call() | Branch() | Loop() | Exchange():
            return replace(node, operands=tuple(operands))
        case Transfer():
            return replace(node, operand=operands[0])
    return node
