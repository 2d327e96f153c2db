"""Tracing of the regions of branches and loops, and what has to hold of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from timelyml.errors import ConfigError, HandleError, TraceError
from timelyml.ml.functions import ArrayType, recorder, recording
from timelyml.ml.functions.blame import calling_line, name_of
from timelyml.ml.programs.nodes import Arg, Branch, Call, Loop, Ref, Region, Value
from timelyml.ml.programs.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Block:
    """A block that was traced.

    Attributes:
        who: What it is, for errors.
        recorder: What recorded it.
        region: Its nodes.
        entered: What it uses from around it, and what stands for that inside.
        tree: Of its results.
        values: What these are, and where they lie.
    """

    who: str
    recorder: Recorder
    region: Region
    entered: dict[Ref, Ref]
    tree: Any
    values: tuple[Value, ...]


class Tracing:
    """One branch or loop of the program that is being traced."""

    def __init__(self, kind: str) -> None:
        around = recorder()
        assert isinstance(around, Recorder)  # noqa: S101 - for the type
        self._around = around
        self._kind = kind
        self._line = calling_line()

    def loop(
        self,
        cond_fun: Callable[[Any], Any],
        body_fun: Callable[[Any], Any],
        init_val: Any,
        max_steps: int | None,
        checkpoint: bool = False,
    ) -> Any:
        """Record a loop; return what stands for its results."""
        leaves, tree = jax.tree.flatten(init_val)
        inits = tuple(map(self._operand, leaves))
        carried = tuple(map(self._around.value, inits))
        while True:
            body = self._trace("body", body_fun, tree, carried)
            self._check_carried(tree, carried, body)
            settled = self._settled(carried, body.values)
            if settled == carried:
                break
            carried = settled
        condition = self._trace("condition", cond_fun, tree, carried)
        self._check_condition(condition)
        captured = tuple(dict.fromkeys([*condition.entered, *body.entered]))
        node = Loop(
            (*inits, *captured),
            _with_captured(condition, captured, len(inits)),
            _with_captured(body, captured, len(inits)),
            carried,
            max_steps,
            self._line,
            is_checkpointed=checkpoint,
        )
        found = self._around.control(node, [condition.recorder, body.recorder])
        return jax.tree.unflatten(tree, found)

    def branch(
        self, chooser: Any, functions: Sequence[Callable[..., Any]], operands: Any
    ) -> Any:
        """Record a branch; return what stands for its results."""
        index = self._operand(chooser)
        self._check_chooser(self._around.value(index))
        leaves, tree = jax.tree.flatten(operands)
        given = tuple(map(self._operand, leaves))
        values = tuple(map(self._around.value, given))
        names = ("false", "true") if self._kind == "cond" else range(len(functions))
        blocks = [
            self.traced(f"branch {name}", function, tree, values)
            for name, function in zip(names, functions, strict=True)
        ]
        return self.joined(index, given, blocks)

    def traced(
        self,
        part: str,
        function: Callable[..., Any],
        tree: Any,
        values: Sequence[Value],
    ) -> Block:
        """Trace a branch that is given values of a tree, which is its arguments."""
        return self._trace(part, function, tree, values, is_args=True)

    def joined(
        self,
        index: Ref,
        given: Sequence[Ref],
        blocks: Sequence[Block],
        *,
        kind: str | None = None,
    ) -> Any:
        """Record a branch of blocks that were traced; return what stands for its results."""
        for block in blocks[1:]:
            self._check_alike(blocks[0], block)
        captured = tuple(dict.fromkeys(ref for each in blocks for ref in each.entered))
        node = Branch(
            kind or self._kind,
            (index, *given, *captured),
            tuple(_with_captured(each, captured, len(given)) for each in blocks),
            tuple(map(self._joined, *(each.values for each in blocks))),
            self._line,
        )
        found = self._around.control(node, [each.recorder for each in blocks])
        return jax.tree.unflatten(blocks[0].tree, found)

    def _trace(
        self,
        part: str,
        function: Callable[..., Any],
        tree: Any,
        values: Sequence[Value],
        *,
        is_args: bool = False,
    ) -> Block:
        if not callable(function):
            raise ConfigError(
                f"{self._kind}: {part} is no function; got {function!r}; expected one "
                f"that calls compiled functions; pass the function itself",
                option=part,
            )
        who = f"{part} {name_of(function)!r} of the {self._kind} at {self._line}"
        inner = self._around.inside(who)
        stands = [
            inner.stand_in(each, f"{'given' if is_args else 'carried'} {number}")
            for number, each in enumerate(values)
        ]
        given = jax.tree.unflatten(tree, stands)
        with recording(inner):
            result = function(*given) if is_args else function(given)
        leaves, result_tree = jax.tree.flatten(result)
        region = inner.region(leaves)
        found = tuple(map(inner.value, region.results))
        return Block(who, inner, region, inner.entered, result_tree, found)

    def _operand(self, leaf: Any) -> Ref:
        return self._around.operand(leaf, self._kind)

    def _settled(
        self, carried: Sequence[Value], returned: Sequence[Value]
    ) -> tuple[Value, ...]:
        """Where values are carried, if the body was traced for them being there."""
        found = []
        for before, after in zip(carried, returned, strict=True):
            of = after.type if before.type.is_weak else before.type
            if before.slice is not None:
                found.append(replace(before, type=of))
            elif after.slice is not None:
                found.append(replace(after, type=of))
            else:
                found.append(Value(of))
        if tuple(found) == tuple(carried):
            found = [self._on_a_slice(each) for each in found]
        return tuple(found)

    def _joined(self, *values: Value) -> Value:
        """Where the results of branches are brought: where the first has it on a slice."""
        of = next((each.type for each in values if not each.type.is_weak), None)
        there = next((each for each in values if each.slice is not None), values[0])
        return self._on_a_slice(replace(there, type=of or values[0].type))

    def _on_a_slice(self, value: Value) -> Value:
        """Put what nobody computes on the first slice that the program uses."""
        if value.slice is not None:
            return value
        slices = self._around.slices
        if not slices:
            raise TraceError(
                f"{self._kind} at {self._line} computes nothing; got blocks without calls "
                f"of compiled functions; expected at least one; compile them with ml.jit",
                function=self._kind,
                where=self._line,
            )
        return Value(value.type, (), next(iter(slices)))

    def _check_carried(self, tree: Any, carried: Sequence[Value], body: Block) -> None:
        if body.tree != tree:
            self._refuse(
                body.who, f"another tree than it is given; got {body.tree}", tree
            )
        for number, (before, after) in enumerate(
            zip(carried, body.values, strict=True)
        ):
            if not _same(before.type, after.type):
                path = _path(tree, number)
                self._refuse(
                    body.who, f"another type{path}; got {after.type}", before.type
                )

    def _check_condition(self, block: Block) -> None:
        types = [each.type for each in block.values]
        if len(types) != 1 or types[0].shape or types[0].dtype != "bool":
            self._refuse(block.who, f"no boolean; got {types}", "one bool[]")
        nodes = block.region.nodes
        for call in [each for each in nodes if isinstance(each, Call)]:
            if any(isinstance(nodes[ref.node], Arg) for ref in call.donated):
                raise HandleError(
                    f"{block.who} donates what is carried; got {call.computation.name!r} "
                    f"at {call.line}; expected no donation there, as the body needs it; "
                    f"donate it in the body",
                    program=self._kind,
                )

    def _check_chooser(self, value: Value) -> None:
        of = value.type
        is_number = of.key_impl is None and of.dtype != "bool"
        kinds = {"cond": True, "switch": is_number and "int" in of.dtype}
        if of.shape or of.key_impl is not None or not kinds[self._kind]:
            expected = {"cond": "bool[] or a number", "switch": "int32[]"}[self._kind]
            raise TraceError(
                f"{self._kind} at {self._line} cannot choose; got {of}; expected "
                f"{expected}; reduce it in a compiled function",
                function=self._kind,
                where=self._line,
            )

    def _check_alike(self, first: Block, other: Block) -> None:
        if other.tree != first.tree:
            what = f"another tree than {first.who} does; got {other.tree}"
            self._refuse(other.who, what, first.tree)
        pairs = zip(first.values, other.values, strict=True)
        for number, (one, another) in enumerate(pairs):
            if not _same(one.type, another.type):
                path = _path(first.tree, number)
                what = f"another type{path} than {first.who} does; got {another.type}"
                self._refuse(other.who, what, one.type)

    def _refuse(self, who: str, what: str, expected: Any) -> None:
        raise TraceError(
            f"{who} returns {what}; expected {expected}; results have to be alike, as "
            f"what uses them is compiled before it is known which it will be",
            function=self._kind,
            where=self._line,
        )


def _same(one: ArrayType, other: ArrayType) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _path(tree: Any, number: int) -> str:
    """Where a leaf is in a tree, for people."""
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    paths, _ = jax.tree.flatten_with_path(numbered)
    path = jax.tree_util.keystr(paths[number][0])
    return f" at {path}" if path else ""


def _with_captured(block: Block, captured: Sequence[Ref], num_given: int) -> Region:
    """Return a region whose captured operands are those of all regions together."""
    positions = {
        block.entered[ref]: num_given + number
        for number, ref in enumerate(captured)
        if ref in block.entered
    }
    return block.region.positioned(positions)
