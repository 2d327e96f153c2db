"""The work of `dispatch` on Monarch: an actor that owns the devices, in a process of its own.

Needs the extra `peers`, which has Monarch for Linux on x86-64. The value
stays with the actor, as on Ray's side: nothing but calls and their ends travel. Messages of
one sender come in their order, so a chain is so many calls in a row, which nobody answers, and
one that is answered; calls run ahead as far as waiting for the last allows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from monarch.actor import Actor, endpoint, this_host

from benchmarks.peers.plain_jax import CHAIN, MAX_UNFINISHED, prepare
from timelyml.runtime.environment import worker_environment

NEEDED = "JAX_PLATFORMS", "NPROC", "XLA_FLAGS"


class Devices(Actor):  # type: ignore[misc]  # Monarch is installed where it is measured
    """An actor: what it computes last is kept here."""

    def __init__(self) -> None:
        self._value, self._compiled = prepare()
        self._launched = 0

    @endpoint  # type: ignore[untyped-decorator]  # as the class
    def step(self) -> None:
        """Take a step."""
        self._run("step")

    @endpoint  # type: ignore[untyped-decorator]  # as the class
    def fused(self) -> None:
        """Take so many steps in one computation."""
        self._run("fused")

    @endpoint  # type: ignore[untyped-decorator]  # as the class
    def ready(self) -> float:
        """Wait for all that was computed; return the value."""
        return float(self._value[0])

    def _run(self, name: str) -> None:
        self._value = self._compiled[name](self._value)
        self._launched += 1
        if self._launched % MAX_UNFINISHED == 0:
            self._value.block_until_ready()


@contextmanager
def start(num_devices: int) -> Iterator[dict[str, Callable[[int], float]]]:
    """Start an actor; what is yielded takes steps there and returns the seconds."""
    environment = worker_environment(os.environ, num_devices=num_devices)
    variables = {name: environment[name] for name in NEEDED}
    processes = this_host().spawn_procs(
        {"processes": 1}, bootstrap=partial(_set, variables)
    )
    try:
        actor: Any = processes.spawn("devices", Devices)
        actor.ready.call_one().get()
        yield {
            "monarch_op_by_op": lambda steps: _calls(actor, actor.step, steps),
            "monarch_chained": lambda steps: _chains(actor, steps // CHAIN),
            "monarch_fused": lambda steps: _calls(actor, actor.fused, steps // CHAIN),
        }
    finally:
        processes.stop().get()


def _set(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def _calls(actor: Any, method: Any, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        last = method.call_one()
    last.get()
    actor.ready.call_one().get()
    return time.perf_counter() - began


def _chains(actor: Any, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        for _ in range(CHAIN - 1):
            actor.step.broadcast()
        last = actor.step.call_one()
    last.get()
    actor.ready.call_one().get()
    return time.perf_counter() - began
