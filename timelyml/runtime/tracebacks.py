"""Tracebacks as text: the user's frames only, with source lines where known.

Made in the worker, where the traceback is alive; completed by the driver, which
knows the source of a notebook cell that no file holds.
"""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

from timelyml.errors import shortened, summary_of

MAX_TRACEBACK_CHARACTERS = 100_000

_PACKAGE = str(Path(__file__).resolve().parents[1])
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in .+$')


def user_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this package that lead to it."""
    first = error.__traceback__
    trimmed = first
    while trimmed is not None and _is_ours(trimmed.tb_frame.f_code.co_filename):
        trimmed = trimmed.tb_next
    shown = first if trimmed is None else trimmed
    try:
        text = "".join(traceback.format_exception(type(error), error, shown))
    except BaseException:  # noqa: BLE001  attributes of the exception may raise anything
        text = "".join(traceback.format_tb(shown)) + summary_of(error)
    return shortened(text, MAX_TRACEBACK_CHARACTERS)


def with_source_lines(text: str) -> str:
    """Add source lines that only this process knows.

    >>> with_source_lines('  File "nowhere", line 1, in f')
    '  File "nowhere", line 1, in f'
    """
    lines = text.split("\n")
    completed: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        completed.append(line)
        frame = _FRAME.match(line)
        if frame is None or following.startswith("    "):
            continue
        if source := linecache.getline(frame["file"], int(frame["line"])).strip():
            completed.append(f"    {source}")
    return "\n".join(completed)


def _is_ours(filename: str) -> bool:
    return filename.startswith(_PACKAGE)
