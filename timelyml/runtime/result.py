"""The result of a run: what it collected, by the name of the collecting operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from timelyml.exchange import records_of
from timelyml.progress import Timestamp
from timelyml.runtime.recording import Recording

Batches = list[tuple[Timestamp, int, Any]]
"""(time, shard, payload), as released."""


class Result(Mapping[str, list[Any]]):
    """Collected records by name, in order of time, then of shard.

    The order does not depend on which worker was faster.

    >>> Result({"out": [(1, 0, ["c"]), (0, 1, ["b"]), (0, 0, ["a"])]})["out"]
    ['a', 'b', 'c']
    """

    def __init__(
        self,
        batches: Mapping[str, Batches],
        recordings: Mapping[str, Recording] | None = None,
    ) -> None:
        self._recordings = dict(recordings or {})
        self._batches = {
            name: sorted(items, key=lambda item: item[:2])
            for name, items in batches.items()
        }
        self._records: dict[str, list[Any]] = {}

    def __getitem__(self, name: str) -> list[Any]:
        """Return all records collected under `name`."""
        batches = self._of(name)
        records = self._records.get(name)
        if records is None:
            records = [
                record for _, _, payload in batches for record in records_of(payload)
            ]
            self._records[name] = records
        return records

    def __iter__(self) -> Iterator[str]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __repr__(self) -> str:
        return f"Result({', '.join(self._batches) or 'nothing collected'})"

    def batches(self, name: str) -> list[tuple[Timestamp, Any]]:
        """Return (time, payload) as collected: columns stay columns."""
        return [(time, payload) for time, _, payload in self._of(name)]

    def recording(self, name: str) -> Recording:
        """Return what was captured to memory under `name`."""
        if name not in list(self._recordings):
            raise nothing("captured", name, self._recordings)
        return self._recordings[name]

    def _of(self, name: str) -> Batches:
        if name not in list(self._batches):  # a list: the name may be unhashable
            raise nothing("collected", name, self._batches)
        return self._batches[name]


def nothing(what: str, name: str, names: Iterable[str]) -> KeyError:
    """Return the error of a name under which nothing is collected, or captured."""
    known = ", ".join(map(repr, names)) or "none"
    return KeyError(
        f"nothing is {what} under that name; got {name!r}; expected one of {known}; "
        "correct it"
    )
