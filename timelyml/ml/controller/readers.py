"""Which work reads a buffer where it lies, and has no place in the order yet."""

from __future__ import annotations

from timelyml.ml.controller.work import Work


class Readers:
    """Work that has to be ordered before another may take the memory of a buffer."""

    def __init__(self) -> None:
        self._by_buffer: dict[int, dict[str, Work]] = {}

    def of(self, number: int) -> list[Work]:
        """Return the work that reads a buffer."""
        return list(self._by_buffer.get(number, {}).values())

    def add(self, work: Work) -> None:
        """Take note of what work reads."""
        for number in _read(work):
            self._by_buffer.setdefault(number, {})[work.program] = work

    def remove(self, work: Work) -> None:
        """Take note that work is ordered, or will never be."""
        for number in _read(work):
            readers = self._by_buffer.get(number, {})
            readers.pop(work.program, None)
            if not readers:
                self._by_buffer.pop(number, None)


def _read(work: Work) -> list[int]:
    if not work.exported:
        return [entry.buffer.number for entry in work.args]
    pairs = zip(work.args, work.is_placed, strict=True)
    return [entry.buffer.number for entry, is_placed in pairs if is_placed]
