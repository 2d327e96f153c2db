"""Text for training and for judging: which files, and which bytes at which step.

Files are split, not positions, so nothing that is held out was seen in part. A
batch is a pure function of seed and step, whatever the number of shards.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_HELD_OUT_EVERY = 10
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests"}
_SUFFIXES = {".py", ".txt", ".md", ".rst", ".c", ".h", ".rs", ".js", ".html", ".tex"}


@dataclass(frozen=True, slots=True)
class Text:
    """Files joined, each after `window` zero bytes that stand for its beginning."""

    content: NDArray[np.uint8]
    positions: NDArray[np.int64]
    """Indices into `content` of the bytes to predict: all but the zeros."""
    window: int
    num_files: int

    def batch(self, chosen: NDArray[np.int64]) -> dict[str, NDArray[np.uint8]]:
        """Give contexts `(tokens, window)` and targets `(tokens,)` at positions."""
        back = np.arange(-self.window, 0)
        return {
            "context": self.content[chosen[:, None] + back],
            "target": self.content[chosen],
        }


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text to train on and text of other files to judge by."""

    train: Text
    held_out: Text
    source: str

    def step_batch(
        self, step: int, *, batch: int, seed: int, shard: int = 0, num_shards: int = 1
    ) -> dict[str, NDArray[np.uint8]]:
        """Give one shard's part of the batch of a step."""
        chosen = np.random.default_rng([seed, step]).integers(
            len(self.train.positions), size=batch
        )
        part = batch // num_shards
        mine = chosen[shard * part : (shard + 1) * part]
        return self.train.batch(self.train.positions[mine])

    def judged(self, num_tokens: int, *, seed: int) -> dict[str, NDArray[np.uint8]]:
        """Give held-out tokens, the same for every model that is compared."""
        positions = self.held_out.positions
        if len(positions) > num_tokens:
            rng = np.random.default_rng([seed, 2**32])
            positions = rng.choice(positions, size=num_tokens, replace=False)
        return self.held_out.batch(positions)


def load_corpus(
    source: Path | None, *, window: int, train_bytes: int, held_out_bytes: int
) -> Corpus:
    """Read text files and split them by file.

    Args:
        source: A file or a directory; None takes the sources of the standard
            library of the running interpreter. A single file is cut into blocks
            that stand for files.
        window: Bytes of context before each predicted byte.
        train_bytes: Stop after so many bytes of training text.
        held_out_bytes: Stop after so many bytes of held-out text.

    Raises:
        ValueError: if there is too little text for both parts.
    """
    origin = Path(sysconfig.get_path("stdlib")) if source is None else source
    train: list[bytes] = []
    held_out: list[bytes] = []
    sizes = [0, 0]
    for index, piece in enumerate(_pieces(origin)):
        is_held_out = index % _HELD_OUT_EVERY == 0
        size = sizes[is_held_out]
        if size < (held_out_bytes if is_held_out else train_bytes):
            (held_out if is_held_out else train).append(piece)
            sizes[is_held_out] += len(piece)
        elif min(train_bytes - sizes[0], held_out_bytes - sizes[1]) <= 0 and (
            sizes[0] >= train_bytes and sizes[1] >= held_out_bytes
        ):
            break
    if not train or not held_out:
        raise ValueError(
            f"text: too few files in {str(origin)!r}; got {len(train) + len(held_out)}; "
            "expected at least 2 with text; name a directory with more files"
        )
    return Corpus(_join(train, window), _join(held_out, window), str(origin))


def _pieces(origin: Path) -> Iterator[bytes]:
    """Yield the contents of files, in an order that depends on their names only."""
    if origin.is_file():
        content = origin.read_bytes()
        block = max(1, min(65536, len(content) // 20))
        for start in range(0, len(content), block):
            yield content[start : start + block]
        return
    names = [
        path
        for path in origin.rglob("*")
        if path.suffix in _SUFFIXES
        and path.is_file()
        and not _SKIPPED.intersection(path.relative_to(origin).parts)
    ]
    names.sort(key=lambda path: _shuffled(path.relative_to(origin)))
    for path in names:
        content = path.read_bytes()
        if content:
            yield content


def _shuffled(name: Path) -> bytes:
    return hashlib.blake2b(name.as_posix().encode(), digest_size=8).digest()


def _join(pieces: list[bytes], window: int) -> Text:
    content = np.frombuffer(
        b"".join(bytes(window) + piece for piece in pieces), np.uint8
    )
    is_text = np.ones(len(content), bool)
    start = 0
    for piece in pieces:
        is_text[start : start + window] = False
        start += window + len(piece)
    return Text(content, np.flatnonzero(is_text), window, len(pieces))
