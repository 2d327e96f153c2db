"""The directory of logical buffers: who holds each, and what has become of it.

A buffer lives as long as somebody can ask for it: a client that holds it, a published
name, or a call or fetch under way. All that a client held goes with the client; what it
published belongs to the name and stays (the paper's section 4.6, where buffers are
labelled with their owners).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from timelyml.errors import HandleError
from timelyml.ml.store.entries import NO_WAITERS, NOBODY, Entry
from timelyml.ml.store.values import (
    Buffer,
    BufferState,
    Delete,
    DirectoryEffect,
    Known,
)
from timelyml.progress import new_tuple


class Directory:
    """All logical buffers of all clients.

    >>> from timelyml.ml.functions import ArrayType
    >>> directory = Directory()
    >>> of = ArrayType((100,), "float32", 4)
    >>> _ = directory.promise(1, [Buffer(7, "slice", of, (), 400, 400)])
    >>> directory.ready([7])
    []
    >>> [effect.buffer.number for effect in directory.leave(1)]
    [7]
    """

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._by_client: dict[int, set[int]] = {}
        self._held_bytes: Counter[int] = Counter()  # by client
        self._published: dict[str, tuple[tuple[int, ...], bytes]] = {}

    def __contains__(self, number: object) -> bool:
        return number in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, number: int) -> Entry | None:
        """Return what is known of a buffer."""
        return self._entries.get(number)

    def readable(self, client: int, number: int) -> Entry:
        """Return what is known of a buffer that a client holds.

        Raises:
            HandleError: The client does not hold it.
        """
        entry = self._entries.get(number)
        if entry is None or client not in entry.holders:
            raise HandleError(
                f"a buffer is not client {client}'s; got {number}, which it let go, gave "
                f"away or never had; expected one that it holds; open what others "
                f"published",
                buffer=number,
                client=client,
            )
        return entry

    def promise(
        self, client: int, buffers: Iterable[Buffer], producer: str | None = None
    ) -> list[Entry]:
        """Make buffers known that a client will have; of `NOBODY`, that a call will.

        Raises:
            HandleError: A number is taken.
        """
        made: list[Entry] = []
        entries = self._entries
        for buffer in buffers:
            number = buffer.number
            if number in entries:
                raise HandleError(
                    f"buffer {buffer.name} is there already; got it again; expected a "
                    f"new number; count numbers up",
                    buffer=number,
                )
            entry = entries[number] = Entry(buffer, client, producer)
            made.append(entry)
        if client != NOBODY and made:
            for entry in made:
                entry.holders[client] = 1
            held = self._by_client.setdefault(client, set())
            held.update([entry.number for entry in made])
            size_bytes = sum([entry.buffer.type.size_bytes for entry in made])
            self._held_bytes[client] += size_bytes
        return made

    def charge(self, entry: Entry, client: int) -> None:
        """Charge a client for a buffer that a call of its holds between its parts."""
        entry.charged = client
        self._count(entry, [client], 1)

    def use(self, entries: Iterable[Entry], *, is_exported: bool = False) -> None:
        """Keep buffers until `unuse`."""
        for entry in entries:
            entry.num_uses += 1
            if is_exported:
                entry.num_exports += 1

    def unuse(
        self, entries: Iterable[Entry], *, is_exported: bool = False
    ) -> list[DirectoryEffect]:
        """Take note that something that used buffers is over."""
        found: list[DirectoryEffect] = []
        for entry in entries:
            entry.num_uses -= 1
            if is_exported:
                entry.num_exports -= 1
            self._delete_if_unwanted(entry, found)
        return found

    def may_donate(self, client: int, entry: Entry) -> bool:
        """Whether a call of this client may take a buffer's memory without a copy.

        Not while others can ask for it, or read it at a time of their own.
        """
        if entry.names or entry.num_exports:
            return False
        num_others = len(entry.holders) - (client in entry.holders)
        return num_others == 0

    def give_up(self, client: int, numbers: Iterable[int]) -> list[DirectoryEffect]:
        """Let a client hold buffers no longer, however often it was given them."""
        found: list[DirectoryEffect] = []
        given = [self._entries.get(number) for number in numbers]
        self._give_up(client, [each for each in given if each is not None], found)
        return found

    def drop(self, client: int, numbers: Iterable[int]) -> list[DirectoryEffect]:
        """Take note that a client lets buffers go, each once."""
        found: list[DirectoryEffect] = []
        for number in numbers:
            entry = self._entries.get(number)
            if entry is None or client not in entry.holders:
                continue
            if entry.holders[client] > 1:
                entry.holders[client] -= 1
            else:
                self._give_up(client, [entry], found)
        return found

    def leave(self, client: int) -> list[DirectoryEffect]:
        """Drop all that a client that is gone still held."""
        found = self.give_up(client, sorted(self._by_client.get(client, ())))
        for entry in self._entries.values():
            if entry.charged == client:
                entry.charged = NOBODY  # its calls come to their end by themselves
        self._by_client.pop(client, None)
        self._held_bytes.pop(client, None)
        return found

    def ready(self, numbers: Iterable[int]) -> list[DirectoryEffect]:
        """Take note that buffers have their values."""
        found: list[DirectoryEffect] = []
        pending, ready = BufferState.PENDING, BufferState.READY
        for number in numbers:
            entry = self._entries.get(number)
            if entry is not None and entry.state is pending:
                entry.state = ready
                if entry.waiters:
                    found += self._tell(entry)
        return found

    def fail(self, numbers: Iterable[int], error: bytes) -> list[DirectoryEffect]:
        """Take note that buffers will never have values, and why."""
        found: list[DirectoryEffect] = []
        for number in numbers:
            entry = self._entries.get(number)
            if entry is not None and entry.state is BufferState.PENDING:
                self._set_failed(entry, error)
                found += self._tell(entry)
        return found

    def lose(self, number: int, error: bytes) -> list[DirectoryEffect]:
        """Take note that a value is gone; all who hold it are to hear why."""
        entry = self._entries.get(number)
        if entry is None or entry.state is BufferState.FAILED:
            return []
        self._set_failed(entry, error)
        entry.waiters |= entry.holders.keys()
        return self._tell(entry)

    def wait(self, client: int, number: int) -> list[DirectoryEffect]:
        """Tell a client once when a buffer is there, or why it never will be.

        Raises:
            HandleError: The client does not hold it.
        """
        entry = self.readable(client, number)
        entry.waiters |= {client}
        return [] if entry.state is BufferState.PENDING else self._tell(entry)

    def publish(
        self, client: int, name: str, numbers: Sequence[int], structure: bytes
    ) -> None:
        """Give buffers to a name, under which any client can open them.

        Args:
            client: Who does it; it goes on to hold them.
            name: A new one.
            numbers: The buffers.
            structure: Given to whoever opens them.

        Raises:
            HandleError: The name is taken, or the client does not hold a buffer.
        """
        if name in self._published:
            raise HandleError(
                f"name {name!r} is published already; got it again; expected a new one; "
                f"unpublish it first",
                name=name,
            )
        entries = [self.readable(client, number) for number in numbers]
        for entry in entries:
            entry.names |= {name}
        self._published[name] = (tuple(numbers), structure)

    def is_published(self, name: str) -> bool:
        """Whether a client can open that name."""
        return name in self._published

    def open(self, client: int, name: str) -> tuple[tuple[int, ...], bytes]:
        """Let a client hold what was published; return the buffers and their structure.

        Raises:
            HandleError: Nothing is published under the name.
        """
        if name not in self._published:
            raise unknown_name(name, self._published)
        numbers, structure = self._published[name]
        for number in numbers:
            entry = self._entries[number]
            if client not in entry.holders:
                self._count(entry, [client], 1)
            entry.holders[client] = entry.holders.get(client, 0) + 1
        self._by_client.setdefault(client, set()).update(numbers)
        return numbers, structure

    def unpublish(self, name: str) -> list[DirectoryEffect]:
        """Take a name back; what clients have opened stays theirs.

        Raises:
            HandleError: Nothing is published under the name.
        """
        if name not in self._published:
            raise unknown_name(name, self._published)
        numbers, _ = self._published.pop(name)
        found: list[DirectoryEffect] = []
        for number in dict.fromkeys(numbers):
            entry = self._entries[number]
            entry.names -= {name}
            self._delete_if_unwanted(entry, found)
        return found

    def replace(self, buffer: Buffer) -> None:
        """Take note of what a buffer is from now on, as its placement has moved."""
        self._entries[buffer.number].buffer = buffer

    def on(self, placement: str) -> list[Entry]:
        """Return the buffers of a placement."""
        return [e for e in self._entries.values() if e.buffer.placement == placement]

    def of_client(self, client: int) -> list[int]:
        """Return the buffers that a client holds."""
        return sorted(self._by_client.get(client, ()))

    def held_bytes(self, client: int) -> int:
        """Return the bytes of what a client holds and did not fail, each counted once."""
        return self._held_bytes[client]

    def entries(self) -> list[Entry]:
        """Return all buffers there are, oldest first."""
        return list(self._entries.values())

    def _give_up(
        self, client: int, entries: Iterable[Entry], found: list[DirectoryEffect]
    ) -> None:
        held, failed = self._by_client.get(client, set()), BufferState.FAILED
        size_bytes = 0
        for entry in entries:
            if entry.holders.pop(client, None) is None:
                continue
            held.discard(entry.number)
            if entry.waiters:
                entry.waiters -= {client}
            if entry.state is not failed:
                size_bytes += entry.buffer.type.size_bytes
            self._delete_if_unwanted(entry, found)
        if size_bytes:
            self._held_bytes[client] -= size_bytes

    def _set_failed(self, entry: Entry, error: bytes) -> None:
        self._count(entry, entry.holders, -1)
        self._uncharge(entry)
        entry.state, entry.error = BufferState.FAILED, error

    def _count(self, entry: Entry, clients: Iterable[int], sign: int) -> None:
        if entry.state is not BufferState.FAILED:
            for client in clients:
                self._held_bytes[client] += sign * entry.buffer.type.size_bytes

    def _uncharge(self, entry: Entry) -> None:
        if entry.charged != NOBODY:
            self._count(entry, [entry.charged], -1)
            entry.charged = NOBODY

    def _tell(self, entry: Entry) -> list[DirectoryEffect]:
        if not entry.waiters:
            return []
        waiters, entry.waiters = sorted(entry.waiters), NO_WAITERS
        return [Known(client, entry.number, entry.error) for client in waiters]

    def _delete_if_unwanted(self, entry: Entry, found: list[DirectoryEffect]) -> None:
        if entry.num_uses or entry.holders or entry.names:
            return
        if self._entries.pop(entry.number, None) is None:
            return
        self._uncharge(entry)
        found.append(new_tuple(Delete, (entry.buffer,)))


def unknown_name(name: str, published: Iterable[str]) -> HandleError:
    """Return the error of whoever asks for a name that nothing is published under."""
    return HandleError(
        f"name {name!r} is not published; got a use of it; expected one of "
        f"{sorted(published)[:5]}; publish it first, or wait for it",
        name=name,
    )
