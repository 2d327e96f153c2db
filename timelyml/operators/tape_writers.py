"""Where the bytes of a tape go: to the driver, to a file, or to a socket."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from timelyml.errors import TapeError
from timelyml.operators.addresses import IN_PROGRESS, NOT_THERE_YET, Address
from timelyml.runtime.recording import tape_path
from timelyml.runtime.tape import Frames

CONNECT_TIMEOUT_S = 10.0
WAITING_BYTES = 1 << 20


class Writer(Protocol):
    """Takes frames, and writes them without blocking for others."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be written."""

    @property
    def has_room(self) -> bool:
        """Whether more may wait."""

    @property
    def num_written(self) -> int:
        """Bytes that are the tape so far, where it can go on from them."""

    def put(self, frames: Frames) -> None:
        """Take frames, in order."""

    def go_on(self, num_written: int) -> None:
        """Go on behind what was written elsewhere.

        Raises:
            TapeError: That is not here.
        """

    def flush(self) -> None:
        """Write what can be written."""

    def finish(self) -> None:
        """Close what is complete; only when idle."""

    def close(self) -> None:
        """Give up what is not complete."""


class MemoryWriter:
    """Sends the bytes to the driver."""

    is_idle = has_room = True
    num_written = 0  # the driver has what was sent

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send

    def go_on(self, num_written: int) -> None:
        """Do nothing: what comes is put behind what came."""

    def put(self, frames: Frames) -> None:
        """Send the frames at once."""
        self._send(b"".join(frames))

    def flush(self) -> None:
        """Do nothing: nothing waits."""

    def finish(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class FileWriter:
    """Writes a file, which gets its name when it is complete."""

    is_idle = has_room = True

    def __init__(self, directory: Path, shard: int, *, overwrite: bool) -> None:
        self._path = tape_path(directory, shard)
        self._part = self._path.with_suffix(self._path.suffix + ".part")
        directory.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and not overwrite:
            raise TapeError(
                f"tape {str(self._path)!r} is there already; got a run to capture again; "
                f"expected a directory without it; choose another, or pass "
                f"overwrite=True",
                tape=str(self._path),
            )
        self._file: IO[bytes] | None = None
        self.num_written = 0

    def go_on(self, num_written: int) -> None:
        """Cut the incomplete tape where it is known to be whole, and go on there."""
        size = self._part.stat().st_size if self._part.exists() else 0
        if size < num_written:
            raise TapeError(
                f"tape {str(self._part)!r} cannot go on here; got {size} bytes of it; "
                f"expected {num_written}, as were written elsewhere; use a directory "
                f"that all workers share",
                tape=str(self._part),
            )
        self._file = self._part.open("r+b")
        self._file.truncate(num_written)
        self._file.seek(num_written)
        self.num_written = num_written

    def put(self, frames: Frames) -> None:
        """Write the frames."""
        if self._file is None:
            self._file = self._part.open("wb")
        self._file.writelines(frames)
        self._file.flush()  # before anybody is told that it is written
        self.num_written += sum(memoryview(frame).nbytes for frame in frames)

    def flush(self) -> None:
        """Do nothing: the operating system takes it all."""

    def finish(self) -> None:
        """Close the file and give it its name."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._part.replace(self._path)

    def close(self) -> None:
        """Leave what was written under the name of an incomplete tape."""
        if self._file is not None:
            self._file.close()
            self._file = None


class SocketWriter:
    """Sends to whoever listens at an address, once it does."""

    def __init__(self, address: Address, now: Callable[[], float]) -> None:
        self._address = address
        self._now = now
        self._socket: Any = address.socket()
        self._is_connected = False
        self._deadline = now() + CONNECT_TIMEOUT_S
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self.num_written = 0

    def go_on(self, num_written: int) -> None:
        """Refuse: nobody else can go on with a connection."""
        self._socket.close()
        raise TapeError(
            f"the captured stream cannot go on to {self._address.text!r}; got "
            f"{num_written} bytes that a connection elsewhere carried; expected a "
            f"directory or memory; capture to one of them",
            address=self._address.text,
        )

    def put(self, frames: Frames) -> None:
        """Queue the frames."""
        for frame in frames:
            view = memoryview(frame).cast("B")
            self._waiting.append(view)
            self._waiting_bytes += view.nbytes

    @property
    def is_idle(self) -> bool:
        """Whether everything is sent."""
        return self._is_connected and not self._waiting

    @property
    def has_room(self) -> bool:
        """Whether little waits."""
        return self._waiting_bytes < WAITING_BYTES

    def flush(self) -> None:
        """Send what the socket takes."""
        if self._is_connected or self._connect():
            self._send()

    def finish(self) -> None:
        """Close the socket: the tape is over."""
        self._socket.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _connect(self) -> bool:
        code = self._socket.connect_ex(self._address.target)
        if code in (0, 106):  # EISCONN: the one under way has come to be
            self._is_connected = True
        elif code in NOT_THERE_YET and self._now() < self._deadline:
            self._socket.close()  # a socket that was refused cannot be used again
            self._socket = self._address.socket()
        elif code not in IN_PROGRESS or self._now() >= self._deadline:
            raise TapeError(
                f"nobody takes the captured stream at {self._address.text!r}; got error "
                f"{code} for {CONNECT_TIMEOUT_S:g} s; expected a replay that listens; "
                f"start it first",
                address=self._address.text,
            )
        return self._is_connected

    def _send(self) -> None:
        try:
            while self._waiting:
                sent = self._socket.send(self._waiting[0])
                self._waiting_bytes -= sent
                if sent == self._waiting[0].nbytes:
                    self._waiting.popleft()
                else:
                    self._waiting[0] = self._waiting[0][sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            raise TapeError(
                f"the captured stream cannot be sent to {self._address.text!r}; got "
                f"{error}; expected a replay that reads to the end; see what ended it",
                address=self._address.text,
            ) from error


def close_all(writers: list[Writer]) -> None:
    """Give up all of them."""
    for writer in writers:
        with contextlib.suppress(OSError):
            writer.close()
