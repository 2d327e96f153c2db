"""Examples as commands: what they refuse, and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


def refusal_of(main: Callable[..., None], arguments: Sequence[str]) -> str:
    """Return what a command says of arguments, in one line, which it must refuse."""
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "400", "TERM": "dumb"})
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


def figures_of(example: str, arguments: Sequence[str | Path]) -> dict[str, Any]:
    """Run an example as a program of its own and return the figures that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{example}", *arguments, "--json"],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures
