"""`JitFunction`: what `ml.jit` returns, traced here and run by whoever is there to.

The tracing side knows nothing of workers. A function belongs to a slice, a slice to a
client, and a client is a `Runner`; while a program is traced, its recorder is the
runner. Both are given a `TracedCall` and return one value for each result.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from timelyml.errors import ConfigError, HandleError, TraceError
from timelyml.ml.functions.again import Again, are_of, is_flat
from timelyml.ml.functions.blame import name_of
from timelyml.ml.functions.calls import SliceLike, TracedCall, recorder
from timelyml.ml.functions.computation import ArrayType
from timelyml.ml.functions.on_rows import OnRows, same_counts
from timelyml.ml.functions.options import Arguments, Options, Splitter, as_options
from timelyml.ml.functions.ragged import has_ragged
from timelyml.ml.functions.settings import current_settings, settings_key
from timelyml.ml.functions.specs import logical_mesh
from timelyml.ml.functions.stages import LoweredFunction, TracedFunction
from timelyml.ml.functions.tracing import Traced, trace
from timelyml.ml.functions.types import type_of
from timelyml.progress import new_tuple


class JitFunction:
    """A function compiled for a slice; calling it runs it there.

    It is traced once for each structure, types and shardings of its arguments, values
    of static arguments, and settings of JAX.

    Attributes:
        function: The Python function.
        slice: Where it runs.
        options: As given to `jit`.
    """

    def __init__(
        self, function: Callable[..., Any], slice_: SliceLike, options: Options
    ) -> None:
        self.function = function
        self.slice = slice_
        self.options = options
        self._split = Splitter(function, options)
        self._traced: dict[Any, Traced] = {}
        self._on_rows: dict[Any, JitFunction] = {}
        self._again: Again | None = None
        functools.update_wrapper(self, function, updated=())

    @property
    def name(self) -> str:
        """The name of the function."""
        return name_of(self.function)

    def __repr__(self) -> str:
        return f"JitFunction({self.name!r} on {self.slice.name!r})"

    def on(self, slice_: SliceLike) -> JitFunction:
        """Return the function on another slice.

        If that has the same mesh and kind of device, what was traced is shared, from
        now on too.
        """
        other = JitFunction(self.function, slice_, self.options)
        alike = (
            slice_.mesh == self.slice.mesh and slice_.platform == self.slice.platform
        )
        if alike:
            other._traced = self._traced
        return other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Start the function; return its results, whose values may come later.

        Raises:
            TraceError: It cannot be traced for these arguments.
            HandleError: An argument belongs to another client.
        """
        return self._start(self.trace_call(*args, **kwargs))

    def in_order(self, order: int, *args: Any, **kwargs: Any) -> Any:
        """Start the function after all that was started on its slice with the same number.

        A call by itself is launched once what makes its arguments is, perhaps before one
        that was started earlier and waits for another slice. One in an order waits for
        the one before it too, until that is launched or will never be.

        Args:
            order: From 1 on.
            *args: As of a call.
            **kwargs: As of a call.

        Raises:
            TraceError: As of a call.
            HandleError: As of a call.
        """
        return self._start(self.trace_call(*args, **kwargs)._replace(order=order))

    def trace(self, *args: Any, **kwargs: Any) -> TracedFunction:
        """Trace the function, and start nothing.

        Args:
            *args: As of a call; of arrays also what only has their types, as
                `jax.ShapeDtypeStruct`.
            **kwargs: The same by name.

        Raises:
            TraceError: As of a call.
        """
        return TracedFunction(self, self.trace_call(*args, **kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> LoweredFunction:
        """Trace and lower the function, as `trace` does; both are one step here.

        Raises:
            TraceError: As of a call.
        """
        return self.trace(*args, **kwargs).lower()

    def _start(self, call: TracedCall) -> Any:
        runner = recorder() or self.slice.client
        return call.results(runner.call(call))

    def trace_call(self, *args: Any, **kwargs: Any) -> TracedCall:
        """Trace the function for these arguments, unless it was before.

        Raises:
            TraceError: It cannot be traced for these arguments.
            HandleError: An argument belongs to another client.
            ConfigError: A sharding does not fit the slice or an argument.
        """
        settings, again = settings_key(), self._again
        if again is not None:
            found = again.operands(args, kwargs, settings)
            if found is not None:
                return self._call_of(again.traced, tuple(found))
        static: Any = ()
        if self._split.has_static:
            split = self._split(args, kwargs)
            static = split.static_args, split.static_kwargs
            leaves, tree = jax.tree.flatten((split.args, split.kwargs))
        else:  # splitting would cost a tenth of the call
            leaves, tree = jax.tree.flatten((args, kwargs))
        types = tuple([self._type_of(each) for each in leaves])
        specs = tuple([getattr(each, "spec", None) for each in leaves])
        key = tree, types, specs, static, settings
        try:
            traced = self._traced.get(key)
        except TypeError as error:
            raise TraceError(
                f"function {self.name!r} has a static argument that cannot be hashed; "
                f"got {static!r}; expected values such as numbers, strings and tuples; "
                f"make it hashable, or an array",
                function=self.name,
            ) from error
        if traced is None:
            if has_ragged((args, kwargs)):
                return self._on_ragged(self._split(args, kwargs))
            traced = self._trace(args, kwargs)
            self._traced[key] = traced
        operands = tuple([leaves[each] for each in traced.used])
        client = self.slice.client
        if not self._split.has_static and are_of(leaves, client):
            tree = None if not kwargs and is_flat(args, leaves) else tree
            self._again = Again(traced, leaves, tree, client=client, settings=settings)
        return self._call_of(traced, operands)

    def _call_of(self, traced: Traced, operands: tuple[Any, ...]) -> TracedCall:
        donated = traced.computation.donated
        if donated and len(set(map(id, operands))) < len(operands):
            self._check_donated(donated, operands)
        fields = (
            traced.computation, self.slice, operands, traced.out_tree, traced.flat,
            "", None, 0,
        )  # fmt: skip
        call: TracedCall = new_tuple(TracedCall, fields)
        return call

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        return trace(
            self.function,
            args,
            kwargs,
            mesh=logical_mesh(self.slice.mesh),
            settings=current_settings(),
            options=self.options,
            platform=self.slice.platform,
        )

    def _on_ragged(self, split: Arguments) -> TracedCall:
        """Trace the function to run shard by shard, on the rows that each has."""
        on_rows = OnRows(
            self.function,
            split,
            self.options,
            logical_mesh(self.slice.mesh),
            self.slice,
        )
        inner = self._on_rows.get(on_rows.key)
        if inner is None:
            inner = JitFunction(on_rows.function(), self.slice, on_rows.options())
            self._on_rows[on_rows.key] = inner
        counts = on_rows.counts
        if len(counts) > 1:  # of several calls, or brought along by a loop
            counts = [JitFunction(same_counts, self.slice, Options())(*counts)]
        call = inner.trace_call(*counts, *on_rows.operands)
        return call._replace(layout=on_rows.layout)

    def _check_donated(self, donated: Sequence[int], leaves: Sequence[Any]) -> None:
        times = Counter(map(id, leaves))
        for position in donated:
            is_on_slice = getattr(leaves[position], "slice", None) is not None
            if is_on_slice and times[id(leaves[position])] > 1:
                raise HandleError(
                    f"function {self.name!r} is given a value that it may destroy and "
                    f"another time; got {leaves[position]!r} {times[id(leaves[position])]} "
                    f"times; expected once, as it is donated; copy it first",
                    function=self.name,
                )

    def _type_of(self, leaf: Any) -> ArrayType:
        if isinstance(getattr(leaf, "type", None), ArrayType):
            if leaf.client is not None and leaf.client is not self.slice.client:
                raise HandleError(
                    f"function {self.name!r} is called with a value of another client; "
                    f"got {leaf!r}; expected one of its own client; publish it there "
                    f"and open it here",
                    function=self.name,
                )
            return leaf.type  # type: ignore[no-any-return]  # checked above
        if isinstance(leaf, jax.core.Tracer):
            raise TraceError(
                f"function {self.name!r} is called while JAX traces another function; "
                f"got {leaf!r}; expected an array; call its `function` there, or "
                f"return from the other one first",
                function=self.name,
            )
        try:
            return type_of(leaf)
        except TypeError as error:
            raise TraceError(
                f"function {self.name!r} is called with what is no array; got a "
                f"{type(leaf).__name__}: {leaf!r}; expected arrays and trees of them; "
                f"register its class with jax.tree_util, or make it a static argument",
                function=self.name,
            ) from error


def jit(
    function: Callable[..., Any] | None = None,
    *,
    slice: SliceLike,  # noqa: A002 - what users call it
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    deadline_s: float | None = None,
) -> Any:
    """Compile a function for a slice, as `jax.jit` does for local devices.

    Args:
        function: A pure function of arrays and trees of arrays. Left out, a decorator
            is returned.
        slice: Where it runs, and whose mesh its shardings speak of.
        in_shardings: Of the arguments; left open, those that they have, and for host
            arrays what XLA chooses.
        out_shardings: Of the results; left open, what XLA chooses.
        static_argnums: Positions of arguments that are no arrays; each value of them is
            traced anew.
        static_argnames: The same by name.
        donate_argnums: Positions of arguments whose memory the results may take.
        donate_argnames: The same by name.
        deadline_s: How long one call may run on its devices; None: as long as it takes.
            One that runs longer raises `DeadlineError`, and its worker is ended: values
            that are there are carried over, and the island forms anew.

    Raises:
        ConfigError: `function` cannot be called, `slice` is none, or an option is
            malformed.
    """
    if not isinstance(getattr(slice, "mesh", None), jax.sharding.AbstractMesh):
        raise ConfigError(
            f"jit: no slice to run on; got {slice!r}; expected one that a client gave; "
            f"write slice=client.slice(...)",
            option="slice",
        )
    options = as_options(
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        deadline_s=deadline_s,
    )
    if function is None:
        return lambda fun: JitFunction(_callable(fun), slice, options)
    return JitFunction(_callable(function), slice, options)


def _callable(function: Any) -> Callable[..., Any]:
    if not callable(function) or isinstance(function, JitFunction):
        raise ConfigError(
            f"jit: not a function; got {function!r}; expected a callable of arrays; "
            f"pass the function itself, not its result",
            option="function",
        )
    return function  # type: ignore[no-any-return]  # an Any that can be called
