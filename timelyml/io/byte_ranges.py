"""Lines of files, shared between shards by ranges of bytes.

The files stand one after the other, and each shard gets an equal range of their bytes:
it reads the lines that start in it. So one large file is read by all shards, and no line
is read twice.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

from timelyml.errors import ConfigError, PayloadError

BYTES_PER_READ = 1 << 18

Paths: TypeAlias = str | Path | Iterable[str | Path]
"""One path, a pattern with wildcards, or several."""


class Lines(NamedTuple):
    """Some whole lines of one file, without their ends.

    Attributes:
        path: The file.
        start: Where they start, in all files one after the other.
        lines: As bytes.
        end: Where to read on, in the same way.
    """

    path: Path
    start: int
    lines: list[bytes]
    end: int


def expand(operator: str, paths: Paths) -> tuple[Path, ...]:
    """Return the files that are meant, in order.

    Raises:
        ConfigError: There is none, or one does not exist.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    found: list[Path] = []
    for each in given:
        text = str(each)
        if glob.has_magic(text) and not Path(text).exists():
            found += sorted(map(Path, glob.glob(text, recursive=True)))  # noqa: PTH207  keeps absolute patterns
        else:
            found.append(Path(text))
    missing = [str(path) for path in found if not path.is_file()]
    if missing or not found:
        raise ConfigError(
            f"operator {operator!r} has no file to read; got {missing or given!r}; "
            f"expected paths of files, or a pattern that some match; correct the path",
            operator=operator,
            paths=[str(path) for path in found],
        )
    return tuple(path.resolve() for path in found)


@dataclass(frozen=True, slots=True)
class FileRange:
    """The part of one file that belongs to a shard.

    Attributes:
        path: The file.
        base: Where it starts, in all files one after the other.
        start: First byte of the part, in the file.
        stop: End of the part.
    """

    path: Path
    base: int
    start: int
    stop: int


def share_of(paths: Iterable[Path], index: int, number: int) -> Iterator[FileRange]:
    """Yield the parts of files that share `index` of `number` reads."""
    sized = [(path, path.stat().st_size) for path in paths]
    total = sum(size for _, size in sized)
    low, high = index * total // number, (index + 1) * total // number
    base = 0
    for path, size in sized:
        start, stop = max(low - base, 0), min(high - base, size)
        if start < stop:
            yield FileRange(path, base, start, stop)
        base += size


def lines_of(part: FileRange, position: int) -> Iterator[Lines]:
    """Yield the lines that start in the part, from `position` on.

    Args:
        part: Of a file.
        position: Where to read on, in all files one after the other; anything up to
            the part's start is its start.
    """
    with part.path.open("rb") as file:
        at = max(position - part.base, part.start)
        if at == part.start:
            at = _next_start(file, at)
        file.seek(at)
        rest = b""
        while at < part.stop:
            data = file.read(min(BYTES_PER_READ, part.stop - at - len(rest)))
            # The last line of the part may end beyond it.
            if at + len(rest) + len(data) >= part.stop or not data:
                data += b"" if data.endswith(b"\n") else file.readline()
            block = rest + data
            cut = block.rfind(b"\n") + 1
            is_end = not data or at + len(block) >= part.stop
            if is_end and cut < len(block):
                cut = len(block)  # the file's last line has no end
            if cut:
                lines = block[:cut].removesuffix(b"\n").split(b"\n")
                yield Lines(part.path, part.base + at, lines, part.base + at + cut)
            at += cut
            rest = block[cut:]
            if not data:
                break


def cut_lines(found: Lines, most: int | None) -> Iterator[tuple[list[bytes], int]]:
    """Yield up to `most` of the lines at a time, and where they end."""
    size = most or len(found.lines)
    end = found.start
    for start in range(0, len(found.lines), size):
        lines = found.lines[start : start + size]
        end += sum(map(len, lines)) + len(lines)
        yield lines, min(end, found.end)  # the file's last line may have no end


def line_at(path: Path, offset: int) -> int:
    """Return which line, from 1, starts at a byte of a file; reads all before it."""
    number = 1
    with path.open("rb") as file:
        while data := file.read(min(BYTES_PER_READ, offset - file.tell())):
            number += data.count(b"\n")
    return number


def _next_start(file: IO[bytes], at: int) -> int:
    """Return the first start of a line at `at` or after it."""
    if not at:
        return 0
    file.seek(at - 1)
    file.readline()
    return file.tell()


def decoded(lines: list[bytes], path: Path, start: int, encoding: str) -> list[str]:
    """Return lines as text, without carriage returns.

    Args:
        lines: As bytes.
        path: Their file.
        start: Where they start in it.
        encoding: Of the text.

    Raises:
        PayloadError: They are not of that encoding; names file and line.
    """
    data = b"\n".join(lines)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = line_at(path, start + data.rfind(b"\n", 0, error.start) + 1)
        raise PayloadError(
            f"file {str(path)!r} is not of encoding {encoding!r} in line {line}; got "
            f"{error.reason} for {data[error.start : error.end]!r}; expected text; pass "
            f"encoding=",
            path=str(path),
            line=line,
        ) from None
    if "\r" in text:
        text = text.replace("\r\n", "\n").removesuffix("\r")
    return text.split("\n")
