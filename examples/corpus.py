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
    starts: NDArray[np.int64]
    """Where in `content` each file begins, after its zeros."""
    firsts: NDArray[np.int64]
    """How many bytes of text lie before each file."""
    num_bytes: int
    window: int

    @property
    def digest(self) -> str:
        """A digest of all of it: equal only if the text is."""
        return hashlib.blake2b(self.content.tobytes(), digest_size=8).hexdigest()

    def positions(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give where in `content` the n-th byte of text is, for each n."""
        file = np.searchsorted(self.firsts, indices, side="right") - 1
        return self.starts[file] + indices - self.firsts[file]

    def batch(self, indices: NDArray[np.int64]) -> dict[str, NDArray[np.uint8]]:
        """Give contexts `(tokens, window)` and targets `(tokens,)` of bytes of text."""
        chosen = self.positions(indices)
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
        indices = np.random.default_rng([seed, step]).integers(
            self.train.num_bytes, size=batch
        )
        part = batch // num_shards
        return self.train.batch(indices[shard * part : (shard + 1) * part])

    def judged(self, num_tokens: int, *, seed: int) -> dict[str, NDArray[np.uint8]]:
        """Give held-out tokens, the same for every model that is compared."""
        num_bytes = self.held_out.num_bytes
        if num_bytes <= num_tokens:
            return self.held_out.batch(np.arange(num_bytes))
        rng = np.random.default_rng([seed, 2**32])
        return self.held_out.batch(rng.choice(num_bytes, num_tokens, replace=False))


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
    origin = Path(sysconfig.get_path("stdlib")) if source is None else source.resolve()
    train: list[bytes] = []
    held_out: list[bytes] = []
    wanted = [train_bytes, held_out_bytes]
    for index, piece in enumerate(_pieces(origin)):
        part = int(index % _HELD_OUT_EVERY == 0)
        if wanted[part] > 0:
            (held_out if part else train).append(piece)
            wanted[part] -= len(piece)
        elif max(wanted) <= 0:
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
    joined = b"".join(bytes(window) + piece for piece in pieces)
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    firsts = np.cumsum(sizes) - sizes
    starts = firsts + window * np.arange(1, len(pieces) + 1)
    content = np.frombuffer(joined, np.uint8)
    return Text(content, starts, firsts, int(sizes.sum()), window)
