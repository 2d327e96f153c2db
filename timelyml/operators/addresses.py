"""Where captured streams go and come from: directories, and sockets."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from timelyml.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")

Place: TypeAlias = "str | Path | Sequence[str]"
"""A directory, or one or several addresses: `tcp://host:port` or `unix:/path`."""

RULE = "tcp://host:port or unix:/path, for each"
MAX_PATH_BYTES = 107  # of a Unix socket, on Linux
IN_PROGRESS = (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN, errno.EALREADY)
NOT_THERE_YET = (errno.ECONNREFUSED, errno.ENOENT)


@dataclass(frozen=True, slots=True)
class Address:
    """Where one socket listens."""

    text: str
    family: int
    target: Any

    def socket(self) -> socket.socket:
        """Make a socket of the right kind that does not block."""
        made = socket.socket(self.family, socket.SOCK_STREAM)
        made.setblocking(False)
        return made


def addresses_of(operator: str, place: Any) -> list[Address] | None:
    """Return addresses; None if `place` is a directory.

    Raises:
        ConfigError: It is neither, or an address cannot be used.
    """
    if isinstance(place, Path):
        return None
    if not isinstance(place, str | Sequence):
        raise _unusable(operator, place, RULE)
    texts = [place] if isinstance(place, str) else list(place)
    is_address = [isinstance(t, str) and t.startswith(("tcp:", "unix:")) for t in texts]
    if isinstance(place, str) and place and "://" not in place and not is_address[0]:
        return None
    if not texts or not all(is_address):
        raise _unusable(operator, place, RULE)
    return [_parsed(operator, text) for text in texts]


def _parsed(operator: str, text: str) -> Address:
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if not path:
            raise _unusable(operator, text, "a path after unix:")
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise _unusable(
                operator, text, f"a path of at most {MAX_PATH_BYTES} bytes after unix:"
            )
        return Address(text, socket.AF_UNIX, path)
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise _unusable(operator, text, "tcp://host:port with a port from 1 to 65535")
    if host not in LOOPBACK:  # nothing is encrypted, and nobody is authenticated
        raise _unusable(
            operator, text, "a loopback host; use a tunnel between machines"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return Address(text, family, (host, int(port)))


def _unusable(operator: str, place: Any, rule: str) -> ConfigError:
    return ConfigError(
        f"operator {operator!r} has no such place; got {place!r}; expected a directory, "
        f"or addresses: {rule}",
        operator=operator,
        place=str(place),
    )
