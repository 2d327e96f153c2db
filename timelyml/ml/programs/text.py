"""A program as text, one line a node, and as a Mermaid flowchart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from timelyml.ml.functions import ArrayType, Spec
from timelyml.ml.programs.nodes import (
    Arg,
    Call,
    Constant,
    Node,
    Ref,
    Route,
    SliceNode,
    Transfer,
    Value,
)


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
    for index, node in enumerate(nodes):
        yield f"  %{index} = {_node_text(node, nodes)}"
    yield f"  result {_refs(results, nodes)}".rstrip()


def flowchart(
    slices: Sequence[SliceNode], nodes: Sequence[Node], results: Sequence[Ref]
) -> Iterator[str]:
    """Return the lines of a flowchart; slices are boxes around their nodes."""
    yield "flowchart LR"
    yield from (
        f"  {_box(index, node)}"
        for index, node in enumerate(nodes)
        if _home(node) is None
    )
    for number, each in enumerate(slices):
        yield f'  subgraph slice{number}["{_escaped(each.name)}<br/>{_slice_text(each)}"]'
        for index, node in enumerate(nodes):
            if _home(node) == each.name:
                yield f"    {_box(index, node)}"
        yield "  end"
    yield '  result(["result"])'
    for index, node in enumerate(nodes):
        for ref in dict.fromkeys(node.operands):
            yield f"  {_edge(ref, f'n{index}', node, nodes)}"
    for ref in dict.fromkeys(results):
        yield f"  {_edge(ref, 'result', None, nodes)}"


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
        case Transfer():
            who = {Route.PUT: "put"}.get(node.route, f"transfer {node.route}")
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


def _value_text(value: Value) -> str:
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


def _box(index: int, node: Node) -> str:
    match node:
        case Arg():
            return f'n{index}(["{_escaped(node.label)}"])'
        case Constant():
            return f'n{index}(["constant {node.value.type}"])'
        case Transfer():
            return f'n{index}{{{{"{node.route}"}}}}'
        case Call():
            return f'n{index}["{_escaped(node.computation.name)}"]'


def _edge(ref: Ref, target: str, node: Node | None, nodes: Sequence[Node]) -> str:
    value = nodes[ref.node].outputs[ref.output]
    is_donated = isinstance(node, Call) and ref in node.donated
    arrow = "-.->" if is_donated else "-->"
    return (
        f'n{ref.node} {arrow}|"{_escaped(type_text(value.type, value.spec))}"| {target}'
    )


def _escaped(text: str) -> str:
    # Mermaid has no backslash escapes; it reads HTML entities without the ampersand
    for character, code in (
        ("#", "#35;"),
        ('"', "#quot;"),
        ("<", "#lt;"),
        (">", "#gt;"),
    ):
        text = text.replace(character, code)
    return text
