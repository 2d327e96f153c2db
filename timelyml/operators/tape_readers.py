"""Where the bytes of tapes come from: memory, files, or whoever connects to a socket."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from timelyml.errors import TapeError
from timelyml.exchange import Codec
from timelyml.operators.addresses import Address
from timelyml.runtime.tape import Event, Label, Unpacker

BYTES_PER_READ = 1 << 20
CLOSED = -1  # the descriptor of a socket that is


class Tape(Protocol):
    """Events of one tape, in order."""

    def next(self) -> Event | None:
        """Return the next event; None if there is none yet.

        Raises:
            StopIteration: The tape is over.
        """

    def close(self) -> None:
        """Free what is open."""


class _Events:
    """Events of a tape whose bytes `read` brings: None for nothing yet, b"" at the end."""

    def __init__(
        self, codec: Codec, where: str, read: Callable[[], bytes | None]
    ) -> None:
        self._where = where
        self._read = read
        self._unpacker = Unpacker(codec, where)
        self._events: deque[Event] = deque()

    def next(self) -> Event | None:
        """Return the next event; None if there is none yet."""
        while not self._events:
            data = self._read()
            if data is None:
                return None
            if not data:
                if not self._unpacker.is_between_events:
                    raise TapeError(
                        f"tape {self._where} breaks off; got its end in the middle of "
                        f"an event; expected a whole one; capture it again",
                        tape=self._where,
                    )
                raise StopIteration
            self._events.extend(self._unpacker.feed(data))
        return self._events.popleft()


class BytesTape:
    """A tape in memory."""

    def __init__(self, codec: Codec, where: str, data: bytes) -> None:
        self._events = _Events(codec, where, self._read)
        self._rest: bytes = data

    def next(self) -> Event | None:
        """Return the next event; None if there is none yet."""
        return self._events.next()

    def _read(self) -> bytes:
        data, self._rest = self._rest, b""
        return data

    def close(self) -> None:
        """Forget the rest."""
        self._rest = b""


class FileTape:
    """A tape in a file."""

    def __init__(self, codec: Codec, path: Path) -> None:
        self._events = _Events(codec, repr(str(path)), self._read)
        self._path = path
        self._file: IO[bytes] | None = None

    def next(self) -> Event | None:
        """Return the next event; None if there is none yet."""
        return self._events.next()

    def _read(self) -> bytes:
        if self._file is None:
            self._file = self._path.open("rb")
        return self._file.read(BYTES_PER_READ)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class SocketTape:
    """A tape from one connection."""

    def __init__(self, codec: Codec, where: str, connection: Any) -> None:
        self._events = _Events(codec, where, self._read)
        self._where = where
        self._connection = connection

    def next(self) -> Event | None:
        """Return the next event; None if there is none yet."""
        return self._events.next()

    def _read(self) -> bytes | None:
        try:
            data: bytes = self._connection.recv(BYTES_PER_READ)
        except BlockingIOError:
            return None
        except OSError as error:
            raise TapeError(
                f"tape {self._where} breaks off; got {error}; expected its end; see what "
                f"ended the run that captures",
                tape=self._where,
            ) from error
        return data

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Listener:
    """Takes the connections of one address, as many as their labels announce."""

    def __init__(self, codec: Codec, address: Address) -> None:
        self._codec = codec
        self._address = address
        self._num_taken = 0
        self._num_expected = 1
        self._socket = address.socket()
        try:
            if isinstance(address.target, str):
                _remove_abandoned(address.target)
            self._socket.bind(address.target)
            if isinstance(address.target, str):
                Path(address.target).chmod(0o600)  # before anybody can connect
            self._socket.listen(128)
        except OSError as error:
            self._socket.close()
            raise TapeError(
                f"a replay cannot listen at {address.text!r}; got {error}; expected a "
                f"free address; choose another",
                address=address.text,
            ) from error

    @property
    def is_over(self) -> bool:
        """Whether every connection has come."""
        return self._num_taken >= self._num_expected

    def accept(self) -> SocketTape | None:
        """Return the tape of a new connection, if there is one."""
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return None
        connection.setblocking(False)
        self._num_taken += 1
        where = f"{self._num_taken} at {self._address.text!r}"
        return SocketTape(self._codec, where, connection)

    def learn(self, label: Label) -> None:
        """Take from a label how many connections come."""
        self._num_expected = label.num_tapes_here
        if self.is_over:
            self.close()

    def close(self) -> None:
        """Listen no more; the path may be another's from then on."""
        if self._socket.fileno() == CLOSED:
            return
        if isinstance(self._address.target, str):
            with contextlib.suppress(OSError):
                Path(self._address.target).unlink()
        self._socket.close()


def _remove_abandoned(path: str) -> None:
    """Remove the socket that a killed program left; whatever else is there stays.

    A datagram socket that connects there is refused in one way where a stream socket
    listens, which never hears of it, and in another where nobody has it open any more.
    """
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inquirer:
        code = inquirer.connect_ex(path)
    if code == errno.ECONNREFUSED:
        Path(path).unlink(missing_ok=True)
