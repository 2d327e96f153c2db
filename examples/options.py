"""Options that the examples have in common, and what is wrong with them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

Steps: TypeAlias = Annotated[int | None, typer.Option(help="training steps")]
Width: TypeAlias = Annotated[int | None, typer.Option(help="width of the model")]
Layers: TypeAlias = Annotated[
    int | None, typer.Option(help="blocks between embedding and head")
]
BatchSize: TypeAlias = Annotated[int | None, typer.Option(help="sequences of a step")]
Data: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        exists=True, help="text, file or directory; default: Python's own sources"
    ),
]
Seed: TypeAlias = Annotated[int, typer.Option(help="of weights and batches")]
Small: TypeAlias = Annotated[bool, typer.Option("--small", help="a toy, in seconds")]
Verify: TypeAlias = Annotated[
    bool, typer.Option("--verify", help="compare with one JAX program")
]
Picture: TypeAlias = Annotated[
    Path | None, typer.Option(help="where to draw what ran when")
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="print the figures as one JSON object")
]

PICTURES = (".png", ".svg", ".pdf", ".jpg")


def given(
    defaults: Mapping[str, Any] | None = None, /, **options: object
) -> dict[str, Any]:
    """Return the options that are not None, over defaults of a toy if it is one."""
    chosen = {name: value for name, value in options.items() if value is not None}
    return {**(defaults or {}), **chosen}


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Let what is wrong with settings, text or picture be an error of the command."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def checked_picture(path: Path) -> Path:
    """Return where a picture can be saved; makes its directory.

    Raises:
        ValueError: It cannot be saved there, or not in that format.
    """
    if path.suffix.lower() not in PICTURES:
        raise ValueError(
            f"--picture has no known format; got {str(path)!r}; expected a name that "
            f"ends in one of {', '.join(PICTURES)}; rename it"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error.strerror) from error
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        raise _unwritable(path, "no file that can be replaced")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _unwritable(path, "a directory that is not writable")
    return path


def _unwritable(path: Path, why: str | None) -> ValueError:
    return ValueError(
        f"--picture cannot be saved; got {str(path)!r}: {why}; expected a file in a "
        "directory that you may write to; name another"
    )


def check_size(
    option: str, value: int, *, least: int = 1, most: float = math.inf
) -> None:
    """Refuse a number that is out of range.

    Raises:
        ValueError: It is.
    """
    if isinstance(value, bool) or not least <= value <= most:
        rule = f"{least} or more" if most == math.inf else f"{least} to {most}"
        raise ValueError(
            f"{option} is out of range; got {value!r}; expected an integer, {rule}; "
            "correct it"
        )
