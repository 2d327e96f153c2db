"""CPU time of the controller for a call, to 512 hosts and 2,048 devices, by simulation.

The very core that clusters run, with what hosts and clients would send it played back;
what goes to hosts is encoded as it is for the wire. A call is one computation, or a
program of 16, on all hosts at once; each takes what the one before it returned. A client
that runs ahead sends calls, and hosts report, eight at a time. One process without
sockets or other threads: the time is that of the core and of encoding alone. Beside each
other: 1 and 4 devices on each host.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.report import Report
from timelyml.exchange import Codec
from timelyml.ml.controller import (
    AskSlice,
    Call,
    CallProgram,
    Core,
    Put,
    Register,
    RegisterProgram,
    Release,
)
from timelyml.ml.controller.outbox import ToHost
from timelyml.ml.functions import (
    ArrayType,
    Computation,
    LogicalMesh,
    MemoryNeeds,
    Settings,
)
from timelyml.ml.hosts import Compiled, Done, Orders, Present, Reports
from timelyml.ml.hosts.messages import MESSAGES
from timelyml.ml.programs import Arg, Place, Program, Ref, SliceNode, Value
from timelyml.ml.programs import Call as CallNode
from timelyml.ml.programs.lowering import run_passes
from timelyml.runtime.messages import MESSAGE_TYPES, ServiceMessage

CLIENT = 1
AHEAD = 8
"""Calls that a client sends, and hosts report, together."""
CHAIN = 16
DEVICE_NS = 100_000
AIM_US = 30.0
MAX_CHANGE = 1.05
"""From 1 to 4 devices a host."""


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks controller", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--calls", type=int, default=400, help="at one host")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 8, 32, 128, 512])
    options = parser.parse_args(argv)
    table = Report("Controller: CPU time and bytes, for each host and call, simulated")
    for what in ("call", "program"):
        for num_hosts in options.hosts:
            calls = AHEAD * max(1, options.calls // num_hosts // AHEAD)
            sides = [Side(num_hosts, per_host, what) for per_host in (1, 4)]
            for side in sides:
                side.run(calls)
            rounds = [
                tuple(side.run(calls) for side in sides) for _ in range(options.rounds)
            ]
            add_rows(table, f"{what}_{num_hosts}_hosts", num_hosts, rounds)
    table.show(as_json=options.json)
    return 0


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a call: seconds of the controller, and bytes to all hosts."""

    cpu_s: float
    size_bytes: float


class Side:
    """A controller with one client, and one island of hosts that only answer."""

    def __init__(self, num_hosts: int, per_host: int, what: str) -> None:
        size = num_hosts * per_host
        self._hosts = range(num_hosts)
        self._core = Core({"island": list(self._hosts)})
        self._codec = Codec((*MESSAGE_TYPES, *MESSAGES))
        self._next = 1 << 40
        self._core.join(CLIENT)
        for host in self._hosts:
            self._core.heard(host, Present("cpu", "cpu", per_host), 0.0)
        self._say(AskSlice(1, ("x",), (size,)))
        (self._slice,) = self._core.slices
        of, spec = ArrayType((size,), "float32", 4), ("x",)
        made = Computation(
            name="step", identity="step", mesh=LogicalMesh(("x",), (size,)),
            settings=Settings(), platform="cpu", stablehlo=b"", calling_convention=0,
            in_types=(of,), in_specs=(spec,), out_types=(of,), out_specs=(spec,),
        )  # fmt: skip
        self._identity = made.identity
        self._say(Register(made.identity, self._slice, pickle.dumps(made)))
        self._newest = self._new()
        array = np.zeros(size, np.float32)
        self._say(Put(self._newest, self._slice, of, spec, array))
        for host in self._hosts:
            needs = MemoryNeeds(4, 4, 0, 0)
            self._core.heard(host, Compiled(made.identity, self._slice, needs), 0.0)
        self._is_program = what == "program"
        if self._is_program:
            program = self._chain(made, Value(of, spec, self._slice), per_host)
            self._say(RegisterProgram(1, pickle.dumps(program), (), False))
        self._core.flush()

    def run(self, num_calls: int) -> Cost:
        """Play so many calls; return what each cost."""
        size_bytes, cpu_s = 0, 0.0
        for _ in range(num_calls // AHEAD):
            messages = [each for _ in range(AHEAD) for each in self._call()]
            began = time.process_time()
            for message in messages:
                self._say(message)
            while True:
                sequences, size = self._send()
                size_bytes += size
                cpu_s += time.process_time() - began
                if not sequences:
                    break
                reports = Reports(
                    tuple(Done(each, DEVICE_NS, (), ()) for each in sequences)
                )
                began = time.process_time()
                for host in self._hosts:
                    self._core.heard(host, reports, 0.0)
        return Cost(cpu_s / num_calls, size_bytes / num_calls)

    def _chain(self, made: Computation, value: Value, per_host: int) -> Program:
        nodes: list[Any] = [Arg(0, "x", value)]
        nodes += [CallNode(made, self._slice, (Ref(each),)) for each in range(CHAIN)]
        slices = (SliceNode(self._slice, made.mesh, "cpu"),)
        traced = Program("chain", slices, tuple(nodes), (Ref(CHAIN),), 1)
        devices = [(host, i) for host in self._hosts for i in range(per_host)]
        place = Place(
            "island",
            tuple(f"{host}:{index}" for host, index in devices),
            tuple(str(host) for host, _ in devices),
        )
        return run_passes(traced, {self._slice: place}).program

    def _call(self) -> tuple[Any, Release]:
        """Return a call of what the last one returned, and that this is let go."""
        before, self._newest = self._newest, self._new()
        taken, made = (before,), (self._newest,)
        if self._is_program:
            return CallProgram(1, taken, made), Release(taken)
        return Call(self._identity, self._slice, taken, made), Release(taken)

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _say(self, message: Any) -> None:
        self._core.handle(CLIENT, message, 0.0)

    def _send(self) -> tuple[list[int], int]:
        """Encode what goes to hosts; return what is launched, and the bytes."""
        sequences: list[int] = []
        size_bytes = 0
        for effect in self._core.flush():
            if not isinstance(effect, ToHost):
                continue
            body, buffers = self._codec.encode(ServiceMessage("ml", effect.body))
            size_bytes += len(body) + sum(map(len, buffers))
            if effect.host == 0 and isinstance(effect.body, Orders):
                sequences += [each.sequence for each in effect.body.tickets]
        return sequences, size_bytes


def add_rows(
    table: Report, name: str, num_hosts: int, rounds: Sequence[tuple[Cost, ...]]
) -> None:
    """Add what was measured with so many hosts."""
    one, four = zip(*rounds, strict=True)
    cpu_us = median(each.cpu_s for each in four) / num_hosts * 1e6
    change = median(b.cpu_s / a.cpu_s for a, b in rounds)
    table.add(
        f"{name}_cpu_us",
        cpu_us,
        "us",
        target=f"at most {AIM_US:g} us, 4 devices within 1.05 of 1",
        is_met=cpu_us <= AIM_US and change <= MAX_CHANGE,
        four_devices_to_one=change,
        bytes_to_host=four[0].size_bytes / num_hosts,
        bytes_at_one_device=one[0].size_bytes / num_hosts,
    )
