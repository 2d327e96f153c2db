"""`ml.cond`, `ml.switch` and `ml.while_loop` per example: each row goes its own way.

Rows stay on their shards. Those that take a branch, or go on in a loop, are put side by
side as a ragged handle, so that functions run on as many rows as there are; whoever
wants them on other slices routes them there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from timelyml.errors import TraceError
from timelyml.ml.functions import ArrayType, JitFunction, jit, partition_spec, recorder
from timelyml.ml.functions.blame import name_of
from timelyml.ml.functions.ragged import Layout, Ragged, is_ragged
from timelyml.ml.functions.types import dtype_named
from timelyml.ml.programs import packing
from timelyml.ml.programs.batches import Batch
from timelyml.ml.programs.nodes import Value
from timelyml.ml.programs.recorder import Recorder
from timelyml.ml.programs.regions import Tracing
from timelyml.ml.programs.routing import (
    NUMBERS,
    on_slice,
    over,
    route,
    unroute,
)


def branch_by_row(
    kind: str, index: Any, branches: Sequence[Callable[..., Any]], operands: Any
) -> Any:
    """Record a switch of rows, or a "cond" of false and true; see `ml.switch`."""
    batch = Batch.of(kind, operands)
    is_flag = kind == "cond"
    what = "conditions" if is_flag else "indices"
    index = batch.numbers(kind, what, index, are_flags=is_flag)
    home = _home(batch, index, *branches)
    whole = over(home)
    choose = packing.chosen(len(branches), whole, is_flag=is_flag)
    found = _on_batch(batch, home, "choose", choose, index)(
        ((partition_spec(()), whole, whole, whole),) * len(branches)
    )
    names = ("false", "true") if is_flag else tuple(map(str, range(len(branches))))
    results, counts, orders, trees = [], [], [], []
    for number, (is_taken, count, order, rows) in enumerate(found):
        taken = _Rows(kind, batch, home, count)
        part, branch = f"branch {names[number]}", branches[number]
        result, tree = taken.branch(part, is_taken, branch, rows)
        results.append(tuple(result))
        trees.append(tree)
        counts.append(count)
        orders.append(order)
    _check_alike(batch.who, names, branches, trees, results)
    is_whole = batch.layout is not None or _is_even(batch, home)
    merge = on_slice(
        home,
        "merge",
        packing.merged(batch.num_rows, whole),
        whole if is_whole else None,
    )
    merged = merge(tuple(counts), tuple(orders), tuple(results))
    if batch.layout is not None:
        merged = [Ragged(each, batch.layout) for each in merged]
    return jax.tree.unflatten(trees[0], merged)


def loop_by_row(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    max_steps: int | None,
    *,
    checkpoint: bool,
) -> Any:
    """Record a loop of rows; see `ml.while_loop`."""
    batch = Batch.of("while_loop", init_val)
    home = _home(batch, None, cond_fun, body_fun)
    whole = over(home)
    counts, places, rows = _on_batch(batch, home, "start", packing.started)(whole)
    retire = on_slice(
        home,
        "retire",
        packing.retired(whole),
        (partition_spec(()), whole, whole, whole, whole),
    )

    def after(counts: Any, places: Any, rows: Sequence[Any], done: Any) -> Any:
        """Take out the rows that are done; whether any go on comes first."""
        going = _Rows("while_loop", batch, home, counts)
        goes_on = going.decided(cond_fun, rows)
        return tuple(retire(counts, places, goes_on, tuple(rows), done))

    def body(carried: Any) -> Any:
        _, counts, places, rows, done = carried
        going = _Rows("while_loop", batch, home, counts)
        return after(counts, places, going.stepped(body_fun, rows), done)

    carried = after(counts, places, rows, rows)
    tracing = Tracing("while_loop")
    carried = tracing.loop(
        lambda carried: carried[0], body, carried, max_steps, checkpoint
    )
    done = carried[-1]
    if batch.layout is None:
        take = packing.taken(batch.num_rows)
        sharding = whole if _is_even(batch, home) else None
        done = on_slice(home, "take", take, sharding)(*done)
    return batch.back(done, batch.layout)


class _Rows:
    """Rows of a batch that go one way, side by side on their shards."""

    def __init__(self, kind: str, batch: Batch, home: Any, counts: Any) -> None:
        self._kind = kind
        self._batch = batch
        self._home = home
        num_shards = home.mesh.size
        num_rows = packing.padded(batch.num_rows, num_shards)
        self._layout = Layout(
            counts, None, (), None, next(NUMBERS), num_rows, num_shards
        )

    def decided(self, function: Callable[..., Any], rows: Sequence[Any]) -> Any:
        """Return what a condition says of each row."""
        found, _ = self._flat("condition", function, (self._given(rows),))
        types = [each.type for each in found]
        if len(types) != 1 or types[0].dtype != "bool" or len(types[0].shape) != 1:
            self._refuse("condition", function, f"{types}", "one boolean for each row")
        return found[0]

    def stepped(self, function: Callable[..., Any], rows: Sequence[Any]) -> list[Any]:
        """Return the rows after a run of a loop."""
        given = self._given(rows)
        found, tree = self._flat("body", function, (given,))
        types = [(each.type.shape, each.type.dtype) for each in found]
        before = [(each.type.shape, each.type.dtype) for each in rows]
        if tree != self._batch.tree or types != before:
            got = f"{tree} of {[each.type for each in found]}"
            expected = f"{self._batch.tree} of {[each.type for each in rows]}"
            self._refuse("body", function, got, expected)
        return found

    def branch(
        self,
        part: str,
        is_taken: Any,
        function: Callable[..., Any],
        rows: Sequence[Any],
    ) -> tuple[list[Any], Any]:
        """Return the rows after a branch, which is not taken if there are none.

        Returns:
            Rows, flat, and the structure of what the branch returns.
        """
        trees = []
        if isinstance(function, JitFunction) and function.slice is not self._home:
            function = _there(function, self._home)

        def run(*given: Any) -> list[Any]:
            found, tree = self._flat(part, function, given)
            trees.append(tree)
            return found

        around = recorder()
        assert isinstance(around, Recorder)  # noqa: S101 - for the type
        tracing = Tracing(self._kind)
        leaves, tree = jax.tree.flatten(self._given(rows))
        refs = [around.operand(each, self._kind) for each in leaves]
        values = [around.value(each) for each in refs]
        taken = tracing.traced(part, run, tree, values)
        none = tracing.traced(
            f"{part}, of no rows", lambda *_: self._zeros(taken.values), tree, values
        )
        chooser = around.operand(is_taken, self._kind)
        return tracing.joined(chooser, refs, [none, taken], kind="cond"), trees[0]

    def _given(self, rows: Sequence[Any]) -> Any:
        return self._batch.back(rows, self._layout)

    def _zeros(self, values: Sequence[Value]) -> list[Any]:
        shapes = [(each.type.shape, dtype_named(each.type.dtype)) for each in values]
        zeros = on_slice(
            self._home,
            "no_rows",
            lambda: tuple(jnp.zeros(*each) for each in shapes),
            over(self._home),
        )
        return list(zeros())

    def _flat(
        self, part: str, function: Callable[..., Any], given: Sequence[Any]
    ) -> tuple[list[Any], Any]:
        """Call a function on rows; return those that it returns, and their structure."""
        found, tree = jax.tree.flatten(function(*given), is_leaf=is_ragged)
        number = self._layout.number
        if not all(is_ragged(x) and x.layout.number == number for x in found):
            got = f"{found!r:.300}"
            self._refuse(part, function, got, "rows of those that it is given")
        return [each.rows for each in found], tree

    def _refuse(
        self, part: str, function: Callable[..., Any], got: str, expected: str
    ) -> None:
        raise TraceError(
            f"{part} {name_of(function)!r} of the {self._batch.who} returns what does not "
            f"go with its rows; got {got}; expected {expected}; call compiled functions "
            f"on the rows, and bring those back that it routes elsewhere",
            function=self._kind,
        )


def _there(function: JitFunction, home: Any) -> Callable[..., Any]:
    """Return a function of another slice that gets its rows there, spread evenly."""
    num_shards, num_targets = home.mesh.size, function.slice.mesh.size
    names = tuple(home.mesh.axis_names)

    def spread(rows: Any) -> Any:
        first = jax.lax.axis_index(names) * num_targets // num_shards
        return ((jnp.arange(rows.shape[0]) + first) % num_targets).astype(jnp.int32)

    def run(*given: Any) -> Any:
        some = next(filter(is_ragged, jax.tree.leaves(given, is_leaf=is_ragged)))
        destinations = jit(spread, slice=home)(some)
        return unroute(function(*route(given, destinations, function.slice)))

    run.__name__ = function.name
    return run


def _on_batch(
    batch: Batch, home: Any, name: str, function: Callable[..., Any], *more: Any
) -> Callable[[Any], Any]:
    """Return what calls a function of counts and rows, given how its results are cut."""
    operands = (*more, *batch.leaves)

    def call(shardings: Any) -> Any:
        if batch.layout is not None:
            run = on_slice(home, name, function, shardings)
            return run(batch.layout.counts, *operands)
        enter = packing.entered(home.mesh.size)

        def on_plain(*rows: jax.Array) -> Any:
            counts, padded = enter(*rows)
            return function(counts, *padded)

        return on_slice(home, name, on_plain, shardings)(*operands)

    return call


def _home(batch: Batch, index: Any, *functions: Any) -> Any:
    """Return the slice where rows are, or the first that is named if that is nowhere."""
    around = recorder()
    assert isinstance(around, Recorder)  # noqa: S101 - for the type
    candidates = [batch.slice, getattr(index, "slice", None)]
    candidates += [x.slice for x in functions if isinstance(x, JitFunction)]
    candidates += around.slices.values()
    found = next((each for each in candidates if each is not None), None)
    if found is None:
        raise TraceError(
            f"{batch.who} cannot tell where to run; got rows of the client; expected some "
            f"on a slice; put them on one",
            function="per_example",
        )
    return found


def _is_even(batch: Batch, home: Any) -> bool:
    return packing.padded(batch.num_rows, home.mesh.size) == batch.num_rows


def _check_alike(
    who: str,
    names: Sequence[str],
    branches: Sequence[Callable[..., Any]],
    trees: Sequence[Any],
    results: Sequence[Sequence[Any]],
) -> None:
    types = [[_alike(each.type) for each in rows] for rows in results]
    for number, (tree, of) in enumerate(zip(trees, types, strict=True)):
        if tree != trees[0] or of != types[0]:
            raise TraceError(
                f"branch {names[number]} {name_of(branches[number])!r} of the {who} "
                f"returns other rows than branch {names[0]} {name_of(branches[0])!r} "
                f"does; got {tree} of {of}; expected {trees[0]} of {types[0]}; results "
                f"have to be alike",
                function=who.split(maxsplit=1)[0],
            )


def _alike(of: ArrayType) -> tuple[tuple[int, ...], str]:
    return of.shape[1:], of.dtype
