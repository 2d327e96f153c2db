"""Telling the controller which values nobody holds any more."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Container, Iterator
from queue import SimpleQueue

from timelyml.errors import TimelyError
from timelyml.ml.client.link import Link
from timelyml.ml.controller.messages import Release

DELAY_S = 0.02
"""How long values are collected that go one after the other, to be told together."""


class Releases:
    """Values that were let go; told together, soon, and before what may need the room.

    Handles go at any time and in any thread, also while others hold locks, so nothing
    is sent from there: a thread does it. It ends with `close`, or with this.

    Args:
        link: The way to the controller.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._numbers: deque[int] = deque()
        self._telling = threading.Lock()  # never taken by a finaliser
        self._unsent: Container[int] = ()
        self._aside: list[int] = []
        self._bell: SimpleQueue[bool] = SimpleQueue()  # may be rung from a finaliser
        self._is_rung = False
        self._is_closed = threading.Event()
        weakref.finalize(self, self._bell.put, False)
        self._teller = threading.Thread(
            target=_serve,
            args=(weakref.ref(self), self._bell, self._is_closed),
            name="timelyml-release",
            daemon=True,
        )
        self._teller.start()

    def add(self, number: int) -> None:
        """Let go of a value; from any thread, and at any time."""
        self._numbers.append(number)
        if not self._is_rung:  # else the thread will look, and has not yet
            self._is_rung = True
            self._bell.put(True)

    def flush(self) -> None:
        """Tell what was let go of so far.

        Raises:
            TimelyError: Nothing can be told any more.
        """
        with self._telling:
            self._is_rung = False  # before looking: who adds something later rings anew
            numbers = [self._numbers.popleft() for _ in range(len(self._numbers))]
            if self._unsent:
                self._aside += [each for each in numbers if each in self._unsent]
                numbers = [each for each in numbers if each not in self._unsent]
            if numbers:
                self._link.send(Release(tuple(numbers)))

    @contextlib.contextmanager
    def sending(self, made: Container[int], held: Container[int]) -> Iterator[None]:
        """Tell nothing meanwhile of what calls make that are sent in several messages.

        A later one may take by its number what nobody holds any more. What nobody held
        before has no name outside of these calls; that it went is told by who sends.

        Args:
            made: Numbers of what the calls make.
            held: Those of them that somebody held when sending began.
        """
        with self._telling:
            self._unsent = made
        try:
            yield
        finally:
            with self._telling:
                self._unsent = ()
                self._numbers += [each for each in self._aside if each in held]
                self._aside.clear()

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        self._bell.put(False)
        if self._teller is not threading.current_thread():
            self._teller.join()


def _serve(
    owner: weakref.ref[Releases], bell: SimpleQueue[bool], is_closed: threading.Event
) -> None:
    while bell.get() and not is_closed.wait(DELAY_S):
        while not bell.empty():
            if not bell.get():
                return
        releases = owner()
        if releases is None:
            return
        try:
            releases.flush()
        except TimelyError:  # the client hears of the end by itself
            return
        del releases
