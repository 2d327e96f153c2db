"""The directory of logical buffers: who holds each, and what has become of it.

A buffer lives as long as somebody can ask for it: a client that holds a handle, a
published name, or a program that was called with it. All that a client held goes with
the client; what it published belongs to the name and stays (the paper's section 4.6,
where buffers are labelled with their owners).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from timelyml.errors import BufferLostError, HandleError, TimelyError
from timelyml.ml.store.values import (
    Buffer,
    BufferState,
    Delete,
    Handle,
    Known,
    StoreEffect,
)


@dataclass(slots=True)
class _Entry:
    """A logical buffer and everybody who can ask for it."""

    buffer: Buffer
    state: BufferState = BufferState.PENDING
    error: TimelyError | None = None
    holders: set[str] = field(default_factory=set)  # clients
    names: set[str] = field(default_factory=set)  # published ones
    num_uses: int = 0  # by programs that were called and are not over
    waiters: set[str] = field(default_factory=set)  # clients, for its value

    @property
    def is_wanted(self) -> bool:
        return bool(self.holders or self.names or self.num_uses)


@dataclass(frozen=True, slots=True)
class Listing:
    """One line of what there is: a buffer, its state, and who keeps it alive."""

    buffer: Buffer
    state: BufferState
    holders: tuple[str, ...]
    names: tuple[str, ...]
    num_uses: int


class Directory:
    """All logical buffers of all clients.

    >>> directory = Directory()
    >>> buffer = Buffer(Handle("me", 1), "slice", 400)
    >>> directory.promise("me", [buffer])
    >>> directory.ready([buffer.handle])
    []
    >>> directory.leave("me")
    [Delete(handle=Handle(client='me', number=1))]
    """

    def __init__(self) -> None:
        self._entries: dict[Handle, _Entry] = {}
        self._by_client: dict[str, set[Handle]] = {}
        self._published: dict[str, tuple[tuple[Handle, ...], str]] = {}

    def __contains__(self, handle: object) -> bool:
        return handle in self._entries

    def promise(self, client: str, buffers: Iterable[Buffer]) -> None:
        """Make buffers known that a call of a client will produce.

        Raises:
            HandleError: A handle is taken.
        """
        for buffer in buffers:
            if buffer.handle in self._entries:
                raise HandleError(
                    f"handle {buffer.handle} is there already; got it again; expected "
                    f"a new number; count handles up",
                    handle=buffer.handle,
                )
            self._entries[buffer.handle] = _Entry(buffer, holders={client})
            self._by_client.setdefault(client, set()).add(buffer.handle)

    def use(
        self,
        client: str,
        handles: Sequence[Handle],
        donated: Sequence[Handle] = (),
    ) -> None:
        """Let a program of a client read buffers until `unuse`.

        Those it is donated are dead for everybody else from now on, unless others hold
        them too: `may_donate` says so, and then the program works on a copy.

        Raises:
            HandleError: One is unknown, not the client's, or was donated before.
        """
        for handle in handles:
            self._readable(client, handle)
        for handle in handles:
            self._entries[handle].num_uses += 1
        for handle in donated:
            self._entries[handle].state = BufferState.DONATED

    def unuse(self, handles: Iterable[Handle]) -> list[StoreEffect]:
        """Take note that a program that read buffers is over."""
        found: list[StoreEffect] = []
        for handle in handles:
            entry = self._entries.get(handle)
            if entry is not None:
                entry.num_uses -= 1
                found += self._deleted(handle)
        return found

    def may_donate(self, client: str, handle: Handle) -> bool:
        """Whether nobody but this client can still ask for a buffer."""
        entry = self._entries[handle]
        return entry.holders <= {client} and not entry.names and not entry.num_uses

    def ready(self, handles: Iterable[Handle]) -> list[StoreEffect]:
        """Take note that buffers have their values."""
        found: list[StoreEffect] = []
        for handle in handles:
            entry = self._entries.get(handle)
            if entry is not None and entry.state is BufferState.PENDING:
                entry.state = BufferState.READY
                found += self._tell(handle, entry)
        return found

    def fail(self, handles: Iterable[Handle], error: TimelyError) -> list[StoreEffect]:
        """Take note that buffers will never have values, and why."""
        found: list[StoreEffect] = []
        for handle in handles:
            entry = self._entries.get(handle)
            if entry is not None and entry.state is BufferState.PENDING:
                entry.state, entry.error = BufferState.FAILED, error
                found += self._tell(handle, entry)
        return found

    def lose(self, handles: Iterable[Handle], what: str) -> list[StoreEffect]:
        """Take note that values are gone with what held them."""
        found: list[StoreEffect] = []
        for handle in handles:
            entry = self._entries.get(handle)
            is_there = entry is not None and entry.state in {
                BufferState.PENDING,
                BufferState.READY,
            }
            if entry is None or not is_there:
                continue
            entry.state = BufferState.LOST
            entry.error = BufferLostError(
                f"buffer {entry.buffer.name} is lost; got {what}; expected its devices "
                f"to stay; keep copies on the host, or compute it again",
                handle=handle,
                placement=entry.buffer.placement,
            )
            found += self._tell(handle, entry)
        return found

    def error_of(self, handles: Iterable[Handle]) -> TimelyError | None:
        """Return why one of these buffers will never have a value, if so."""
        return next(
            (
                error
                for handle in handles
                if (error := self._entries[handle].error) is not None
            ),
            None,
        )

    def is_pending(self, handle: Handle) -> bool:
        """Whether a buffer may still come to have a value."""
        return self._entries[handle].state is BufferState.PENDING

    def wait(self, client: str, handle: Handle) -> list[StoreEffect]:
        """Tell a client once when a buffer is ready, or why it never will be.

        Raises:
            HandleError: It is unknown, not the client's, or was donated.
        """
        entry = self._readable(client, handle)
        entry.waiters.add(client)
        return [] if entry.state is BufferState.PENDING else self._tell(handle, entry)

    def drop(self, client: str, handles: Iterable[Handle]) -> list[StoreEffect]:
        """Take note that a client lets handles go."""
        found: list[StoreEffect] = []
        mine = self._by_client.get(client, set())
        for handle in handles:
            mine.discard(handle)
            entry = self._entries.get(handle)
            if entry is not None:
                entry.holders.discard(client)
                entry.waiters.discard(client)
                found += self._deleted(handle)
        return found

    def leave(self, client: str) -> list[StoreEffect]:
        """Drop all that a client that is gone still held."""
        return self.drop(client, sorted(self._by_client.pop(client, set())))

    def publish(
        self, client: str, name: str, handles: Sequence[Handle], structure: str
    ) -> None:
        """Give buffers to a name, under which any client can open them.

        Raises:
            HandleError: The name is taken, or a handle cannot be read by the client.
        """
        if name in self._published:
            raise HandleError(
                f"name {name!r} is published already; got it again; expected a new one; "
                f"unpublish it first",
                name=name,
            )
        for handle in handles:
            self._readable(client, handle)
        for handle in handles:
            self._entries[handle].names.add(name)
        self._published[name] = (tuple(handles), structure)

    def open(self, client: str, name: str) -> tuple[tuple[Handle, ...], str]:
        """Let a client hold what was published; returns the handles and their structure.

        Raises:
            HandleError: Nothing is published under the name.
        """
        if name not in self._published:
            raise HandleError(
                f"name {name!r} is not published; got it from client {client!r}; "
                f"expected one of {sorted(self._published)[:5]}; publish it first",
                name=name,
            )
        handles, structure = self._published[name]
        for handle in handles:
            self._entries[handle].holders.add(client)
        self._by_client.setdefault(client, set()).update(handles)
        return handles, structure

    def unpublish(self, name: str) -> list[StoreEffect]:
        """Take a name back; what clients have opened stays theirs."""
        handles, _ = self._published.pop(name, ((), ""))
        found: list[StoreEffect] = []
        for handle in handles:
            self._entries[handle].names.discard(name)
            found += self._deleted(handle)
        return found

    def on(self, placement: str) -> list[Handle]:
        """Return the buffers of a placement."""
        return [
            handle
            for handle, entry in self._entries.items()
            if entry.buffer.placement == placement
        ]

    def listing(self) -> list[Listing]:
        """Return all buffers there are, oldest first."""
        return [
            Listing(
                entry.buffer,
                entry.state,
                tuple(sorted(entry.holders)),
                tuple(sorted(entry.names)),
                entry.num_uses,
            )
            for entry in self._entries.values()
        ]

    def _readable(self, client: str, handle: Handle) -> _Entry:
        entry = self._entries.get(handle)
        if entry is None or client not in entry.holders:
            raise HandleError(
                f"handle {handle} is not client {client!r}'s; got one that it let go or "
                f"never had; expected its own; open what others published",
                handle=handle,
                client=client,
            )
        if entry.state is BufferState.DONATED:
            raise HandleError(
                f"buffer {entry.buffer.name} was donated; got it again; expected a "
                f"buffer that is still there; use the result of the call it was given to",
                handle=handle,
            )
        return entry

    def _tell(self, handle: Handle, entry: _Entry) -> list[StoreEffect]:
        waiters, entry.waiters = sorted(entry.waiters), set()
        return [Known(client, handle, entry.error) for client in waiters]

    def _deleted(self, handle: Handle) -> list[StoreEffect]:
        if self._entries[handle].is_wanted:
            return []
        del self._entries[handle]
        return [Delete(handle)]
