"""The main of a worker process: `python -m timelyml.runtime.process`.

A fresh interpreter, started by the driver. The first line of its stdin tells it all
that it must know, secrets included; after that stdin only shows, by its end, that
the driver is gone. It never imports the driver's `__main__`.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

from timelyml.exchange import CONTROLLER, CurveKeys, ZmqTransport
from timelyml.runtime.boot import Boot, endpoint_from_map
from timelyml.runtime.launch import make_worker
from timelyml.runtime.loop import drive
from timelyml.runtime.service import ServiceSpec
from timelyml.runtime.shipping import worker_codec
from timelyml.runtime.signals import die_with_parent, ignore_interrupts
from timelyml.runtime.whereabouts import shared_memory
from timelyml.runtime.worker import Worker

EXIT_ORPHANED = 3


class _Watched:
    """A worker whose present step can be timed from another thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._began: float | None = None

    def step(self) -> bool:
        """Step the worker."""
        self._began = time.monotonic()
        try:
            return self._worker.step()
        finally:
            self._began = None

    def has_work(self) -> bool:
        """Return whether it has work of its own."""
        return self._worker.has_work()

    def next_deadline(self) -> float | None:
        """Return the worker's own."""
        return self._worker.next_deadline()

    def activity(self) -> tuple[str, float]:
        """Return what it is doing, and for how many seconds."""
        began = self._began
        busy_s = 0.0 if began is None else time.monotonic() - began
        return self._worker.activity(), busy_s


def main() -> None:
    """Serve as a worker until told to leave, or until the driver is gone."""
    ignore_interrupts()  # Ctrl-C is for the driver to act on
    gc.disable()  # until all is loaded: a tenth of that would be collecting nothing
    faulthandler.enable()  # a crash tells on stderr, and so the driver, where it was
    boot = Boot.from_line(sys.stdin.buffer.readline())
    die_with_parent(boot.parent_id, os.getppid)
    _let_forks_die_too()
    sys.path[:] = boot.sys_path
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # what users print shows at once
    threading.Thread(
        target=_exit_with_stdin, name="timelyml-orphan", daemon=True
    ).start()
    services = [ServiceSpec(**values) for values in boot.services]
    transport = ZmqTransport(
        boot.worker,
        codec=worker_codec(services),
        token=bytes.fromhex(boot.token),
        bind=boot.bind,
        keys=CurveKeys.generate() if boot.bind.startswith("tcp://") else None,
        advertise=boot.advertise,
        silence_s=boot.heartbeat_timeout_s,
    )
    transport.connect(CONTROLLER, endpoint_from_map(boot.controller))
    directory = Path(boot.spill_directory)
    memory = shared_memory(boot.memory_fd)
    worker = make_worker(boot.worker, transport, directory, services, memory)
    # What is loaded by now stays: a full collection would look through all of it, which
    # takes 160 ms with JAX, again and again.
    gc.freeze()
    gc.enable()
    watched = _Watched(worker)
    threading.Thread(
        target=_beat, args=(boot, watched), name="timelyml-heartbeat", daemon=True
    ).start()
    try:
        drive(
            watched,
            transport,
            lambda: worker.is_stopped,
            time.monotonic,
            spin_s=boot.spin_s,
        )
    finally:
        worker.leave()
        transport.close()
    if worker.is_orphaned:
        who = f"worker {boot.worker} of process {boot.parent_id}"
        print(f"{who} lost its link to the controller; it leaves", file=sys.stderr)  # noqa: T201
        os._exit(EXIT_ORPHANED)  # not held up by what user code left running


def _let_forks_die_too() -> None:
    """Ask the same for what user code forks here, which does not inherit it.

    Not for what another thread forks: it would die with that thread.
    """
    process_id, thread = os.getpid(), threading.get_ident()
    forking = process_id

    def before_fork() -> None:
        nonlocal forking
        forking = os.getpid()  # in the child, its parent: that may be gone by then

    def after_fork() -> None:
        if forking != process_id or threading.get_ident() != thread:
            return
        try:
            die_with_parent(process_id, os.getppid)
        except SystemExit:  # Python ignores what a hook raises
            os._exit(EXIT_ORPHANED)

    os.register_at_fork(before=before_fork, after_in_child=after_fork)


def _exit_with_stdin() -> None:
    """Leave when the driver's end of stdin closes: it closed us, or died."""
    # not sys.stdin: its lock, held here, would abort the interpreter's own exit
    while os.read(0, 4096):
        pass
    os._exit(EXIT_ORPHANED)


def _beat(boot: Boot, watched: _Watched) -> None:
    """Write signs of life; a line is short enough to be written whole."""
    while True:
        activity, busy_s = watched.activity()
        line = json.dumps({"activity": activity[:200], "busy_s": busy_s}) + "\n"
        try:
            os.write(boot.heartbeat_fd, line.encode())
        except BlockingIOError:
            pass  # the driver is not reading just now
        except OSError:
            os._exit(EXIT_ORPHANED)
        time.sleep(boot.heartbeat_s)


if __name__ == "__main__":
    main()
