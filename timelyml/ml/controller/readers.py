"""Which work reads a buffer where it lies, and has no place in the order yet.

It has to be ordered before other work may take the memory of the buffer.
"""

from __future__ import annotations

from timelyml.ml.controller.work import Work
from timelyml.ml.store import Entry


def begin_reading(work: Work) -> None:
    """Take note of what work reads."""
    name = work.program
    for entry in _read(work):
        if entry.readers is None:
            entry.readers = {name: None}
        else:
            entry.readers[name] = None


def end_reading(work: Work) -> None:
    """Take note that work is ordered, or will never be."""
    name = work.program
    for entry in _read(work):
        readers = entry.readers
        if readers is None:
            continue
        readers.pop(name, None)
        if not readers:
            entry.readers = None


def _read(work: Work) -> list[Entry]:
    if not work.exported:
        return work.args
    pairs = zip(work.args, work.is_placed, strict=True)
    return [entry for entry, is_placed in pairs if is_placed]
