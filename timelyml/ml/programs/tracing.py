"""`@ml.program`: a block of calls of compiled functions, traced into one program."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import jax

from timelyml.errors import ConfigError, HandleError, TimelyError, TraceError
from timelyml.ml.functions import ArrayType, recorder, recording, type_of
from timelyml.ml.functions.blame import name_of, trace_error
from timelyml.ml.functions.options import Arguments, Splitter, as_options
from timelyml.ml.functions.settings import settings_key
from timelyml.ml.programs.ir import Program
from timelyml.ml.programs.recorder import Recorder

DispatchName: TypeAlias = Literal["parallel", "sequential"]


class ProgramRunner(Protocol):
    """Who executes programs: the client of their slices."""

    def call_program(self, call: ProgramCall) -> Sequence[Any]:
        """Start a call; return a value, in order, for each result of the program."""


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """A call of a traced program, ready to be run.

    Attributes:
        client: Who runs it.
        operands: Arguments, flat, and captured handles: values on slices, or host
            values where the program says that they come from the client.
        out_tree: The structure of the results.
        dispatch: "parallel", or "sequential".
    """

    program: Program
    client: ProgramRunner
    operands: tuple[Any, ...]
    out_tree: Any
    dispatch: DispatchName = "parallel"

    def results(self, values: Iterable[Any]) -> Any:
        """Return what the program returns, of one value for each result."""
        return jax.tree.unflatten(self.out_tree, values)


@dataclass(frozen=True, slots=True)
class _Traced:
    program: Program
    client: ProgramRunner
    captured: tuple[Any, ...]
    out_tree: Any


class ProgramFunction:
    """A Python block that runs as one program; calling it starts it.

    It is traced once for each structure, types, shardings and slices of its arguments,
    values of static arguments, and settings of JAX. Called while another program is
    traced it becomes part of that.

    Attributes:
        function: The Python function.
        split: Tells its traced arguments from its static ones.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        fuse: bool,
        dispatch: DispatchName,
        static_argnums: int | Sequence[int] | None,
        static_argnames: str | Iterable[str] | None,
    ) -> None:
        options = as_options(
            static_argnums=static_argnums, static_argnames=static_argnames
        )
        self.function = function
        self.split = Splitter(function, options)
        self._fuse = fuse
        self._dispatch = dispatch
        self._static = static_argnums, static_argnames
        self._traced: dict[Any, _Traced] = {}
        functools.update_wrapper(self, function, updated=())

    @property
    def name(self) -> str:
        """The name of the function."""
        return name_of(self.function)

    def __repr__(self) -> str:
        return f"ProgramFunction({self.name!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Start the program; return its results, whose values may come later.

        Raises:
            TraceError: The block does what a program cannot, with the user's line.
            HandleError: A value belongs to another client, or is used after it was
                donated.
        """
        if recorder() is not None:
            return self.function(*args, **kwargs)
        call = self.trace_call(*args, **kwargs)
        return call.results(call.client.call_program(call))

    def trace_call(self, *args: Any, **kwargs: Any) -> ProgramCall:
        """Trace the program for these arguments, unless it was before.

        Raises:
            TraceError: As a call.
            HandleError: As a call.
        """
        split = self.split(args, kwargs)
        leaves, tree = jax.tree.flatten((split.args, split.kwargs))
        key = (
            tree,
            tuple(map(self._key_of, leaves)),
            split.static_args,
            split.static_kwargs,
            settings_key(),
        )
        traced = self._traced.get(key)
        if traced is None:
            traced = self._traced[key] = self._trace(split, leaves, tree)
        operands = (*leaves, *traced.captured)
        if traced.program.donated_args:
            self._check_donated(traced.program, operands)
        return ProgramCall(
            traced.program, traced.client, operands, traced.out_tree, self._dispatch
        )

    def derived(self, function: Callable[..., Any]) -> ProgramFunction:
        """Return another block with the same parameters, as a program like this one."""
        nums, names = self._static
        return ProgramFunction(
            function,
            fuse=self._fuse,
            dispatch=self._dispatch,
            static_argnums=nums,
            static_argnames=names,
        )

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """Return the program that a call with these arguments runs; run nothing."""
        return self.trace_call(*args, **kwargs).program

    def ir(self, *args: Any, **kwargs: Any) -> str:
        """Return that program as text."""
        return self.program(*args, **kwargs).ir()

    def _trace(self, split: Arguments, leaves: Sequence[Any], tree: Any) -> _Traced:
        found = Recorder(self.name)
        numbered = jax.tree.unflatten(tree, range(len(leaves)))
        paths, _ = jax.tree.flatten_with_path(numbered)
        stands = [
            found.argument(leaf, _label(self.function, path))
            for leaf, (path, _) in zip(leaves, paths, strict=True)
        ]
        args, kwargs = split.merge(*jax.tree.unflatten(tree, stands))
        try:
            with recording(found):
                result = self.function(*args, **kwargs)
        except TimelyError:
            raise
        except Exception as error:
            raise trace_error(self.name, error, "program") from error
        results, out_tree = jax.tree.flatten(result)
        client = found.client
        program = found.program(results, self._fuse)
        return _Traced(program, client, tuple(found.captured), out_tree)

    def _key_of(self, leaf: Any) -> tuple[Any, ...]:
        """What the program may depend on of an argument."""
        if isinstance(getattr(leaf, "type", None), ArrayType):
            slice_ = leaf.slice
            return leaf.type, leaf.spec, None if slice_ is None else slice_.name
        try:
            return type_of(leaf), None, None
        except TypeError as error:
            raise TraceError(
                f"program {self.name!r} is called with what is no array; got a "
                f"{type(leaf).__name__}: {leaf!r}; expected arrays and trees of them; "
                f"register its class with jax.tree_util, or make it a static argument",
                function=self.name,
            ) from error

    def _check_donated(self, program: Program, operands: Sequence[Any]) -> None:
        times = Counter(map(id, operands))
        for position in program.donated_args:
            if times[id(operands[position])] > 1:
                raise HandleError(
                    f"program {self.name!r} is given a value that it may destroy and "
                    f"another time; got {operands[position]!r}; expected it once, as it "
                    f"is donated; copy it first",
                    program=self.name,
                )


def program(
    function: Callable[..., Any] | None = None,
    *,
    fuse: bool = False,
    dispatch: DispatchName = "parallel",
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
) -> Any:
    """Trace a block of calls of compiled functions into one program.

    The block runs once, with values that only tell their types; the calls it makes
    become the nodes of a graph that is sent to the workers whole and run by one
    message. Its Python does not run again for arguments of the same types.

    Args:
        function: Calls functions made by `jit`, other programs, and Python that does
            not ask for values. Left out, a decorator is returned.
        fuse: Let neighbours on one slice become one computation, which changes floats
            in their last bits and saves launches.
        dispatch: "parallel": hosts prepare and launch a computation before those that
            it depends on are over. "sequential": each waits for the end of those; as
            other systems do it, for comparison.
        static_argnums: Positions of arguments that are no arrays.
        static_argnames: The same by name.

    Raises:
        ConfigError: `function` cannot be called, or an option is malformed.
    """
    if dispatch not in ("parallel", "sequential"):
        raise ConfigError(
            f"program: option 'dispatch' cannot work; got {dispatch!r}; expected "
            f"'parallel' or 'sequential'",
            option="dispatch",
        )

    def wrap(fun: Callable[..., Any]) -> ProgramFunction:
        if not callable(fun):
            raise ConfigError(
                f"program: not a function; got {fun!r}; expected one that calls "
                f"compiled functions; pass the function itself, not its result",
                option="function",
            )
        return ProgramFunction(
            fun,
            fuse=fuse,
            dispatch=dispatch,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )

    return wrap if function is None else wrap(function)


def alone(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that traces, in a program of its own if none is being traced."""
    if isinstance(recorder(), Recorder):
        return function(*args)
    function.__name__ = name
    whole = ProgramFunction(
        function,
        fuse=False,
        dispatch="parallel",
        static_argnums=None,
        static_argnames=None,
    )
    return whole(*args)


def _label(function: Callable[..., Any], path: Sequence[Any]) -> str:
    """What the user calls a leaf of the arguments: `state['weights']`."""
    kind, first, *rest = path
    code = getattr(inspect.unwrap(function), "__code__", None)
    names = getattr(code, "co_varnames", ())
    if getattr(kind, "idx", 0) == 0:
        position = first.idx
        name = names[position] if position < len(names) else f"argument {position}"
    else:
        name = first.key
    return f"{name}{jax.tree_util.keystr(tuple(rest))}"
