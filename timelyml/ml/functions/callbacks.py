"""Host callbacks that raise in computations over several devices.

XLA cannot stop such a computation: the device that called waits for no one, the others
wait for it in their collectives, and after a while XLA ends the process. So nothing is
raised there. Zeros go on in its place, and the error is told when the launch is over.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from timelyml.ml.functions.types import is_key


class Outputs(list[Any]):
    """What a launch returned, and what a callback raised that may be of this launch."""

    def __init__(self) -> None:
        super().__init__()
        self.raised: BaseException | None = None

    def is_over(self) -> bool:
        """Whether all of it is computed, as far as it can still be seen."""
        seen = [each for each in self if not each.is_deleted()]
        return bool(seen) and all(each.is_ready() for each in seen)


class Launches:
    """The launches of one executable that are under way.

    A callback does not learn for which launch it is called, so that what it raises is
    held against all of them: none that is spoilt passes for good.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: weakref.WeakValueDictionary[int, Outputs] = (
            weakref.WeakValueDictionary()
        )

    def begin(self) -> Outputs:
        """Return the outputs, none so far, of a launch that is about to be."""
        outputs = Outputs()
        with self._lock:
            self._under_way[id(outputs)] = outputs
        return outputs

    def fail(self, error: BaseException) -> None:
        """Note what a callback raised; called in a thread of XLA."""
        with self._lock:
            under_way = list(self._under_way.values())
        for each in under_way:
            if each.raised is None and not each.is_over():
                each.raised = error

    def end(self, outputs: Sequence[Any]) -> BaseException | None:
        """Return what a callback raised while a launch, now over, was under way."""
        with self._lock:
            self._under_way.pop(id(outputs), None)
        return outputs.raised if isinstance(outputs, Outputs) else None


@dataclass(frozen=True, eq=False)
class Guarded:
    """A callback that returns zeros where the user's raises or returns something else.

    Attributes:
        avals: Types of what it has to return.
    """

    callback: Callable[..., Any]
    avals: tuple[Any, ...]
    launches: Launches

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        try:
            found = self.callback(*args)
            if self.avals:
                _check(jax.tree.leaves(found), self.avals)
        except BaseException as error:  # noqa: BLE001 - whatever ends the user's code
            self.launches.fail(error)
            return [np.zeros(each.shape, each.dtype) for each in self.avals]
        return found


def can_guard(avals: Sequence[Any]) -> bool:
    """Whether there are zeros of these types."""
    return not any(is_key(each.dtype) for each in avals)


def _check(found: Sequence[Any], avals: Sequence[Any]) -> None:
    got = [(np.shape(each), np.asarray(each).dtype) for each in found]
    wanted = [(each.shape, each.dtype) for each in avals]
    if got != wanted:
        raise TypeError(
            f"a host callback returned what it was not to return; got "
            f"{_listed(got)}; expected {_listed(wanted)}; mend its result or the "
            f"types that it is called with"
        )


def _listed(types: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}[{','.join(map(str, s))}]" for s, dtype in types)
