"""Who may reach a ZeroMQ socket: private directories, loopback, CURVE keys."""

from __future__ import annotations

import ipaddress
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from timelyml.errors import ConfigError

_IPC_PATH_BYTES = 107  # sun_path of a Unix socket, without the final zero


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CURVE key pair in Z85; the secret one is not shown."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> CurveKeys:
        """Return a new random pair."""
        public, secret = zmq.curve_keypair()
        return cls(public, secret)


def public_key_of(secret: bytes) -> bytes:
    """Return the public key that belongs to a secret one.

    Raises:
        ConfigError: It is no CURVE key.
    """
    try:
        return bytes(zmq.curve_public(secret))
    except (ValueError, zmq.ZMQError) as error:
        raise ConfigError(
            f"a secret key is none; got {type(error).__name__}; expected a CURVE key in "
            f"Z85; make new ones",
            option="key",
        ) from None


def checked_ipc_directory(bind: str) -> Path:
    """Return the directory of `ipc://<directory>`, private to this user.

    Raises:
        ConfigError: It is no directory, somebody else's, or open to others.
    """
    path = Path(bind.removeprefix("ipc://"))
    try:
        status = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"the socket directory cannot be used; got {str(path)!r}: {error.strerror}; "
            f"expected an existing directory; make it with mode 0700",
            path=str(path),
        ) from error
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
        raise ConfigError(
            f"the socket directory is not private; got {str(path)!r} with mode "
            f"{mode:04o} of user {status.st_uid}; expected a directory of user "
            f"{os.getuid()} with mode 0700; use another or correct it",
            path=str(path),
            mode=mode,
        )
    return path


def ipc_address(directory: Path, name: str) -> str:
    """Return the address of a socket file in the directory.

    Raises:
        ConfigError: The path is longer than Unix sockets allow.
    """
    path = str(directory / name)
    if len(os.fsencode(path)) > _IPC_PATH_BYTES:
        raise ConfigError(
            f"a socket path is too long; got {path!r}; expected at most "
            f"{_IPC_PATH_BYTES} bytes; use a shorter directory",
            path=path,
        )
    return f"ipc://{path}"


def check_tcp_bind(bind: str, keys: CurveKeys | None) -> None:
    """Refuse a tcp address other than loopback if there are no keys.

    Raises:
        ConfigError: Anyone on the network could connect.
    """
    host = bind.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if keys is None and not _is_loopback(host):
        raise ConfigError(
            f"a tcp address is open to the network without keys; got {bind!r}; "
            f"expected loopback, or CURVE keys; pass keys=CurveKeys.generate()",
            bind=bind,
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # an interface or host name
