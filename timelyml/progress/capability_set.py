"""Sets of capabilities: the right to send at any of several times, or later."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from timelyml.errors import CapabilityError
from timelyml.progress.antichain import Antichain
from timelyml.progress.capability import Capability
from timelyml.progress.timestamp import Timestamp, less_equal


class CapabilitySet:
    """The minimal ones of the capabilities given to it, all of one output.

    It owns what it is given: one that allows no more than another is released at once,
    the others by `downgrade`, `release`, or the end of a `with` block. It may be kept
    in the state of a shard, and moves with it.

    Raises:
        CapabilityError: As `insert` does.

    Source:
        timely dataflow (CapabilitySet); here nothing is released by being dropped.
    """

    __slots__ = ("_held",)

    def __init__(self, capabilities: Iterable[Capability] = ()) -> None:
        self._held: list[Capability] = []
        for capability in capabilities:
            self.insert(capability)

    @property
    def times(self) -> tuple[Timestamp, ...]:
        """The minimal times at which it allows to send, in Python's order."""
        return tuple(sorted(held.time for held in self._held))

    def insert(self, capability: Capability) -> None:
        """Take a capability over; release it, or those that allow no more than it.

        Raises:
            CapabilityError: It was released, or is of another output.
        """
        self._check_mine(capability)
        time = capability.time
        if any(less_equal(held.time, time) for held in self._held):
            capability.release()
            return
        later = [held for held in self._held if less_equal(time, held.time)]
        self._held = [held for held in self._held if held not in later]
        self._held.append(capability)
        _release(later)

    def delayed(self, time: Timestamp, site: str | None = None) -> Capability:
        """Return a capability for `time`, which is the caller's to release.

        Raises:
            CapabilityError: None that is held is for a time at or before it.
        """
        return self._earlier(time, "delayed").delayed(time, site)

    def downgrade(self, frontier: Iterable[Timestamp]) -> None:
        """Keep the right to send at or after `frontier` only: all or nothing is done.

        Args:
            frontier: Times, such as the `elements` of a `Frontier`; none give up all.

        Raises:
            CapabilityError: For one of its minimal times nothing is held at or before.
        """
        times = Antichain(frontier).elements
        sources = [self._earlier(time, "downgraded") for time in times]
        kept: list[Capability] = []
        try:
            for source, time in zip(sources, times, strict=True):
                kept.append(source.delayed(time))
        except BaseException:
            _release(kept)
            raise
        _release(self._held)
        self._held = kept

    def release(self) -> None:
        """Give up the right to send; what is inserted later is held again."""
        before, self._held = self._held, []
        _release(before)

    def __len__(self) -> int:
        return len(self._held)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"CapabilitySet({list(self.times)!r})"

    def _earlier(self, time: Timestamp, action: str) -> Capability:
        for held in self._held:
            if less_equal(held.time, time):
                return held
        raise CapabilityError(
            f"a set of capabilities cannot be {action} to a time that none of them "
            f"allows; got {time!r}; expected one at or after any of "
            f"{list(self.times)!r}; keep a capability for an earlier time",
            requested=time,
            times=self.times,
        )

    def _check_mine(self, capability: Capability) -> None:
        if not capability.is_held:
            raise CapabilityError(
                f"a set of capabilities cannot take {capability!r}; got one that was "
                "released; expected one still held; clone it before it is released",
                location=capability.location,
                time=capability.time,
            )
        if capability in self._held:
            raise CapabilityError(
                f"a set of capabilities has {capability!r} already; got it again; "
                "expected each once, as each is released once; clone it",
                location=capability.location,
                time=capability.time,
            )
        if self._held and capability.location != self._held[0].location:
            raise CapabilityError(
                f"a set of capabilities cannot take {capability!r}; got one of another "
                f"output; expected location {self._held[0].location}, as of the others; "
                "keep a set for each output",
                location=capability.location,
                time=capability.time,
            )


def _release(capabilities: Iterable[Capability]) -> None:
    for capability in capabilities:
        capability.release()
