"""Programs of users, run as they run them: scripts, stdin, signals from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import timelyml

PACKAGES = Path(timelyml.__file__).parents[1]  # where its modules may be compiled
TIMEOUT_S = 60.0


def start(code, *, cwd, argv=("program.py",), keep_stdin=False, **variables):
    """Start a program; `argv` is the script it is in, or "-" for stdin."""
    if argv[0] != "-":
        Path(cwd, argv[0]).write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHONSAFEPATH", None)  # a script finds what lies beside it
    environment |= variables
    process = subprocess.Popen(
        [sys.executable, *argv],
        cwd=cwd,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if argv[0] == "-":
        process.stdin.write(code)
    if not keep_stdin:
        process.stdin.close()
        process.stdin = None
    return process


def finish(process):
    """Return exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def run(code, **options):
    return finish(start(code, **options))


def read_line(process):
    """Return the next line that the program prints."""
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return line.rstrip("\n")
