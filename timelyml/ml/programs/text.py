"""A program as text, one line a node, and as a Mermaid flowchart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from timelyml.graph.mermaid import escaped
from timelyml.ml.functions import ArrayType, Spec
from timelyml.ml.programs.nodes import (
    TRAIL,
    Arg,
    Branch,
    Call,
    Constant,
    Control,
    Exchange,
    Loop,
    Node,
    Recalled,
    Ref,
    Region,
    Route,
    Transfer,
    Value,
)
from timelyml.ml.programs.places import SliceNode


def lines(
    name: str,
    slices: Sequence[SliceNode],
    nodes: Sequence[Node],
    results: Sequence[Ref],
) -> Iterator[str]:
    """Return a line for the program, one for each slice and node, one for results."""
    yield f"program {name}"
    for each in slices:
        yield f"  slice {each.name}: {_slice_text(each)}"
    yield from _node_lines(nodes, results, "result", "  ")


def _node_lines(
    nodes: Sequence[Node], results: Sequence[Ref], end: str, indent: str
) -> Iterator[str]:
    """Return a line for each node; regions stand under theirs, numbered anew."""
    for index, node in enumerate(nodes):
        yield f"{indent}%{index} = {_node_text(node, nodes)}"
        for name, region in _regions(node):
            yield f"{indent}  {name}:"
            yield from _node_lines(
                region.nodes, region.results, "give", f"{indent}    "
            )
    yield f"{indent}{end} {_refs(results, nodes)}".rstrip()


def _regions(node: Node) -> list[tuple[str, Region]]:
    """Return the regions of a node, with what they are called."""
    match node:
        case Loop(condition=None):
            return [("step", node.body)]
        case Loop():
            return list(zip(("while", "do"), node.regions, strict=True))
        case Branch(kind="cond"):
            return list(zip(("false", "true"), node.regions, strict=True))
        case Branch():
            return [(f"case {i}", each) for i, each in enumerate(node.regions)]
    return []


def flowchart(
    slices: Sequence[SliceNode], nodes: Sequence[Node], results: Sequence[Ref]
) -> Iterator[str]:
    """Return the lines of a flowchart; slices are boxes around their nodes."""
    yield "flowchart LR"
    yield from _boxes(slices, nodes, "n")
    yield '  result(["result"])'
    yield from _edges(nodes, results, "n", "result")


def _boxes(
    slices: Sequence[SliceNode], nodes: Sequence[Node], prefix: str
) -> Iterator[str]:
    """Return boxes of nodes: those of slices in theirs, regions in one of their own."""
    for index, node in enumerate(nodes):
        if _home(node) is None:
            yield f"  {_box(index, node, prefix)}"
        for number, (name, region) in enumerate(_regions(node)):
            inner = f"{prefix}{index}r{number}n"
            yield f'  subgraph {inner}s["{node.kind}: {name}"]'  # type: ignore[union-attr]  # it has regions
            yield from (f"  {line}" for line in _boxes(slices, region.nodes, inner))
            yield f'    {inner}give(["give"])'
            edges = _edges(region.nodes, region.results, inner, f"{inner}give")
            yield from (f"  {line}" for line in edges)
            yield "  end"
            yield f"  {prefix}{index} -.- {inner}s"
    for number, each in enumerate(slices):
        homes = [i for i, node in enumerate(nodes) if _home(node) == each.name]
        if not homes and prefix != "n":
            continue
        where = f"slice{number}" if prefix == "n" else f"{prefix}slice{number}"
        yield f'  subgraph {where}["{escaped(each.name)}<br/>{_slice_text(each)}"]'
        yield from (f"    {_box(index, nodes[index], prefix)}" for index in homes)
        yield "  end"


def _edges(
    nodes: Sequence[Node], results: Sequence[Ref], prefix: str, end: str
) -> Iterator[str]:
    for index, node in enumerate(nodes):
        for ref in dict.fromkeys(node.operands):
            yield f"  {_edge(ref, f'{prefix}{index}', node, nodes, prefix)}"
    for ref in dict.fromkeys(results):
        yield f"  {_edge(ref, end, None, nodes, prefix)}"


def type_text(array_type: ArrayType, spec: Spec | None) -> str:
    """Return a type with its sharding.

    >>> type_text(ArrayType((8, 4), "float32", 4), ("data",))
    "float32[8,4] over ('data',)"
    """
    return f"{array_type} over {spec}" if spec else str(array_type)


def _node_text(node: Node, nodes: Sequence[Node]) -> str:
    match node:
        case Arg():
            return f"arg {node.label}: {_value_text(node.value)}"
        case Constant():
            return f"constant {node.value.type}"
        case Recalled():
            return f"recalled {node.number}: {_value_text(node.value)}"
        case Transfer():
            who = {Route.PUT: "put"}.get(node.route, f"transfer {node.route}")
            if node.sparse is not None:
                who += " of rows back" if node.sparse.is_back else " of rows"
            return f"{who} {_ref(node.operand, nodes)}: {_value_text(node.value)}"
        case Call():
            count = node.computation.num_results
            found = [type_text(each.type, each.spec) for each in node.outputs[:count]]
            outputs = found[0] if len(found) == 1 else f"({', '.join(found)})"
            donated = set(node.computation.donated)
            operands = ", ".join(
                _ref(ref, nodes) + ("!" if i in donated else "")
                for i, ref in enumerate(node.operands)
            )
            name = node.computation.name
            return f"call {name}({operands}): {outputs} on {node.slice}"
    return _control_text(node, nodes)


def _control_text(node: Control, nodes: Sequence[Node]) -> str:
    outputs = ", ".join(map(_value_text, node.outputs))
    if isinstance(node, Exchange):
        by = _refs(node.matrix, nodes)
        return f"{node.kind} {_refs(node.rows, nodes)} by {by}: ({outputs})"
    most = getattr(node, "max_steps", None)
    bound = "" if most is None else f" at most {most} times"
    who = f"replay of {node.kind}" if node.is_replayed else node.kind
    return f"{who} {_refs(node.operands, nodes)}{bound}: ({outputs})"


def _value_text(value: Value) -> str:
    if value == TRAIL:
        return "trail"
    text = type_text(value.type, value.spec)
    return (
        f"{text} from the client" if value.slice is None else f"{text} on {value.slice}"
    )


def _slice_text(each: SliceNode) -> str:
    text = f"{each.mesh} on {each.platform}"
    if each.place is None:
        return text
    shards = each.place.shards_by_host
    if len(shards) > 4:
        hosts = f"{len(shards)} hosts"
    else:
        hosts = ", ".join(f"{host} x{len(own)}" for host, own in shards.items())
    return f"{text}, {each.place.island}: {hosts}"


def _refs(refs: Sequence[Ref], nodes: Sequence[Node]) -> str:
    return ", ".join(_ref(ref, nodes) for ref in refs)


def _ref(ref: Ref, nodes: Sequence[Node]) -> str:
    is_only = len(nodes[ref.node].outputs) == 1
    return f"%{ref.node}" if is_only else f"%{ref.node}.{ref.output}"


def _home(node: Node) -> str | None:
    return node.slice if isinstance(node, Call) else None


def _box(index: int, node: Node, prefix: str) -> str:
    name = f"{prefix}{index}"
    match node:
        case Arg():
            return f'{name}(["{escaped(node.label)}"])'
        case Constant():
            return f'{name}(["constant {node.value.type}"])'
        case Recalled():
            return f'{name}(["recalled {node.number}"])'
        case Transfer():
            return f'{name}{{{{"{node.route}"}}}}'
        case Call():
            return f'{name}["{escaped(node.computation.name)}"]'
        case Branch() | Loop() | Exchange():
            is_replayed = getattr(node, "is_replayed", False)
            who = f"replay of {node.kind}" if is_replayed else node.kind
            return f'{name}{{"{who}"}}'


def _edge(
    ref: Ref, target: str, node: Node | None, nodes: Sequence[Node], prefix: str
) -> str:
    value = nodes[ref.node].outputs[ref.output]
    is_donated = isinstance(node, Call) and ref in node.donated
    arrow = "-.->" if is_donated else "-->"
    return (
        f"{prefix}{ref.node} {arrow}"
        f'|"{escaped(type_text(value.type, value.spec))}"| {target}'
    )
