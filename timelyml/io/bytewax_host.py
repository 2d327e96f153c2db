"""One Bytewax process as the worker sees it: a thread that starts and hears it.

The thread owns the process, the link to it and their folder, and frees all three. The
worker's own thread takes messages from a queue, whose bytes credit bounds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from timelyml.exchange import LinkFailure, Unreadable, ZmqTransport
from timelyml.io.bytewax_boot import GuestBoot
from timelyml.io.bytewax_messages import (
    GUEST,
    HOST,
    Arrived,
    Broken,
    Credit,
    FedBlock,
    Finished,
    GuestMessage,
    feed_codec,
)
from timelyml.runtime.boot import endpoint_to_map
from timelyml.runtime.failure import pack_exception
from timelyml.runtime.scratch import ScratchDirectory
from timelyml.runtime.tracebacks import user_traceback

LOOK_S = 0.2
START_TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 5.0
REFUNDS_PER_CREDIT = 8


@dataclass(frozen=True, slots=True)
class Lost:
    """The process is gone before it came to its end; how, in words."""

    how: str


class GuestProcess:
    """Starts a Bytewax process and receives what it sends, until it is closed.

    Args:
        boot: What the process is told; its link is filled in here.
        build: The pickled function that builds the dataflow.
        wake: Called, from another thread, when something has arrived.
    """

    def __init__(self, boot: GuestBoot, build: bytes, wake: Callable[[], None]) -> None:
        self.peak_queued_bytes = 0
        self._boot = boot
        self._build = build
        self._wake = wake
        self._arrived: deque[GuestMessage] = deque()  # atomic: needs no lock
        self._failure: Broken | Lost | None = None
        self._refunds: deque[int] = deque()
        self._queued_bytes = 0  # sent by the process and not taken in; ours alone
        self._owed = 0  # of the worker's thread
        self._transport: ZmqTransport | None = None
        self._is_closing = False
        self._is_over = False
        self._thread = threading.Thread(
            target=self._serve, name="timelyml-bytewax", daemon=True
        )
        self._thread.start()

    def peek(self) -> GuestMessage | Lost | None:
        """Return the next message without taking it; a failure overtakes all others."""
        if self._failure is not None:
            return self._failure
        return self._arrived[0] if self._arrived else None

    def take(self) -> None:
        """Take the message that `peek` returned; its credit goes back."""
        message = self._arrived.popleft()
        if not isinstance(message, FedBlock):
            return
        self._owed += message.size_bytes
        is_much = self._owed * REFUNDS_PER_CREDIT >= self._boot.credit_bytes
        if is_much or not self._arrived:
            self._refunds.append(self._owed)
            self._owed = 0
            self._wake_thread()

    def close(self) -> None:
        """End the process, if it has not ended, and free everything; idempotent."""
        self._is_closing = True
        self._wake_thread()
        self._thread.join(JOIN_TIMEOUT_S)

    def _wake_thread(self) -> None:
        transport = self._transport
        if transport is not None:
            transport.wake()

    def _serve(self) -> None:
        scratch = ScratchDirectory()
        process: subprocess.Popen[bytes] | None = None
        try:
            bind, token = f"ipc://{scratch.path}", secrets.token_bytes(16)
            transport = self._transport = ZmqTransport(
                HOST, codec=feed_codec(), token=token, bind=bind, linger_s=0.1
            )
            boot = replace(
                self._boot,
                bind=bind,
                token=token.hex(),
                host=endpoint_to_map(transport.endpoint),
            )
            process = _spawn(boot, self._build)
            self._hear_all(transport, process)
        except Exception as error:  # noqa: BLE001  the run must not wait for it in vain
            self._deliver(Lost(f"is not heard any more: {error!r}"))
        finally:
            if process is not None:
                _end(process, 0.0 if self._is_closing else LEAVE_TIMEOUT_S)
            if self._transport is not None:
                self._transport.close()
            scratch.remove()

    def _hear_all(
        self, transport: ZmqTransport, process: subprocess.Popen[bytes]
    ) -> None:
        """Hear the process until it has said its last word, or is gone."""
        start_by = time.monotonic() + START_TIMEOUT_S
        has_come = False
        while not self._is_closing:
            code = process.poll()
            arrived = transport.receive()
            for incoming in arrived:
                message: Any = incoming.message
                if isinstance(message, Arrived):
                    has_come = True
                    transport.connect(GUEST, message.endpoint)
                elif isinstance(message, LinkFailure):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        code = process.wait(LEAVE_TIMEOUT_S)
                    self._deliver(Lost(_describe_exit(code)))
                elif isinstance(message, Unreadable):
                    self._deliver(_not_read(message))
                else:
                    self._deliver(message)
            if self._is_over:
                return
            if code is not None and not arrived:
                self._deliver(Lost(_describe_exit(code)))
                return
            if not has_come and time.monotonic() >= start_by:
                self._deliver(Lost(f"did not come within {START_TIMEOUT_S:g} s"))
                return
            if has_come:
                self._refund(transport)
            if not arrived:
                transport.wait(LOOK_S)

    def _deliver(self, message: GuestMessage | Lost) -> None:
        """Put a message into the queue of the worker's thread."""
        if self._is_over:
            return
        if isinstance(message, FedBlock):
            self._queued_bytes += message.size_bytes
            self.peak_queued_bytes = max(self.peak_queued_bytes, self._queued_bytes)
        self._is_over = isinstance(message, Finished | Broken | Lost)
        if isinstance(message, Broken | Lost):
            self._failure = message
        else:
            self._arrived.append(message)
        self._wake()

    def _refund(self, transport: ZmqTransport) -> None:
        size = sum(self._refunds.popleft() for _ in range(len(self._refunds)))
        if size:
            self._queued_bytes -= size
            transport.send(GUEST, Credit(size))


def _not_read(unreadable: Unreadable) -> Broken:
    error = unreadable.error
    what = "it sent a record that does not unpickle in the worker"
    return Broken(what, pack_exception(error), user_traceback(error))


def _spawn(boot: GuestBoot, build: bytes) -> subprocess.Popen[bytes]:
    path = [entry for entry in boot.sys_path if entry]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "timelyml.io.bytewax_process"],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        start_new_session=True,  # signals of the terminal are for the driver
        bufsize=0,
    )
    assert process.stdin is not None  # noqa: S101  for the type checker
    with contextlib.suppress(BrokenPipeError):  # dead at once: its exit tells why
        rest = memoryview(boot.to_line() + build)
        while rest:
            rest = rest[process.stdin.write(rest) :]
    return process


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Let it leave by itself for a while, then kill it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "broke its link"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
