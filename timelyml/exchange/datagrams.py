"""Small messages between processes of one host, as datagrams of Unix sockets.

ZeroMQ hands each message to a thread of its own on either side. These take the cores
from the workers that send and wait: 12 us one way. A datagram goes from the thread
that sends straight to the one that looks for it: 4 us. So small messages of `ipc`
links travel as datagrams, as long as the receiver has room for them; all others take
ZeroMQ's way. Sequence numbers are those of the lane either way, and the receiver
brings both ways together again: a datagram says up to which number it may have to wait
for ZeroMQ, so that what is missing otherwise is a gap.

File descriptors come on a socket of their own, beside that. They are taken when a frame
announces them, so no look for messages has to ask.
"""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import struct
from collections.abc import Sequence
from hmac import compare_digest
from pathlib import Path
from typing import Any

from timelyml.exchange.frames import TOKEN_BYTES

DATAGRAM_BYTES = 8192
"""A longer message is left to ZeroMQ, whose threads copy while workers go on."""

_AFTER = struct.Struct("<Q")  # before the frame: the number after ZeroMQ's last
AFTER_BYTES = _AFTER.size
_PAUSE = 16  # messages that go by ZeroMQ once a datagram was not taken
_IPC, _CONTROL = "ipc://", "-control"
_DATAGRAMS, _DESCRIPTORS = "-dgram", "-fds"
_SENDER = struct.Struct("<i")  # behind the token, in the letter beside descriptors
_LETTER_BYTES = TOKEN_BYTES + _SENDER.size
_MAX = 8  # descriptors in a letter; the system closes more
_LETTERS = 64  # at once, whoever writes them


def datagram_path(control: str) -> str | None:
    """Return the path of the datagrams beside the address of the control lane.

    None where there are none: only for `ipc` addresses as transports choose them.

    >>> datagram_path("ipc:///run/0-5f-control")
    '/run/0-5f-dgram'
    >>> datagram_path("tcp://127.0.0.1:5000") is None
    True
    """
    return _beside(control, _DATAGRAMS)


def descriptor_path(control: str) -> str | None:
    """Return the path of the socket for descriptors, where there is one for datagrams."""
    return _beside(control, _DESCRIPTORS)


def _beside(control: str, name: str) -> str | None:
    if not (control.startswith(_IPC) and control.endswith(_CONTROL)):
        return None
    return control.removeprefix(_IPC).removesuffix(_CONTROL) + name


class DatagramInbox:
    """The socket that a transport's peers on the same host send datagrams to."""

    __slots__ = ("_path", "_receive", "_socket", "fd")

    def __init__(self, path: str) -> None:
        """Bind it.

        Raises:
            OSError: The path cannot be bound.
        """
        self._path = path
        self._socket = _new_socket()
        try:
            self._socket.bind(path)
        except OSError:
            self._socket.close()
            raise
        self.fd = self._socket.fileno()
        self._receive: Any = self._socket.recv  # looked up once: 0.1 us less

    def receive(self) -> bytes | None:
        """Return the next datagram, None if there is none; never blocks.

        Of one that is too long only a byte more than what is allowed.
        """
        try:
            datagram: bytes = self._receive(AFTER_BYTES + DATAGRAM_BYTES + 1)
        except BlockingIOError:
            return None
        return datagram

    def close(self) -> None:
        """Close the socket and remove its file; what was not taken is lost."""
        self._socket.close()
        Path(self._path).unlink(missing_ok=True)


class DatagramLink:
    """The way of datagrams to one peer."""

    __slots__ = ("_limit_bytes", "_pause", "_send", "_socket")

    def __init__(self, path: str) -> None:
        """Open it.

        Raises:
            OSError: Nobody listens there.
        """
        self._socket = _new_socket()
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        space = self._socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF)
        self._limit_bytes = min(DATAGRAM_BYTES, space)
        self._pause = 0
        self._send: Any = self._socket.send

    def send(self, frame: bytes, after: int) -> bool:
        """Send a message of one frame; False if it has to go by ZeroMQ.

        `after` is the number that follows the last message of the lane by ZeroMQ.

        It has to if it is large, and if the receiver is behind or gone; the next ones
        do then as well, since each would have to wait there for the one before.
        """
        if self._pause:
            self._pause -= 1
            return False
        if len(frame) > self._limit_bytes:
            return False
        try:
            self._send(_AFTER.pack(after) + frame)
        except OSError:  # most often a queue is full
            self._pause = _PAUSE
            return False
        return True

    def close(self) -> None:
        """Close the socket; what was sent is with the receiver."""
        self._socket.close()


def send_descriptors(
    path: str, token: bytes, sender: int, descriptors: Sequence[int]
) -> None:
    """Send duplicates of descriptors to who listens there; never blocks.

    Raises:
        OSError: Nobody does, or it has not taken earlier ones yet.
    """
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as socket:
        socket.setblocking(False)
        socket.connect(path)
        letter = token + _SENDER.pack(sender)
        sockets.send_fds(socket, [letter], list(descriptors))


class DescriptorInbox:
    """The socket at which descriptors come."""

    def __init__(self, path: str, token: bytes) -> None:
        """Bind it.

        Raises:
            OSError: The path cannot be bound.
        """
        self._path = path
        self._token = token
        self._come: dict[int, list[int]] = {}  # the last of each sender
        self._socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            self._socket.bind(path)
        except OSError:
            self._socket.close()
            raise

    def take(self, sender: int) -> list[int]:
        """Return what a sender sent last, to be closed by the caller; [] if nothing."""
        self._receive_all()
        return self._come.pop(sender, [])

    def _receive_all(self) -> None:
        with contextlib.suppress(OSError):  # most often nothing more is there
            for _ in range(_LETTERS):
                self._receive()

    def _receive(self) -> None:
        letter, found, flags, _ = sockets.recv_fds(
            self._socket, _LETTER_BYTES + 1, _MAX, sockets.MSG_CMSG_CLOEXEC
        )
        is_whole = len(letter) == _LETTER_BYTES and not flags & sockets.MSG_CTRUNC
        if not (is_whole and compare_digest(letter[:TOKEN_BYTES], self._token)):
            close_all(found)
            return
        (sender,) = _SENDER.unpack_from(letter, TOKEN_BYTES)
        close_all(self._come.pop(sender, []))
        self._come[sender] = found

    def close(self) -> None:
        """Close the socket, remove its file, and close what nobody took."""
        self._receive_all()
        for found in self._come.values():
            close_all(found)
        self._come.clear()
        self._socket.close()
        Path(self._path).unlink(missing_ok=True)


def after_of(datagram: bytes) -> int:
    """Return up to which number a datagram may have to wait for ZeroMQ."""
    after: int = _AFTER.unpack_from(datagram)[0]
    return after


def datagram_link(control: str) -> DatagramLink | None:
    """Return the way to the peer with that control address, if it offers one."""
    path = datagram_path(control)
    if path is not None:
        with contextlib.suppress(OSError):
            return DatagramLink(path)
    return None


def datagram_inbox(control: str) -> DatagramInbox | None:
    """Return the socket of the transport with that control address, if it can be."""
    path = datagram_path(control)
    if path is not None:
        with contextlib.suppress(OSError):  # too long a path: all goes by ZeroMQ
            return DatagramInbox(path)
    return None


def _new_socket() -> sockets.socket:
    new = sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM)
    new.setblocking(False)
    return new


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
