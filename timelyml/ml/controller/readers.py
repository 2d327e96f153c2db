"""Which calls read a buffer where it lies, and have no place in the order yet."""

from __future__ import annotations

from timelyml.ml.controller.records import CallRecord


class Readers:
    """Calls that have to be ordered before another may take the memory of a buffer."""

    def __init__(self) -> None:
        self._by_buffer: dict[int, dict[str, CallRecord]] = {}

    def of(self, number: int) -> list[CallRecord]:
        """Return the calls that read a buffer."""
        return list(self._by_buffer.get(number, {}).values())

    def add(self, call: CallRecord) -> None:
        """Take note of what a call reads."""
        for number in _read(call):
            self._by_buffer.setdefault(number, {})[call.program] = call

    def remove(self, call: CallRecord) -> None:
        """Take note that a call is ordered, or will never be."""
        for number in _read(call):
            readers = self._by_buffer.get(number, {})
            readers.pop(call.program, None)
            if not readers:
                self._by_buffer.pop(number, None)


def _read(call: CallRecord) -> list[int]:
    pairs = zip(call.args, call.is_placed, strict=True)
    return [entry.buffer.number for entry, is_placed in pairs if is_placed]
