"""Who waits for what: a list of things for each, told once the last of them is there."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Awaited:
    """Names of those that wait, until all that each waits for is there.

    >>> awaited = Awaited()
    >>> awaited.wait("call", ["code", "memory"]), awaited.wait("other", [])
    (False, True)
    >>> awaited.provide("code"), awaited.provide("memory")
    ([], ['call'])
    """

    def __init__(self) -> None:
        self._missing: dict[str, set[Hashable]] = {}
        self._waiting: dict[Hashable, list[str]] = {}

    def __contains__(self, who: object) -> bool:
        return who in self._missing

    def wait(self, who: str, things: Iterable[Hashable]) -> bool:
        """Let somebody wait; return whether there is nothing to wait for."""
        missing = set(things)
        if not missing:
            return True
        self._missing[who] = missing
        for thing in missing:
            self._waiting.setdefault(thing, []).append(who)
        return False

    def provide(self, thing: Hashable) -> list[str]:
        """Return those who waited for nothing else any more."""
        found = []
        for who in self._waiting.pop(thing, ()):
            missing = self._missing.get(who)
            if missing is None:
                continue  # it was forgotten
            missing.discard(thing)
            if not missing:
                del self._missing[who]
                found.append(who)
        return found

    def forget(self, who: str) -> None:
        """Tell somebody nothing any more."""
        self._missing.pop(who, None)
