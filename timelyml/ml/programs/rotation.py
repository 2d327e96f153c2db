"""The pass that rotates loops: the condition of the next run is computed with this one.

A loop then has one region, so that a run of it is one message for each host, and what
tells whether to go on comes with the news that it is over.
"""

from __future__ import annotations

from dataclasses import replace

from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.nodes import Arg, Branch, Loop, Ref, Region, with_regions
from timelyml.ml.programs.rebuild import Rebuilder, with_operands


def rotate_loops(program: Program) -> Program:
    """Put the condition of each loop before it, and at the end of its body.

    Args:
        program: One with its transfers: all that regions are given is on slices.
    """
    rebuilder = Rebuilder(program)
    for index, node in enumerate(program.nodes):
        if not isinstance(node, Branch | Loop):
            rebuilder.keep(index)
            continue
        inner = with_regions(node, lambda region: _rotated(program, region))
        operands = tuple(map(rebuilder.now, node.operands))
        if isinstance(inner, Loop) and inner.condition is not None:
            (first,) = rebuilder.graft(inner.condition, dict(enumerate(operands)))
            body = _joined(program, inner, inner.condition)
            inner = replace(inner, condition=None, body=body)
            operands = (first, *operands)
        added = rebuilder.add(with_operands(inner, operands))
        for output in range(len(node.outputs)):
            rebuilder.move(Ref(index, output), Ref(added, output))
    return rebuilder.program()


def _rotated(program: Program, region: Region) -> Region:
    found = rotate_loops(program.inside(region))
    return Region(found.nodes, found.results)


def _joined(program: Program, loop: Loop, condition: Region) -> Region:
    """Return the body of a loop with the condition after it, whose result comes first."""
    body = loop.body
    rebuilder = Rebuilder(program.inside(body))
    given: dict[int, Ref] = {}
    for index, node in enumerate(body.nodes):
        rebuilder.keep(index)
        if isinstance(node, Arg):
            given[node.position] = rebuilder.now(Ref(index))
    results = tuple(map(rebuilder.now, body.results))
    given.update(enumerate(results[: len(loop.values)]))
    for node in condition.nodes:
        if isinstance(node, Arg) and node.position not in given:
            given[node.position] = Ref(rebuilder.add(node))
    (goes_on,) = rebuilder.graft(condition, given)
    return Region(tuple(rebuilder.nodes), (goes_on, *results))
