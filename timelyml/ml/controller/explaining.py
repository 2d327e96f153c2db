"""Who holds up what a client waits for: a call, a host that compiles or runs, a slice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from timelyml.errors import TimelyError
from timelyml.ml.controller.code import Code
from timelyml.ml.controller.dispatching import Dispatch
from timelyml.ml.controller.explained import AskWhy, Why
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.places import Places
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.controller.work import Work
from timelyml.ml.resources import SliceState
from timelyml.ml.store import BufferState, Directory, Entry

MAX_STEPS = 64
"""So far back calls are followed that wait for each other."""

_STATES = {
    SliceState.SUSPENDED: "is suspended",
    SliceState.DISPLACED: "waits for devices, as those that it had are gone or withdrawn",
    SliceState.MOVING: "is on its way to other devices",
    SliceState.WAITING: "waits for its first devices",
}


class Explanations:
    """Tells clients why values or slices are not there yet.

    Args:
        dispatch: Has the work that is not over.
        directory: Has the buffers.
        slices: All slices.
        places: Knows where they stand, and of islands.
        code: Knows what is compiled.
        outbox: Takes the answers.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        directory: Directory,
        *,
        slices: Mapping[str, SliceRecord],
        places: Places,
        code: Code,
        outbox: Outbox,
    ) -> None:
        self._dispatch = dispatch
        self._directory = directory
        self._slices = slices
        self._places = places
        self._code = code
        self._outbox = outbox
        self._heard_s: dict[int, float] = {}

    def heard(self, host: int, now_s: float) -> None:
        """Take note that a host said something."""
        self._heard_s[host] = now_s

    def handle(self, client: int, message: object, now_s: float) -> bool:
        """Answer a client, if it asks why."""
        if not isinstance(message, AskWhy):
            return False
        if message.buffer:
            text = self._of_buffer(client, message.buffer, now_s)
        else:
            text = self._of_slices(now_s)
        self._outbox.tell(client, Why(message.request, text))
        return True

    def _of_slices(self, now_s: float) -> str:
        manager = self._places.manager
        found = [
            f"slice {request.name!r} of client {request.client} {_STATES[state]}"
            for request, state, _ in manager.slices()
            if state in _STATES
        ]
        coming = self._places.coming()
        found += [
            f"island {name!r} is not there yet: {self._hosts(hosts, now_s)}"
            for name, hosts in coming
        ]
        return "; ".join(found) or "every slice stands on its devices"

    def _of_buffer(self, client: int, number: int, now_s: float) -> str:
        try:
            entry = self._directory.readable(client, number)
        except TimelyError as error:
            return str(error)
        return self._of_entry(entry, now_s)

    def _of_entry(self, entry: Entry, now_s: float) -> str:
        """Follow a buffer back to what does not wait for anything else."""
        buffer = entry.buffer
        for _ in range(MAX_STEPS):
            work = self._dispatch.find(entry.producer)
            if work is None:
                break
            before = self._before(work)
            if before is None:
                return self._of_work(work, now_s)
            entry = before
        slice_ = self._slices.get(entry.buffer.placement)
        on = "a slice that is gone" if slice_ is None else self._on(slice_, now_s)
        is_there = entry.state is BufferState.READY
        where = "is computed" if is_there else "is on its way to its devices"
        what = f"{buffer.label!r} waits for " if entry.buffer is not buffer else ""
        return f"{what}{entry.buffer.label!r}, which {where}, on {on}"

    def _before(self, work: Work) -> Entry | None:
        """Return an argument that is still to be made, if work waits for one."""
        for entry in work.args:
            maker = self._dispatch.find(entry.producer)
            if maker is None or maker is work:
                continue
            if entry.state is BufferState.PENDING:
                return entry
        return None

    def _of_work(self, work: Work, now_s: float) -> str:
        made = work.results[0].buffer.label if work.results else f"call {work.program}"
        since = f"{made!r} was called for by client {work.client} "
        since += f"{now_s - work.since_s:.1f} s ago"
        return f"{since}, and {self._state_of(work, now_s)}"

    def _state_of(self, work: Work, now_s: float) -> str:
        slices = [self._slices[name] for name in work.slices]
        standing = [self._standing(each) for each in slices]
        if moving := [each for each in standing if each]:
            return "; ".join(moving)
        if not work.is_claimed:
            return self._of_code(work, now_s) or "waits for calls before it"
        if not work.is_begun:
            names = ", ".join(repr(each.name) for each in slices)
            return f"waits for memory on the devices of slice {names}"
        on = "; ".join(self._on(each, now_s) for each in slices)
        if work.has_parts:
            return f"is under way, part by part, on {on}"
        if not work.is_ordered:
            return f"waits for its turn on {on}"
        return f"is launched, or next, on {on}"

    def _of_code(self, work: Work, now_s: float) -> str:
        for identity, name in work.owner.codes(work):
            left = self._slices[name].loaded.get(identity)
            if left is not None and left.hosts_left:
                computation = self._code.get(identity)
                what = identity[:12] if computation is None else computation.name
                hosts = self._hosts(sorted(left.hosts_left), now_s)
                return f"waits for {what!r} to be compiled: {hosts}"
        return ""

    def _standing(self, slice_: SliceRecord) -> str:
        try:
            state = self._places.manager.state(slice_.name)
        except TimelyError:  # it is lost
            return ""
        if not slice_.is_closed or state not in _STATES:
            return ""
        return f"slice {slice_.name!r} {_STATES[state]}"

    def _on(self, slice_: SliceRecord, now_s: float) -> str:
        hosts = self._hosts(slice_.hosts, now_s)
        return f"slice {slice_.name!r} of island {slice_.island!r}: {hosts}"

    def _hosts(self, hosts: Iterable[int], now_s: float) -> str:
        found = []
        for host in hosts:
            heard_s = self._heard_s.get(host)
            when = "never said anything"
            if heard_s is not None:
                when = f"last said something {now_s - heard_s:.1f} s ago"
            found.append(f"host {host} {when}")
        return ", ".join(found)
