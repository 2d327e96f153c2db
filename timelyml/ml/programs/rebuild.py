"""Passes rewrite programs node by node; this keeps track of what became of each."""

from __future__ import annotations

from dataclasses import replace

from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.nodes import Call, Node, Ref, Transfer


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

    def keep(self, index: int) -> None:
        """Take over a node of the old program, its operands as they are called now."""
        node = self._program.nodes[index]
        match node:
            case Call():
                node = replace(node, operands=tuple(map(self.now, node.operands)))
            case Transfer():
                node = replace(node, operand=self.now(node.operand))
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
