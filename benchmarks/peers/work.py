"""The work of each case, which does not depend on the engine: its data, and its size."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LINES_PER_BATCH = 100
RECORDS_PER_BATCH = 1000
ROWS_PER_BATCH = 100_000
NUM_WORDS = 5_000
NUM_KEYS = 10_000
ITEM_BYTES = 100_000
SECONDS_PER_ITEM = 0.001
"""Of the slow sink."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything; a total, shared by the partitions.

    Attributes:
        lines: Of ten words each.
        records: For keyed sums, CSV and redistribution.
        rows: Of columns, for the keyed sum of arrays.
        epochs: Opened without waiting.
        waits: Epochs that are waited for.
        items: Arrays of 100 kB, in one epoch, for a sink that takes 1 ms each.
    """

    lines: int = 60_000
    records: int = 600_000
    rows: int = 8_000_000
    epochs: int = 3_000
    waits: int = 1_500
    items: int = 1_500

    def scaled(self, factor: float) -> Size:
        """Return a size as many times as large, of at least one batch each."""
        return Size(
            max(2 * LINES_PER_BATCH, int(self.lines * factor)),
            max(2 * RECORDS_PER_BATCH, int(self.records * factor)),
            max(2 * ROWS_PER_BATCH, int(self.rows * factor)),
            max(20, int(self.epochs * factor)),
            max(20, int(self.waits * factor)),
            max(20, int(self.items * factor)),
        )


def lines(size: Size, part: int, num_parts: int) -> Iterator[list[str]]:
    """Batches of lines of ten words, some of which are much more frequent."""
    chance = random.Random(part)
    words = [f"word{n}" for n in range(NUM_WORDS)]
    weights = [1 / (n + 1) for n in range(NUM_WORDS)]
    for _ in range(size.lines // LINES_PER_BATCH // num_parts):
        drawn = chance.choices(words, weights, k=10 * LINES_PER_BATCH)
        yield [
            " ".join(drawn[start : start + 10]) for start in range(0, len(drawn), 10)
        ]


def pairs(size: Size, part: int, num_parts: int) -> Iterator[list[tuple[str, int]]]:
    """Batches of pairs of a key and a number."""
    chance = random.Random(part)
    keys = [f"key{n}" for n in range(NUM_KEYS)]
    for _ in range(size.records // RECORDS_PER_BATCH // num_parts):
        drawn = chance.choices(keys, k=RECORDS_PER_BATCH)
        yield [(key, len(key) + n) for n, key in enumerate(drawn)]


def numbers(size: Size, part: int, num_parts: int) -> Iterator[list[int]]:
    """Batches of consecutive numbers."""
    for batch in range(part, size.records // RECORDS_PER_BATCH, num_parts):
        start = batch * RECORDS_PER_BATCH
        yield list(range(start, start + RECORDS_PER_BATCH))


def columns(size: Size, part: int, num_parts: int) -> Iterator[dict[str, Any]]:
    """Blocks of a column of keys and one of values."""
    chance = np.random.default_rng(part)
    for _ in range(size.rows // ROWS_PER_BATCH // num_parts):
        yield {
            "key": chance.integers(0, NUM_KEYS, ROWS_PER_BATCH),
            "value": chance.random(ROWS_PER_BATCH),
        }


def ticks(size: Size, part: int, num_parts: int) -> Iterator[list[Any]]:
    """Batches of one record each, for the next partition."""
    target = str((part + 1) % num_parts)
    for number in range(size.epochs):
        yield [(target, number)]


def arrays(size: Size, part: int, num_parts: int) -> Iterator[list[Any]]:
    """Batches of one large array each, all from partition 0 for the last."""
    target = str(num_parts - 1)
    for number in range(size.items if part == 0 else 0):
        yield [(target, np.full(ITEM_BYTES // 8, number))]


Make = Callable[[Size, int, int], Iterator[Any]]
"""From a size, a partition and the number of partitions to its batches."""

STORED: dict[str, Make] = {
    "word_count": lines,
    "keyed_sum": pairs,
    "keyed_sum_arrays": columns,
    "map_and_redistribute": numbers,
    "epochs_pipelined": ticks,
}
"""By case: what makes the batches of a partition that are made before it is read."""


def store(case: str, size: Size, folder: Path, num_parts: int) -> None:
    """Leave the data of a case in a folder, for all runs of both engines.

    Partitions then take equally long to come to their first read, in any process.
    """
    if case == "csv_keyed_sum":
        write_csv(size, folder, num_parts)
    elif case in STORED:
        for part in range(num_parts):
            batches = list(STORED[case](size, part, num_parts))
            with _stored_at(folder, part).open("wb") as file:
                pickle.dump(batches, file, pickle.HIGHEST_PROTOCOL)


def stored(folder: Path, part: int, _: int) -> Iterator[Any]:
    """The batches of a partition."""
    with _stored_at(folder, part).open("rb") as file:
        batches: list[Any] = pickle.load(file)
    return iter(batches)


def _stored_at(folder: Path, part: int) -> Path:
    return folder / f"batches-{part}.pickle"


def csv_paths(folder: Path, num_parts: int) -> list[Path]:
    """Where the CSV files are, one for each process."""
    return [folder / f"pairs-{part}.csv" for part in range(num_parts)]


def write_csv(size: Size, folder: Path, num_parts: int) -> None:
    """Write the CSV files."""
    for part, path in enumerate(csv_paths(folder, num_parts)):
        with path.open("w") as file:
            file.write("key,value\n")
            for batch in pairs(size, part, num_parts):
                file.writelines(f"{key},{value}\n" for key, value in batch)


def summed_by_key(blocks: list[dict[str, Any]]) -> dict[int, float]:
    """The bare numpy work of the keyed sum: each block by itself, then all of them."""
    parts = [_sums(block["key"], block["value"]) for block in blocks]
    keys, sums = _sums(*map(np.concatenate, zip(*parts, strict=True)))
    return dict(zip(keys.tolist(), sums.tolist(), strict=True))


def block_sums(block: dict[str, Any]) -> list[tuple[str, float]]:
    """Sums of one block, for an engine that wants pairs of a string and a number."""
    keys, sums = _sums(block["key"], block["value"])
    return list(zip(map(str, keys.tolist()), sums.tolist(), strict=True))


def _sums(keys: Any, values: Any) -> tuple[Any, Any]:
    """The fastest that numpy has for integers: counted in place, or else sorted."""
    lowest, highest = int(keys.min()), int(keys.max())
    if highest - lowest < 16 * len(keys):
        places = keys - lowest
        found = np.flatnonzero(np.bincount(places))
        return found + lowest, np.bincount(places, values)[found]
    unique, inverse = np.unique(keys, return_inverse=True)
    return unique, np.bincount(inverse, values)
