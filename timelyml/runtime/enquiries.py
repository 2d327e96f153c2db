"""Lets a user's other programs ask a driver what its runs wait for: `timelyml why`.

Each session listens on a Unix socket in a directory that only the user may enter. A
question is one line of JSON, and so is the answer; nothing is unpickled. A driver that
cannot listen runs all the same.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timelyml.errors import ConfigError
from timelyml.runtime.options import check_seconds

MAX_LINE_BYTES = 1 << 20
CLIENT_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 1.0
SUFFIX = ".socket"
_CREDENTIALS = struct.Struct("3i")  # process, user, group

Answer = dict[str, Any]


class EnquiryServer:
    """Answers questions about one session, in a thread of its own.

    Args:
        answer: From the seconds that it may take to what is to be said, as JSON can
            hold it; called in that thread.

    Raises:
        OSError: There is no directory to listen in, or no socket to be had.
        ConfigError: The directory is not private.
    """

    def __init__(self, answer: Callable[[float], Answer]) -> None:
        self._answer = answer
        self._listener, self.path = _listen()
        self._thread = threading.Thread(
            target=self._serve, name="timelyml-enquiries", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and remove the socket, and its directory after the last."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's accept
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)

    def _serve(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    return  # closed
                # A question may be anything, and must not end the thread.
                with connection, contextlib.suppress(Exception):
                    connection.settimeout(CLIENT_TIMEOUT_S)
                    self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        if not _is_same_user(connection):
            return
        question = json.loads(_read_line(connection))
        if question.get("ask") == "why":
            answer = self._answer(float(question["timeout_s"]))
            connection.sendall(json.dumps(answer).encode() + b"\n")


def ask_drivers(timeout_s: float = 2.0) -> list[Answer]:
    """Ask every session of this user on this machine what its runs wait for.

    Args:
        timeout_s: How long a driver may take to find out.

    Returns:
        What the sessions said, by process. One that does not answer is there with
        `error` set; what is left of drivers that were killed is removed.

    Raises:
        ConfigError: The directory of the sockets is not private, or the time is none.
    """
    check_seconds("timeout_s", timeout_s, may_be_zero=True)
    directory = _directory()
    if not directory.exists():
        return []
    _check_private(directory)
    answers = []
    for path in sorted(directory.glob(f"*{SUFFIX}"), key=_process_of):
        try:
            answers.append(_ask(path, timeout_s))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)  # its driver is gone
        except (OSError, ValueError) as error:
            what = f"does not answer: {type(error).__name__}: {error}"
            answers.append({"process_id": _process_of(path), "error": what})
    return answers


def private_directory() -> Path:
    """Return the directory of the sockets, made if need be, for this user alone.

    Raises:
        OSError: It cannot be made.
        ConfigError: Others may enter it.
    """
    path = _directory()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(path)
    return path


def _check_private(path: Path) -> None:
    found = path.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not is_private or found.st_uid != os.getuid():
        raise ConfigError(
            f"directory {str(path)!r} is not private; got mode "
            f"{stat.S_IMODE(found.st_mode):o} of user {found.st_uid}; expected 700 of "
            f"user {os.getuid()}; remove it",
            path=str(path),
        )


def _listen() -> tuple[socket.socket, Path]:
    name = f"{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            path = private_directory() / name
            listener.bind(str(path))
        except FileNotFoundError:  # another driver closed just now, with the directory
            path = private_directory() / name
            listener.bind(str(path))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    _sweep(path.parent)
    return listener, path


def _sweep(directory: Path) -> None:
    """Remove the sockets of drivers that were killed."""
    for path in directory.glob(f"*{SUFFIX}"):
        try:
            os.kill(_process_of(path), 0)
        except ProcessLookupError:  # or one of a container that we do not see
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                    path.unlink(missing_ok=True)
        except OSError:
            pass  # somebody else's process by now


def _directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime, "timelyml")
    return Path(tempfile.gettempdir(), f"timelyml-{os.getuid()}")


def _ask(path: Path, timeout_s: float) -> Answer:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s + CLIENT_TIMEOUT_S)
        connection.connect(str(path))
        question = {"ask": "why", "timeout_s": timeout_s}
        connection.sendall(json.dumps(question).encode() + b"\n")
        answer: Answer = json.loads(_read_line(connection))
        return answer


def _read_line(connection: socket.socket) -> bytes:
    """Read one line.

    Raises:
        ValueError: It is too long, or the other end closed before it was over.
    """
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(65536)
        if not part or len(line) > MAX_LINE_BYTES:
            raise ValueError(f"got {len(line)} bytes; expected one line")
        line += part
    return line


def _is_same_user(connection: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # only the mode of the directory guards it
    packed = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    user: int = _CREDENTIALS.unpack(packed)[1]
    return user == os.getuid()


def _process_of(path: Path) -> int:
    number = path.name.partition("-")[0]
    return int(number) if number.isdecimal() else 0
