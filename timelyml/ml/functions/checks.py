"""`checkify.check` in compiled functions: checks become outputs, and outputs errors.

Plain JAX refuses to compile a check that nobody turned into a value. Here the function
is turned by `checkify.checkify` when it is traced, for checks of the user only; what
tells of them is a few more outputs, which the worker looks at before anybody may read
the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental import checkify

from timelyml.ml import jax_private
from timelyml.ml.functions.blame import line_text
from timelyml.ml.functions.computation import CheckGroup, CheckMessage, Checks
from timelyml.ml.functions.options import Arguments


class Checked:
    """A function that returns its results and, beside them, the error of its checks.

    Takes all arguments; those that are fixed stay fixed.
    """

    def __init__(self, fun: Callable[..., Any], split: Arguments) -> None:
        self.__name__ = getattr(fun, "__name__", "function")
        self._fun = fun
        self._split = split.fixed

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Call the function, its checks collected."""
        fixed = {position for position, _ in self._split.static_args}
        names = {name for name, _ in self._split.static_kwargs}

        def call(traced: list[Any], named: dict[str, Any]) -> Any:
            merged, merged_named = self._split.merge(traced, named)
            return self._fun(*merged, **merged_named)

        error, results = checkify.checkify(call)(
            [each for i, each in enumerate(args) if i not in fixed],
            {name: each for name, each in kwargs.items() if name not in names},
        )
        return results, error


def checks_of(tree: Any, first: int) -> Checks:
    """Return the checks of a traced function.

    Args:
        tree: The structure of the error that `Checked` returned.
        first: Position of its first leaf among all outputs.
    """
    groups = []
    messages: dict[int, CheckMessage] = {}
    for failed, code, values, found in jax_private.check_outputs(tree, first):
        groups.append(CheckGroup(failed, code, tuple(values)))
        for key, (template, names, traceback) in found.items():
            frame = jax_private.user_frame(traceback)
            where = "" if frame is None else line_text(*frame)
            messages[key] = CheckMessage(template, names, where)
    return Checks(tuple(groups), messages)
