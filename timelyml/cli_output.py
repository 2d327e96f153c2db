"""What all commands share: exit codes, and what goes to stdout and stderr.

Exit codes: 0, the run is complete; 1, it failed; 2, it was refused before anything
started (arguments, target, graph, or code that cannot be shipped); 130, interrupted.
Records go to stdout and everything else to stderr, so that output can be piped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from timelyml.errors import (
    ConfigError,
    GraphError,
    OperatorError,
    PlacementError,
    ShippingError,
    TimelyError,
)

FAILED, REFUSED, INTERRUPTED = 1, 2, 130


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors into one line on stderr and an exit code.

    Only the user's own code is worth a traceback here: an error of timelyml says in
    its message who did what, and what to do.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except OperatorError as error:
        typer.echo(error.values.get("traceback_text", "").rstrip(), err=True)
        complain(error)
        raise typer.Exit(FAILED) from None
    except (ConfigError, GraphError, PlacementError, ShippingError) as error:
        complain(error)
        raise typer.Exit(REFUSED) from None
    except TimelyError as error:
        complain(error)
        raise typer.Exit(FAILED) from None


def show(line: object) -> None:
    """Write a line to stdout, or leave if it cannot be written.

    Whoever reads a pipe no more is told nothing; a full disk is an error. Python is not
    to try again, at its end, to write what is left.
    """
    try:
        typer.echo(line)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            complain(f"stdout cannot be written; got {error}; expected room for it")
        raise typer.Exit(FAILED) from None


def complain(error: object) -> None:
    """Write a line to stderr that says whose it is."""
    typer.echo(f"timelyml: {error}", err=True)
