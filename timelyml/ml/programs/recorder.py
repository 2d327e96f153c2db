"""The recorder: turns the calls of a Python block into the nodes of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from timelyml.errors import HandleError, ProgramError, TraceError
from timelyml.ml.functions import ArrayType, TracedCall, logical_mesh, type_of
from timelyml.ml.functions.blame import calling_line
from timelyml.ml.functions.types import dtype_named
from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.nodes import (
    CONTROL,
    Arg,
    Branch,
    Call,
    Constant,
    Control,
    Loop,
    Node,
    Recalled,
    Ref,
    Region,
    Value,
)
from timelyml.ml.programs.placeholders import Placeholder
from timelyml.ml.programs.places import SliceNode


class Recorder:
    """Stands in for the client while a program, or a region of it, is traced.

    Args:
        name: Of the program, or what the region is.
        parent: Records what is around a region.

    Attributes:
        captured: Handles that the block uses and that are none of its arguments; they
            are operands of each call, after the arguments.
        entered: What a region uses of what is around it.
    """

    def __init__(self, name: str, parent: Recorder | None = None) -> None:
        self.name = name
        self.captured: list[Any] = []
        self.entered: dict[Ref, Ref] = {}
        self._parent = parent
        self._client: Any = None
        self._slices: dict[str, Any] = {}
        self._nodes: list[Node] = []
        self._num_args = 0
        self._is_done = False
        self._known: dict[int, tuple[Any, Ref]] = {}
        self._constants: dict[tuple[bytes, ArrayType], Ref] = {}
        self._donated: dict[Ref, str] = {}

    @property
    def client(self) -> Any:
        """The client of the slices seen so far; None if there were none.

        Raises:
            TraceError: The program is traced already, so its values are gone.
        """
        if self._is_done:
            is_region = self._parent is not None
            who = f"the {self.name}" if is_region else f"program {self.name!r}"
            after = "it" if is_region else "the program"
            raise TraceError(
                f"a value of {who} is used after {after} at {calling_line()}; got a "
                f"placeholder; expected its results; return what is needed later",
                function=self.name,
            )
        return self._client if self._parent is None else self._parent.client

    @property
    def slices(self) -> dict[str, Any]:
        """The slices that the whole program has used so far, by name."""
        return self._slices if self._parent is None else self._parent.slices

    def slice_of(self, value: Value) -> Any:
        """Return the slice that a value is on; None on the client."""
        return None if value.slice is None else self.slices[value.slice]

    def operand(self, leaf: Any, user: str) -> Ref:
        """Return the output that a value is, which a branch or loop is given.

        Raises:
            TraceError: It is no array.
            HandleError: It was donated.
        """
        try:
            array_type = type_of(leaf)
        except TypeError as error:
            raise TraceError(
                f"{user} at {calling_line()} is given what is no array; got a "
                f"{type(leaf).__name__}: {leaf!r}; expected arrays and trees of them; "
                f"let the blocks capture it",
                function=self.name,
            ) from error
        return self._operand(leaf, array_type, user)

    def value(self, ref: Ref) -> Value:
        """Return what an output is."""
        return self._nodes[ref.node].outputs[ref.output]

    def stand_in(
        self, value: Value, label: str, position: int | None = None
    ) -> Placeholder:
        """Add something that a region is given; return what stands for it.

        Args:
            value: What it is.
            label: What it is called.
            position: Among what the region is given; the next, if it is left out.
        """
        number = self._num_args if position is None else position
        index = self._add(Arg(number, label, value))
        self._num_args += 1
        return self._placeholder(Ref(index))

    def region(self, leaves: Sequence[Any]) -> Region:
        """Return the region with these results; nothing is recorded after.

        Raises:
            HandleError: A result was donated.
            TraceError: A result is no array.
        """
        results = tuple(self._result(leaf) for leaf in leaves)
        self._is_done = True
        return Region(tuple(self._nodes), results)

    def inside(self, name: str) -> Recorder:
        """Return what records a region of this program, or of this region."""
        return Recorder(name, self)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What was recorded so far."""
        return tuple(self._nodes)

    def repeat(self, node: Call, operands: Sequence[Ref]) -> list[Placeholder]:
        """Record a computation once more, of other operands; return all its outputs."""
        again = replace(node, operands=tuple(operands))
        self._donate(again)
        index = self._add(again)
        return [self._placeholder(Ref(index, i)) for i in range(len(again.outputs))]

    def recalled(self, number: int, value: Value) -> Placeholder:
        """Add what a run on the way there kept; return what stands for it."""
        return self._placeholder(Ref(self._add(Recalled(number, value))))

    def amend(self, index: int, node: Branch | Loop) -> None:
        """Put a branch or loop in place of the one at an index, of the same outputs."""
        self._nodes[index] = node

    def control(
        self, node: Control, regions: Sequence[Recorder] = ()
    ) -> list[Placeholder]:
        """Record what values decide; return what stands for its results.

        Args:
            node: A branch, a loop or an exchange of rows.
            regions: What recorded its regions, in their order, if that is known.
        """
        del regions  # nothing here asks for them again
        index = self._add(node)
        return [
            self._placeholder(Ref(index, each)) for each in range(len(node.outputs))
        ]

    def argument(self, leaf: Any, label: str) -> Placeholder:
        """Add an argument of the program; return what stands for it."""
        return self._placeholder(Ref(self._add_arg(leaf, label)))

    def call(self, call: TracedCall) -> Sequence[Any]:
        """Record a call of a compiled function; return what stands for its results."""
        self.use_slice(call.slice)
        line = call.line or calling_line()
        operands = tuple(
            self._operand(each, call.computation.in_types[i], call.computation.name)
            for i, each in enumerate(call.operands)
        )
        node = Call(call.computation, call.slice.name, operands, line, call.order)
        self._donate(node)
        index = self._add(node)
        count = call.computation.num_results
        return [self._placeholder(Ref(index, output)) for output in range(count)]

    def program(self, leaves: Sequence[Any], is_fusible: bool) -> Program:
        """Return the program with these results; nothing is recorded after.

        Raises:
            ProgramError: It calls nothing.
            HandleError: A result was donated.
            TraceError: A result is no array.
        """
        results = tuple(self._result(leaf) for leaf in leaves)
        self._is_done = True
        if not any(isinstance(node, (Call, *CONTROL)) for node in self._nodes):
            raise ProgramError(
                f"program {self.name!r} computes nothing; got a block without calls of "
                f"compiled functions; expected at least one; compile them with ml.jit",
                program=self.name,
            )
        slices = tuple(
            SliceNode(name, logical_mesh(each.mesh), each.platform)
            for name, each in self._slices.items()
        )
        return Program(
            self.name, slices, tuple(self._nodes), results, self._num_args, is_fusible
        )

    def _result(self, leaf: Any) -> Ref:
        try:
            array_type = type_of(leaf)
        except TypeError as error:
            raise TraceError(
                f"program {self.name!r} returns what is no array; got a "
                f"{type(leaf).__name__}: {leaf!r}; expected arrays and trees of them; "
                f"return it beside the program",
                function=self.name,
            ) from error
        return self._operand(leaf, array_type, "")

    def _operand(self, leaf: Any, array_type: ArrayType, user: str) -> Ref:
        """The output that a value is, which a function (or the result, "") uses."""
        if isinstance(leaf, Placeholder) and leaf.recorder is self:
            ref = leaf.ref
        elif self._parent is not None:
            ref = self._enter(self._parent._operand(leaf, array_type, user))  # noqa: SLF001 - of this class
        elif (known := self._known.get(id(leaf))) is not None:
            ref = known[1]
        elif isinstance(getattr(leaf, "type", None), ArrayType):
            self._check_captured(leaf)
            ref = Ref(self._add_arg(leaf, f"captured {len(self.captured)}"))
            self.captured.append(leaf)
            self._known[id(leaf)] = leaf, ref  # kept, so that its id stays its own
        else:
            return self._constant(leaf, array_type)
        if ref in self._donated:
            user = f"function {user!r}" if user else "the result"
            raise HandleError(
                f"program {self.name!r} uses a value after it was donated; got "
                f"{self._nodes[ref.node].outputs[ref.output].type} in {user} at "
                f"{calling_line()}, donated at {self._donated[ref]}; expected no use "
                f"after; donate it last, or do not",
                program=self.name,
            )
        return ref

    def _check_captured(self, leaf: Any) -> None:
        if isinstance(leaf, Placeholder):
            raise TraceError(
                f"program {self.name!r} uses a value of another program at "
                f"{calling_line()}; got {leaf!r}; expected its own; pass it in as "
                f"an argument, and out as a result",
                function=self.name,
            )

    def _enter(self, around: Ref) -> Ref:
        """Return what stands in this region for an output around it."""
        if around not in self.entered:
            assert self._parent is not None  # noqa: S101 - for the type
            value = self._parent.value(around)
            label = f"captured {len(self.entered)}"
            self.entered[around] = self.stand_in(value, label).ref
        return self.entered[around]

    def _constant(self, leaf: Any, array_type: ArrayType) -> Ref:
        if array_type.key_impl is None:
            host = np.asarray(leaf, dtype_named(array_type.dtype))
        else:
            host = np.asarray(jax.random.key_data(leaf))
        key = np.ascontiguousarray(host).tobytes(), array_type
        if key not in self._constants:  # by value: the array may change in between
            self._constants[key] = Ref(self._add(Constant(key[0], Value(array_type))))
        return self._constants[key]

    def _donate(self, node: Call) -> None:
        captured = {known for _, known in self._known.values()}
        captured.update(self.entered.values())
        for ref in node.donated:
            if self._nodes[ref.node].outputs[ref.output].slice is None:
                continue  # what the client sends is copied for each use
            if ref in captured:
                raise HandleError(
                    f"program {self.name!r} donates a value that it captured; got "
                    f"{node.computation.name!r} at {node.line}; expected an argument, as "
                    f"the value is gone at the next call; pass it in",
                    program=self.name,
                )
            if node.operands.count(ref) > 1:
                raise HandleError(
                    f"program {self.name!r} donates a value and uses it in the same "
                    f"call; got {node.computation.name!r} at {node.line}; expected it "
                    f"once among the arguments; copy it first",
                    program=self.name,
                )
            self._donated[ref] = node.line

    def _add_arg(self, leaf: Any, label: str) -> int:
        array_type = type_of(leaf)
        slice_ = getattr(leaf, "slice", None)
        if not isinstance(getattr(leaf, "type", None), ArrayType) or slice_ is None:
            value = Value(array_type)
        else:
            self.use_slice(slice_)
            value = Value(array_type, leaf.spec, slice_.name)
        position = self._num_args
        self._num_args += 1
        return self._add(Arg(position, label, value))

    def _add(self, node: Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _placeholder(self, ref: Ref) -> Placeholder:
        return Placeholder(self, ref, self.value(ref))

    def use_slice(self, slice_: Any) -> None:
        """Take note of a slice that the program uses.

        Raises:
            HandleError: It is of another client than those before.
        """
        if self._parent is not None:
            self._parent.use_slice(slice_)
            return
        if self._client is None:
            self._client = slice_.client
        if slice_.client is not self._client:
            raise HandleError(
                f"program {self.name!r} uses slices of two clients; got {slice_.name!r} "
                f"at {calling_line()}; expected those of one; publish values of the "
                f"other client and open them here",
                program=self.name,
            )
        self._slices.setdefault(slice_.name, slice_)
