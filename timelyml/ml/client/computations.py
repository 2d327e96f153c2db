"""What a client has had compiled, and what cannot be."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from timelyml.ml.client.slices import Slice
from timelyml.ml.controller.code_messages import (
    AskCompiled,
    IsCompiled,
    NotCompiled,
    Register,
)
from timelyml.ml.functions import Computation, MemoryNeeds
from timelyml.ml.functions.blame import calling_line
from timelyml.runtime.failure import unpack_error

Code: TypeAlias = tuple[str, str]
"""Identity of a computation, and the name of the slice that it is compiled for."""


class Computations:
    """Computations, each registered once for a slice, from where hosts compile it.

    Args:
        send: Sends what is to be registered.
        ask: Sends a request, made of its number, and waits for the answer; is told what
            for, and for how many seconds.
    """

    def __init__(
        self,
        send: Callable[[Register], None],
        ask: Callable[[Callable[[int], Any], str, float | None], Any],
    ) -> None:
        self._send = send
        self._ask = ask
        self._registered: set[Code] = set()
        self._refused: dict[Code, bytes] = {}

    def register(self, computation: Computation, slice_: Slice, line: str = "") -> None:
        """Have a computation compiled for a slice, unless it was before.

        Args:
            computation: What is called.
            slice_: Where.
            line: The user's that calls it; empty: the one that does now.

        Raises:
            TimelyError: It was before, and cannot be compiled.
        """
        code = computation.identity, slice_.name
        if code in self._registered:
            if self._refused:
                self.check([code])
            return
        self._registered.add(code)
        pickled = pickle.dumps(computation)
        self._send(Register(*code, pickled, line or calling_line()))

    def compiled(
        self, computation: Computation, slice_: Slice, timeout_s: float | None
    ) -> MemoryNeeds:
        """Have a computation compiled for a slice; wait, and return what it takes.

        Raises:
            DeadlineError: It is not compiled in time.
            TimelyError: It cannot be.
        """
        self.register(computation, slice_)
        code = computation.identity, slice_.name
        what = f"function {computation.name!r}, compiled for slice {slice_.name!r},"
        answer: IsCompiled = self._ask(lambda n: AskCompiled(n, *code), what, timeout_s)
        return answer.needs

    def check(self, codes: Iterable[Code]) -> None:
        """Raise why computations cannot be compiled, as far as that is known.

        Raises:
            TimelyError: One cannot be.
        """
        if not self._refused:
            return
        for code in codes:
            if (packed := self._refused.get(code)) is not None:
                raise unpack_error(packed)

    def refuse(self, news: NotCompiled) -> None:
        """Take note that a computation cannot run where its slice stands."""
        self._refused[news.identity, news.slice] = news.error

    def moved(self, slice_name: str) -> None:
        """Take note that a slice stands elsewhere, where all may be well."""
        gone = [code for code in self._refused if code[1] == slice_name]
        for code in gone:
            del self._refused[code]
