"""A stream that was captured to memory: one tape for each of its shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TAPE_SUFFIX = ".tape"


@dataclass(frozen=True, slots=True)
class Recording:
    """Tapes of a captured stream, by shard; `replay` takes it.

    Attributes:
        tapes: The bytes of each tape, in the format of tape files.
    """

    tapes: tuple[bytes, ...]

    @classmethod
    def of(cls, pieces: Iterable[Iterable[bytes]]) -> Recording:
        """Join what came of each tape."""
        return cls(tuple(b"".join(tape) for tape in pieces))

    def save(self, directory: str | Path) -> None:
        """Write one file for each tape, as `capture` to a directory does."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for shard, tape in enumerate(self.tapes):
            tape_path(directory, shard).write_bytes(tape)

    def __repr__(self) -> str:
        size = sum(map(len, self.tapes))
        return f"<Recording of {len(self.tapes)} tapes, {size} bytes>"


def tape_path(directory: Path, shard: int) -> Path:
    """Return where the tape of a shard is."""
    return directory / f"shard-{shard:05d}{TAPE_SUFFIX}"
