"""Fetches: elements on their way to clients, and news of whether a value is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from timelyml.errors import HandleError
from timelyml.exchange import CONTROLLER
from timelyml.ml.controller.holdings import by_host
from timelyml.ml.controller.messages import Failed, Fetch, Fetched, Finished
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.hosts import Export, HeldBox, Piece, Pieces
from timelyml.ml.store import Buffer, BufferState, Directory, Entry
from timelyml.runtime.failure import pack_error


@dataclass(slots=True)
class _Fetching:
    """A fetch under way; `num_left` of its hosts have not answered."""

    entry: Entry
    client: int
    fetch: Fetch
    hosts: frozenset[int]
    num_left: int
    pieces: list[Piece] = field(default_factory=list)
    error: bytes | None = None


class Fetches:
    """All fetches of all clients.

    Args:
        directory: Of the buffers.
        outbox: For clients and hosts.
        number: Returns a number that no buffer has.
        held: Returns who has which box of a buffer, of those that can be asked.
        unuse: Lets go of buffers that were fetched.
    """

    def __init__(
        self,
        directory: Directory,
        outbox: Outbox,
        number: Callable[[], int],
        held: Callable[[Buffer], list[HeldBox]],
        unuse: Callable[[list[Entry]], None],
    ) -> None:
        self._directory = directory
        self._outbox = outbox
        self._number = number
        self._held = held
        self._unuse = unuse
        self._fetches: dict[int, _Fetching] = {}

    def begin(self, client: int, fetch: Fetch) -> None:
        """Ask the hosts of a buffer for what a client wants, once it is computed."""
        try:
            entry = self._directory.readable(client, fetch.buffer)
        except HandleError as error:
            self._tell(client, fetch, (), pack_error(error))
            return
        if entry.state is BufferState.FAILED:
            self._tell(client, fetch, (), entry.error)
            return
        self._directory.use([entry], is_exported=True)
        self._ask(entry, client, fetch)

    def take(self, pieces: Pieces) -> None:
        """Take the answer of a host."""
        fetching = self._fetches.get(pieces.target)
        if fetching is None:
            return  # its client is gone, or its island
        fetching.pieces += pieces.pieces
        fetching.error = fetching.error or pieces.error
        fetching.num_left -= 1
        if fetching.num_left == 0:
            self._answer(pieces.target)

    def fail(self, entry: Entry, error: bytes) -> None:
        """Tell whoever fetches a buffer that it will never be."""
        for request, fetching in self._of(entry):
            fetching.error = fetching.error or error
            self._answer(request)

    def leave(self, client: int) -> None:
        """Forget what a client asked for."""
        for request, fetching in list(self._fetches.items()):
            if fetching.client == client:
                del self._fetches[request]
                self._unuse([fetching.entry])

    def lose_host(self, host: int) -> None:
        """Ask anew for what a host was asked for that is dead, of what is elsewhere."""
        asked = [x.entry for x in self._fetches.values() if host in x.hosts]
        for entry in {id(entry): entry for entry in asked}.values():
            self.renew(entry)

    def renew(self, entry: Entry) -> None:
        """Ask the hosts of a buffer that is to come, in place of those before."""
        for request, fetching in self._of(entry):
            del self._fetches[request]
            self._ask(entry, fetching.client, fetching.fetch)

    def _of(self, entry: Entry) -> list[tuple[int, _Fetching]]:
        return [each for each in self._fetches.items() if each[1].entry is entry]

    def _ask(self, entry: Entry, client: int, fetch: Fetch) -> None:
        buffer, request, held = entry.buffer, self._number(), self._held(entry.buffer)
        if not fetch.is_notice:  # of replicas one is enough
            owners = {each.box: each for each in reversed(held)}
            held = list(owners.values())
        asked = by_host(held)
        hosts = frozenset(asked)
        self._fetches[request] = _Fetching(entry, client, fetch, hosts, len(hosts))
        for host, boxes in asked.items():
            wanted = () if fetch.is_notice else tuple(boxes)
            export = Export(fetch.buffer, buffer.type, CONTROLLER, request, wanted)
            self._outbox.book(host).exports.append(export)

    def _answer(self, request: int) -> None:
        fetching = self._fetches.pop(request)
        error = fetching.entry.error or fetching.error
        pieces = () if error is not None else tuple(fetching.pieces)
        self._tell(fetching.client, fetching.fetch, pieces, error)
        self._unuse([fetching.entry])

    def _tell(
        self,
        client: int,
        fetch: Fetch,
        pieces: tuple[Piece, ...],
        error: bytes | None,
    ) -> None:
        number = fetch.buffer
        if not fetch.is_notice:
            self._outbox.tell(client, Fetched(number, pieces, error))
        elif error is None:
            self._outbox.tell(client, Finished(0, (number,), ()))
        else:
            self._outbox.tell(client, Failed(0, (number,), error))
