"""Who is let in over the network: the keys of a server, and what peers need of them.

A server has CURVE keys and a token. Whoever is to reach it gets its public key and the
token, as one line of text: without the public key no handshake succeeds, and without
the token no frame is read. The line is a secret, so no error and no `repr` shows it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path

from timelyml.errors import ConfigError
from timelyml.exchange.frames import TOKEN_BYTES
from timelyml.exchange.security import (
    CurveKeys,
    check_tcp_bind,
    checked_ipc_directory,
    ipc_address,
    public_key_of,
)
from timelyml.exchange.transport import Endpoint, Lane

_Z85_BYTES = 40
_CHECK_BYTES = 4
_ACCESS, _SERVER = "timelyml-key-", "timelyml-server-"
_ANY_PORT = "*"


@dataclass(frozen=True, slots=True)
class AccessKey:
    """What a peer needs to be let in: the server's public key, and the token."""

    public: bytes = field(repr=False)
    token: bytes = field(repr=False)

    def to_text(self) -> str:
        """Return it as one line, for a file or a variable."""
        return _packed(_ACCESS, self.public, self.token)

    @classmethod
    def of(cls, key: str | Path) -> AccessKey:
        """Read a key, or the file that has it.

        Raises:
            ConfigError: It is none, was cut short, or the file is for others to read.
        """
        text = str(key).strip()
        if not text.startswith(_ACCESS):
            text = _read_private(Path(key))
        return cls(*_unpacked(_ACCESS, text))


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The keys of a server, its secret one included."""

    curve: CurveKeys = field(repr=False)
    token: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> ServerKeys:
        """Return new ones."""
        return cls(CurveKeys.generate(), secrets.token_bytes(TOKEN_BYTES))

    @classmethod
    def kept_in(cls, path: Path) -> ServerKeys:
        """Return those of a file, which is made if it is not there.

        Raises:
            ConfigError: It holds none, or is for others to read.
        """
        if not path.exists():
            keys = cls.generate()
            write_private(path, _packed(_SERVER, keys.curve.secret, keys.token) + "\n")
            return keys
        secret, token = _unpacked(_SERVER, _read_private(path))
        return cls(CurveKeys(public_key_of(secret), secret), token)

    @property
    def access(self) -> AccessKey:
        """What peers need of them."""
        return AccessKey(self.curve.public, self.token)


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, in place of one that is there."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def tcp_endpoint(address: str, public_key: bytes | None = None) -> Endpoint:
    """Return both lanes of `tcp://host:port`: bulk has the port after the given one.

    Raises:
        ConfigError: It is no such address.
    """
    host, port = split_tcp(address)
    if port == _ANY_PORT:
        raise _no_address(address)
    lanes = [f"tcp://{host}:{int(port) + lane}" for lane in range(2)]
    return Endpoint(lanes[0], lanes[1], public_key)


def split_tcp(address: str) -> tuple[str, str]:
    """Return the host and the port, or `*`, of `tcp://host:port`.

    Raises:
        ConfigError: It is no such address.

    >>> split_tcp("tcp://[::1]:7077")
    ('[::1]', '7077')
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    is_port = port == _ANY_PORT or (port.isdecimal() and 0 < int(port) < 65535)
    if not address.startswith("tcp://") or not host or not is_port:
        raise _no_address(address)
    return host, port


def own_address_towards(host: str) -> str:
    """Return the address of this machine that another one sees it under.

    Nothing is sent: the system says by which interface it would be.

    Raises:
        ConfigError: The name of the host is not known.

    >>> own_address_towards("127.0.0.1")
    '127.0.0.1'
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(
            host.strip("[]"), 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"host {host!r} cannot be reached; got {error.strerror or error}; expected "
            f"a name or an address that is known here; correct it",
            option="address",
        ) from error
    return f"[{own}]" if ":" in own else own


def _packed(mark: str, key: bytes, token: bytes) -> str:
    payload = key + token
    checked = payload + _check(payload)
    return mark + base64.urlsafe_b64encode(checked).decode("ascii")


def _unpacked(mark: str, text: str) -> tuple[bytes, bytes]:
    text = text.strip()
    try:
        checked = base64.urlsafe_b64decode(text.removeprefix(mark))
    except ValueError:
        checked = b""
    payload = checked[:-_CHECK_BYTES]
    is_whole = len(payload) == _Z85_BYTES + TOKEN_BYTES
    if (
        not text.startswith(mark)
        or not is_whole
        or checked != payload + _check(payload)
    ):
        raise ConfigError(
            f"a key is none; got a text of {len(text)} characters; expected one that a "
            f"server wrote, which begins with {mark!r}, whole; copy it again",
            option="key",
        )
    return payload[:_Z85_BYTES], payload[_Z85_BYTES:]


def _check(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()[:_CHECK_BYTES]


def _read_private(path: Path) -> str:
    """Read a file of secrets. Its name may be a mistaken secret, so it is not shown."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"a key cannot be read; got {type(error).__name__} for a text of "
            f"{len(str(path))} characters; expected the key itself, which begins with "
            f"{_ACCESS!r}, or the path of a file that holds it; correct it",
            option="key",
        ) from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"a file of keys is for others to read; got {str(path)!r} with mode "
            f"{stat.S_IMODE(mode):04o}; expected 0600; make new keys, and keep them so",
            option="key",
        )
    return text


def _no_address(address: str) -> ConfigError:
    return ConfigError(
        f"an address cannot be used; got {address!r}; expected tcp://HOST:PORT, with a "
        f"port from 1 to 65534, as the next one is used too; correct it",
        option="address",
    )


def addresses_of(
    index: int, bind: str, keys: CurveKeys | None
) -> tuple[list[str], CurveKeys | None]:
    """Return the address of each lane and the keys that they need.

    Raises:
        ConfigError: `bind` is none that a transport takes.
    """
    if bind.startswith("ipc://"):
        directory = checked_ipc_directory(bind)
        nonce = secrets.token_hex(4)  # so that a restarted peer never inherits a link
        names = [f"{index}-{nonce}-{lane.name.lower()}" for lane in Lane]
        return [ipc_address(directory, name) for name in names], keys
    if bind.startswith("tcp://"):
        check_tcp_bind(bind, keys)
        keys = keys or CurveKeys.generate()
        if bind.endswith(":*"):
            return [bind, bind], keys
        endpoint = tcp_endpoint(bind)
        return [endpoint.control, endpoint.bulk], keys
    raise ConfigError(
        f"a transport cannot bind; got {bind!r}; expected ipc://<directory> or "
        f"tcp://<address>:<port>; use one of these",
        bind=bind,
    )


def advertised(bound: str, host: str | None) -> str:
    """Return the address that peers connect to, with the host that they know."""
    if host is None or not bound.startswith("tcp://"):
        return bound
    return f"tcp://{host}:{bound.rpartition(':')[2]}"
