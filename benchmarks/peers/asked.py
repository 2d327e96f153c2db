"""A process beside the benchmark that runs things when asked, and says how long it took."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

Asked: TypeAlias = Callable[[str, int], float]
"""Runs what is named so many times; returns the seconds."""


@contextmanager
def asked_process(module: str, environment: Mapping[str, str]) -> Iterator[Asked]:
    """Start a module of `benchmarks.peers` that reads lines and answers with seconds."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.peers.{module}"],
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    ask, answer = process.stdin, process.stdout

    def run(what: str, count: int) -> float:
        print(what, count, file=ask, flush=True)
        return float(answer.readline())

    try:
        yield run
    finally:
        ask.close()
        process.wait()
        answer.close()
