"""Host callbacks that raise in computations over several devices.

XLA cannot stop such a computation: the device that called waits for no one, the others
wait for it in their collectives, and after a while XLA ends the process. So nothing is
raised there. Zeros go on in its place, and the error is told when the launch is over.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from timelyml.ml.functions.computation import ArrayType
from timelyml.ml.jax_private import is_ready

NUMBER_TYPE = ArrayType((), "int32", 4)
"""Of the number of a launch, which goes to its callbacks."""


class Outputs(list[Any]):
    """What a launch returned, and what a callback raised in it.

    Attributes:
        number: Of the launch, among those of its executable.
    """

    def __init__(self, number: np.int32) -> None:
        super().__init__()
        self.number = number
        self.raised: BaseException | None = None

    def is_over(self) -> bool:
        """Whether all of it is computed, as far as it can still be seen."""
        seen = [each for each in self if not each.is_deleted()]
        return bool(seen) and all(map(is_ready, seen))


class Launches:
    """The launches of one executable that are under way.

    What a callback raises is held against the launch that called it. Where it does not
    learn which one that was, it is held against all: none that is spoilt passes for good.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._under_way: weakref.WeakValueDictionary[int, Outputs] = (
            weakref.WeakValueDictionary()
        )

    def begin(self) -> Outputs:
        """Return the outputs, none so far, of a launch that is about to be."""
        outputs = Outputs(np.int32(next(self._numbers) % 2**31))
        with self._lock:
            self._under_way[int(outputs.number)] = outputs
        return outputs

    def fail(self, error: BaseException, number: int | None) -> None:
        """Note what a callback raised; called in a thread of XLA."""
        with self._lock:
            if number is None:
                failed = [x for x in self._under_way.values() if not x.is_over()]
            else:
                failed = [x for x in (self._under_way.get(number),) if x is not None]
        for each in failed:
            each.raised = each.raised or error

    def goes_on(self, number: Any, would: Any) -> Any:
        """Return whether a loop goes on in a launch, which would unless it failed.

        With zeros for what a callback returns it might do so for ever.
        """
        with self._lock:
            launch = self._under_way.get(int(number))
        return np.asarray(would) & (launch is None or launch.raised is None)

    def end(self, outputs: Sequence[Any]) -> BaseException | None:
        """Return what a callback raised in a launch, which is over."""
        if not isinstance(outputs, Outputs):
            return None
        with self._lock:
            self._under_way.pop(int(outputs.number), None)
        return outputs.raised


@dataclass(frozen=True, eq=False)
class Guarded:
    """A callback that returns zeros where the user's raises or returns something else.

    Attributes:
        avals: Types of what it has to return.
        is_numbered: Whether the number of the launch comes before its arguments.
    """

    callback: Callable[..., Any]
    avals: tuple[Any, ...]
    launches: Launches
    is_numbered: bool

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        number = None
        if self.is_numbered:
            number, args = int(args[0]), args[1:]
        try:
            found = self.callback(*args)
            if self.avals:
                _check(jax.tree.leaves(found), self.avals)
        except BaseException as error:  # noqa: BLE001 - whatever ends the user's code
            self.launches.fail(error, number)
            return [np.zeros(each.shape, each.dtype) for each in self.avals]
        return found


def guarded(
    launches: Launches,
    callback: Callable[..., Any],
    avals: tuple[Any, ...],
    is_numbered: bool,
) -> Guarded:
    """Return a callback that does not raise, but tells `launches`."""
    return Guarded(callback, avals, launches, is_numbered)


def _check(found: Sequence[Any], avals: Sequence[Any]) -> None:
    got = [
        (np.shape(each), jax.dtypes.canonicalize_dtype(np.asarray(each).dtype))
        for each in found
    ]
    wanted = [(each.shape, each.dtype) for each in avals]
    if got != wanted:
        raise TypeError(
            f"a host callback returned what it was not to return; got "
            f"{_listed(got)}; expected {_listed(wanted)}; mend its result or the "
            f"types that it is called with"
        )


def _listed(types: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}[{','.join(map(str, s))}]" for s, dtype in types)
