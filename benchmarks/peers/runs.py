"""Running one case on one engine, in processes of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import work
from benchmarks.peers.connectors import Notebook

TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Side:
    """What one engine is to run: a case, how much of it, and where notes go.

    Attributes:
        case: Its name.
        size: Of the work.
        num_processes: That share it.
        data: Folder with the stored data of the case.
        folder: For notes of this run.
    """

    case: str
    size: work.Size
    num_processes: int
    data: str
    folder: str

    @classmethod
    def from_map(cls, values: dict[str, Any]) -> Side:
        """Return what `asdict` took apart."""
        return cls(**{**values, "size": work.Size(**values["size"])})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        seconds: From the first read to the end.
        sums: What came out, by key.
        cpu_seconds: As `seconds`, of the CPU time of all processes.
        queued_bytes: The most that a sink was behind its source.
        memory_bytes: By how much the processes grew, in all.
    """

    seconds: float
    sums: dict[str, float]
    cpu_seconds: float = 0.0
    queued_bytes: int = 0
    memory_bytes: int = 0


def run(
    engine: str, case: str, size: work.Size, num_processes: int, data: Path
) -> Outcome:
    """Run a case on an engine, with the data that was stored for it.

    Raises:
        RuntimeError: A process failed; it told why on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        side = Side(case, size, num_processes, str(data), folder)
        start = _bytewax if engine == "bytewax" else _timelyml
        outputs = [_output(process) for process in start(side)]
        notebook = Notebook(Path(folder))
        first = notebook.read("first-")
        began = min(note["at"] for note in first)
        sums = {key: value for output in outputs for key, value in output["items"]}
        sums["all"] = sum(notebook.read("sum-"))
        return Outcome(
            max(output["ended"] for output in outputs) - began,
            sums,
            _cpu_seconds(first, outputs),
            peak_queued(notebook.read("made-"), notebook.read("taken-")),
            _memory(notebook.read("memory-")),
        )


def peak_queued(made: list[Any], taken: list[Any]) -> int:
    """Return the most bytes that had been made and not taken at any time.

    >>> peak_queued([[(0.0, 10), (1.0, 30)]], [[(0.5, 10), (2.0, 30)]])
    20
    """
    changes: list[tuple[float, int]] = []
    for sign, noted in ((1, made), (-1, taken)):
        for series in noted:
            before = 0
            for time, so_far in series:
                changes.append((time, sign * (so_far - before)))
                before = so_far
    peak = queued = 0
    for _, change in sorted(changes):
        queued += change
        peak = max(peak, queued)
    return peak


def _cpu_seconds(first: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> float:
    """CPU time of all processes, from the first read in each that reads."""
    total = 0.0
    began = {str(note["process"]): note["cpu"] for note in first if "cpu" in note}
    for output in outputs:
        since = {**output.get("cpu_before", {}), **began}
        total += sum(
            cpu - since.get(process, 0.0) for process, cpu in output["cpu"].items()
        )
    return total


def _memory(noted: list[dict[str, int]]) -> int:
    growth: dict[int, int] = {}
    for each in noted:
        process = each["process"]
        growth[process] = max(growth.get(process, 0), each["growth"])
    return sum(growth.values())


def _bytewax(side: Side) -> list[subprocess.Popen[bytes]]:
    addresses: list[str] = []
    reserved = [socket.socket() for _ in range(side.num_processes)]
    if side.num_processes > 1:
        for each in reserved:  # bound, not listening: the process still can
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in reserved]
    processes = [
        _spawn(
            "bytewax_side", {"side": asdict(side), "index": n, "addresses": addresses}
        )
        for n in range(side.num_processes)
    ]
    for each in reserved:
        each.close()
    return processes


def _timelyml(side: Side) -> list[subprocess.Popen[bytes]]:
    return [_spawn("timelyml_side", {"side": asdict(side)})]


def _spawn(module: str, argument: dict[str, Any]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"benchmarks.peers.{module}", json.dumps(argument)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def _output(process: subprocess.Popen[bytes]) -> Any:
    output, _ = process.communicate(timeout=TIMEOUT_S)
    if process.returncode:
        raise RuntimeError(f"a process failed with code {process.returncode}")
    return json.loads(output)
