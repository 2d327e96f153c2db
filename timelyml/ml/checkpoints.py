"""Checkpoints: what a training step has learnt by a step, one file for each.

A file is a magic number, a version, the length of a header, a digest of all that follows,
the header (JSON: step, names, types and shapes), and the arrays. It is written beside its
place, flushed to disk and then renamed: under its own name there is a whole checkpoint or
none, whenever a machine stops. Arrays are whole, whatever shards held parts of them, and
carry the names that JAX gives to the leaves of the unsharded trees.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from timelyml.errors import CheckpointError, ConfigError

SUFFIX = ".checkpoint"
MAGIC = b"timelyml checkpoint\n"
VERSION = 1

_HEAD = struct.Struct("<HQ32s")  # version, length of the header, digest
_MAX_HEADER_BYTES = 1 << 28

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was learnt from the first `step` times of a stream.

    Attributes:
        step: How many times it was learnt from: the next one to learn from.
        params: Whole parameters by the names of their leaves.
        state: Of the optimiser, as for the unsharded tree of parameters.
        about: What the writer said of itself, JSON.
        source: The file.
    """

    step: int
    params: Arrays
    state: Arrays
    about: Mapping[str, Any] = field(default_factory=dict)
    source: str = "memory"


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where and how often a training step saves what it has learnt.

    One shard writes, on the machine of the worker that has it; with several machines the
    directory must be one that they share. The last step is saved as well.

    Attributes:
        directory: Gets a file for each step that is saved; made if it is missing.
        every: Save after each so many times of the stream.
        keep: How many files stay; older ones are removed.
        about: Goes into each file, as JSON: settings, to be compared on resumption.
    """

    directory: str | Path
    every: int
    keep: int = 2
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for option, value in (("every", self.every), ("keep", self.keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"checkpoints cannot be made; got {option} {value!r}; expected an "
                    "integer, 1 or more; correct it",
                    option=option,
                )
        try:
            json.dumps(dict(self.about))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"checkpoints cannot be described; got about {self.about!r}: {error}; "
                "expected what JSON can hold; convert it",
                option="about",
            ) from error

    def check_free(self, resumed: Checkpoint | None = None) -> None:
        """Refuse a directory with checkpoints that a run would not continue.

        Their steps would be taken for newer ones than its own.

        Raises:
            CheckpointError: There are such, of any step or after the one resumed from.
        """
        first = 0 if resumed is None else resumed.step + 1
        found = [
            path for path in _files_in(Path(self.directory)) if _step_of(path) >= first
        ]
        if found:
            wanted = "none there" if resumed is None else f"none after step {first - 1}"
            raise CheckpointError(
                f"checkpoints of another run are in the way; got {str(found[0])!r}; "
                f"expected {wanted}; resume from the newest, remove them, or name "
                "another directory",
                path=str(found[0]),
            )

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, flush it to disk, and remove files beyond `keep`.

        Raises:
            CheckpointError: It cannot be written: the disk is full, say. Those that
                were there stay.
        """
        directory = Path(self.directory)
        path = directory / f"step-{checkpoint.step:09d}{SUFFIX}"
        partial = path.with_suffix(".partial")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                _write(file, checkpoint)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            _flush_names(directory)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise CheckpointError(
                f"checkpoint of step {checkpoint.step} cannot be written; got "
                f"{error.strerror or error} for {str(path)!r}; expected a directory "
                "with room that may be written to; make room, or name another",
                path=str(path),
            ) from error
        for old in _files_in(directory)[: -self.keep]:
            with contextlib.suppress(OSError):  # another time
                old.unlink()
        return path


def load_checkpoint(source: str | Path) -> Checkpoint:
    """Read a checkpoint, the newest one if `source` is a directory.

    Raises:
        CheckpointError: There is none, or it is torn, damaged or of another version.
    """
    path = Path(source)
    if path.is_dir():
        files = _files_in(path)
        if not files:
            raise CheckpointError(
                f"there is no checkpoint; got directory {str(path)!r} without one; "
                f"expected files that end in {SUFFIX}; name another",
                path=str(path),
            )
        path = files[-1]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint cannot be read; got {error.strerror or error} for "
            f"{str(path)!r}; expected a file or a directory of them; name another",
            path=str(path),
        ) from error
    return _parsed(content, path)


def _files_in(directory: Path) -> list[Path]:
    """Give the checkpoints of a directory, oldest step first."""
    found = directory.glob(f"step-*{SUFFIX}")
    return sorted(found, key=lambda path: (len(path.name), path.name))


def _step_of(path: Path) -> int:
    step = path.name.removeprefix("step-").removesuffix(SUFFIX)
    return int(step) if step.isdigit() else 0


def _write(file: IO[bytes], checkpoint: Checkpoint) -> None:
    named = [
        (kind, name, np.require(array, requirements="C"))
        for kind, arrays in (("params", checkpoint.params), ("state", checkpoint.state))
        for name, array in arrays.items()
    ]
    header = json.dumps(
        {
            "step": checkpoint.step,
            "about": dict(checkpoint.about),
            "arrays": [
                (kind, name, array.dtype.name, array.shape)
                for kind, name, array in named
            ],
        }
    ).encode()
    digest = hashlib.blake2b(header, digest_size=32)
    bodies = [array.reshape(-1).view(np.uint8).data for _, _, array in named]
    for body in bodies:
        digest.update(body)
    file.write(MAGIC + _HEAD.pack(VERSION, len(header), digest.digest()) + header)
    file.writelines(bodies)


def _flush_names(directory: Path) -> None:
    """Let a rename survive a machine that stops, where directories can be flushed."""
    number = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)


def _parsed(content: bytes, path: Path) -> Checkpoint:
    start = len(MAGIC) + _HEAD.size
    if content[: len(MAGIC)] != MAGIC or len(content) < start:
        raise _damaged(path, "another kind of file, or its beginning only")
    version, length, digest = _HEAD.unpack_from(content, len(MAGIC))
    if version != VERSION:
        raise _damaged(path, f"version {version}, not {VERSION}")
    if length > min(_MAX_HEADER_BYTES, len(content) - start):
        raise _damaged(path, f"{len(content)} bytes, less than its header says")
    if hashlib.blake2b(content[start:], digest_size=32).digest() != digest:
        raise _damaged(
            path, f"{len(content)} bytes that are not those that were written"
        )
    header = json.loads(content[start : start + length])
    found: dict[str, dict[str, Any]] = {"params": {}, "state": {}}
    for kind, name, array in _arrays_of(header["arrays"], content, start + length):
        found[kind][name] = array
    return Checkpoint(header["step"], **found, about=header["about"], source=str(path))


def _arrays_of(
    listed: Any, content: bytes, offset: int
) -> Iterator[tuple[str, str, NDArray[Any]]]:
    for kind, name, type_name, shape in listed:
        dtype, count = np.dtype(type_name), int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(content, dtype, count, offset).reshape(shape)
        offset += array.nbytes
        yield kind, name, array


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint is torn or damaged; got {str(path)!r}: {why}; expected what save "
        "wrote; remove it, and the one before it is taken",
        path=str(path),
    )
