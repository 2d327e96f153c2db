"""`ml.while_loop`, `ml.cond` and `ml.switch`: control flow by values on slices.

They are called as those of `jax.lax`, on blocks of calls of compiled functions in place
of JAX code. What they decide by is known only when the program runs, to the workers.
Blocks are traced once, with what is carried or given standing where it will stand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from timelyml.errors import ConfigError
from timelyml.ml.programs.by_row import branch_by_row, loop_by_row
from timelyml.ml.programs.counts import as_count, listed
from timelyml.ml.programs.regions import Tracing
from timelyml.ml.programs.tracing import alone


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    max_steps: int | None = None,
    checkpoint: bool = False,
    per_example: bool = False,
) -> Any:
    """Call `body_fun` on what it returned before, as long as `cond_fun` of that is true.

    Both are blocks as those of `ml.program`: calls of compiled functions, on any slices,
    of what is carried and of anything around them. The condition is read where it is
    computed. What is carried lies where `init_val` does, and host values of that where
    the body leaves them.

    Args:
        cond_fun: Returns a boolean without dimensions.
        body_fun: Returns a tree like `init_val`, of the same shapes and types. It may
            donate what it is given: memory that nobody else uses is taken in place.
        init_val: Handles, arrays and trees of them.
        max_steps: A loop that is not over by then fails; None: there is no bound, and no
            gradient.
        checkpoint: For a gradient keep of each run only what is carried into it, and
            what branches and loops within decided and returned; all else is computed
            again on the way back, by the same executables. Those within do likewise.
        per_example: What is carried are rows, each of which leaves the loop when the
            condition is false for it. Both functions are given ragged handles of those
            that are left, and the condition returns a boolean for each.

    Returns:
        What was carried last; of rows, in their order.

    Raises:
        TraceError: A block cannot be traced, or does not return what it has to.
        ConfigError: `max_steps` is no count.

    Source:
        `jax.lax.while_loop`; `max_steps` as of equinox, but reaching it is an error;
        `checkpoint` as `jax.checkpoint` of the body. `per_example` is what `jax.vmap` of
        one computes, where rows that are done are computed with the others until the
        last one is.
    """
    most = as_count("while_loop", "max_steps", max_steps, 0)
    if not isinstance(checkpoint, bool):
        raise ConfigError(
            f"while_loop: option 'checkpoint' cannot work; got {checkpoint!r}; expected "
            f"True or False",
            option="checkpoint",
        )

    def loop(init_val: Any) -> Any:
        if per_example:
            return loop_by_row(
                cond_fun, body_fun, init_val, most, checkpoint=checkpoint
            )
        tracing = Tracing("while_loop")
        return tracing.loop(cond_fun, body_fun, init_val, most, checkpoint)

    return alone("while_loop", loop, init_val)


def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    per_example: bool = False,
) -> Any:
    """Call one of two blocks, by a value that is read where it is.

    Args:
        pred: A boolean without dimensions, or a number that is compared with zero.
        true_fun: A block, as of `while_loop`, of the operands.
        false_fun: Another, which returns the same shapes and types.
        *operands: Handles, arrays and trees of them.
        per_example: There is a `pred` for each row of the operands, and each row takes
            its own block, as of `switch`.

    Raises:
        TraceError: A block cannot be traced, or they do not return the same.

    Source:
        `jax.lax.cond`. `per_example` is what `jax.vmap` of one computes.
    """

    def choose(pred: Any, operands: Any) -> Any:
        blocks = [false_fun, true_fun]
        if per_example:
            return branch_by_row("cond", pred, blocks, operands)
        return Tracing("cond").branch(pred, blocks, operands)

    given = listed(pred) if per_example else pred
    return alone("cond", choose, given, operands)


def switch(
    index: Any,
    branches: Sequence[Callable[..., Any]],
    *operands: Any,
    per_example: bool = False,
) -> Any:
    """Call one of several blocks, by a value that is read where it is.

    Args:
        index: An integer without dimensions; one out of range takes the nearest block.
        branches: Blocks, as of `while_loop`, of the operands, which all return the same
            shapes and types.
        *operands: Handles, arrays and trees of them.
        per_example: There is an index for each row of the operands, and each row takes
            its own block. A block is given ragged handles of its rows, and does not run
            if there are none. One that is a compiled function of another slice gets
            them there.

    Raises:
        TraceError: A block cannot be traced, or they do not return the same.
        ConfigError: There are no branches.

    Source:
        `jax.lax.switch`. `per_example` is what `jax.vmap` of one computes, where all
        branches are computed for every row.
    """
    if not branches:
        raise ConfigError(
            "switch: no branches; got none; expected at least one function",
            option="branches",
        )

    def choose(index: Any, operands: Any) -> Any:
        if per_example:
            return branch_by_row("switch", index, branches, operands)
        return Tracing("switch").branch(index, branches, operands)

    given = listed(index) if per_example else index
    return alone("switch", choose, given, operands)
