"""What a compiled function is once it is traced: values that any process can hold.

A `Computation` is what a client sends and workers compile: StableHLO and what must be
known of it without compiling. Nothing here imports JAX, holds a device or needs one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

Spec: TypeAlias = tuple[str | tuple[str, ...] | None, ...]
"""A partition spec as plain values: one entry a dimension, as of `PartitionSpec`."""


@dataclass(frozen=True)  # no slots: the hash of a type is asked for at every call
class ArrayType:
    """Shape and element type of an array.

    Attributes:
        dtype: As numpy names it, such as "float32", "bfloat16" or "float8_e4m3fn"; of a
            typed PRNG key, "key<threefry2x32>" with the name of its implementation.
        itemsize: Bytes of an element; of all words of a key.
        is_weak: Whether it gives way in promotion, as what came from a Python number.

    >>> ArrayType((2, 3), "float32", 4)
    float32[2,3]
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    is_weak: bool = False

    def __repr__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.dtype, self.is_weak))

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize

    @property
    def key_impl(self) -> str | None:
        """The implementation of a typed PRNG key; None for other arrays."""
        return self.dtype[4:-1] if self.dtype.startswith("key<") else None

    @property
    def physical(self) -> ArrayType:
        """What lies in memory: of a key array its words, the last dimension more."""
        if self.key_impl is None:
            return self
        return ArrayType((*self.shape, self.itemsize // 4), "uint32", 4)


@dataclass(frozen=True, slots=True)
class LogicalMesh:
    """Axes of a mesh without devices; they count in row-major order.

    Attributes:
        axis_types: "auto" where XLA shards, "explicit" where types carry shardings.

    >>> LogicalMesh(("data", "model"), (2, 4)).size
    8
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    axis_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.axis_types:
            object.__setattr__(self, "axis_types", ("auto",) * len(self.axis_names))

    def __str__(self) -> str:
        axes = zip(self.axis_names, self.axis_sizes, strict=True)
        return ", ".join(f"{name}={size}" for name, size in axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.axis_sizes)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis by its name."""
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Settings:
    """What of JAX's configuration changes the meaning of a function.

    They are those of the client at the call and travel with the function, so that
    clients with different ones share a worker.

    Attributes:
        x64: Whether 64-bit types are kept.
        matmul_precision: As `jax.default_matmul_precision`.
        prng_impl: As `jax.default_prng_impl`.
        is_threefry_partitionable: As `jax_threefry_partitionable`: changes the numbers.
    """

    x64: bool = False
    matmul_precision: str | None = None
    prng_impl: str = "threefry2x32"
    is_threefry_partitionable: bool = True


@dataclass(frozen=True, slots=True)
class CheckMessage:
    """What a failed check says, with the values of the device to be filled in.

    Attributes:
        template: As `str.format` takes it.
        names: Of the keyword arguments, which come after the positional ones.
        where: The user's line: `train.py:12 in step`.
    """

    template: str
    names: tuple[str, ...]
    where: str

    def fill(self, values: Sequence[object]) -> str:
        """Return the message for these values."""
        num_positional = len(values) - len(self.names)
        named = dict(zip(self.names, values[num_positional:], strict=True))
        return self.template.format(*values[:num_positional], **named)


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """Checks of one kind: positions, among the outputs, of what tells whether one failed.

    Attributes:
        failed: Of a bool.
        code: Of the int32 that names the first check that failed.
        values: Of what its message quotes.
    """

    failed: int
    code: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checks:
    """The `checkify.check`s of a function; their outputs come after its results."""

    groups: tuple[CheckGroup, ...]
    messages: Mapping[int, CheckMessage]

    def first_failure(self, outputs: Sequence[object]) -> tuple[str, str] | None:
        """Return message and line of the check that failed first, or None.

        Args:
            outputs: All outputs of the computation, of which those of checks are read;
                reading them waits until they are computed.
        """
        failed = [group for group in self.groups if bool(outputs[group.failed])]
        if not failed:
            return None
        codes = {int(outputs[group.code]): group for group in failed}  # type: ignore[call-overload]  # an array of one int
        code = min(codes)
        message = self.messages[code]
        values = [outputs[position] for position in codes[code].values]
        return message.fill(values), message.where


@dataclass(frozen=True, slots=True)
class Computation:
    """A traced function: all that a worker needs to compile and run it.

    It pickles small, as bytes and plain values, unless arrays are captured.

    Attributes:
        name: Of the function, for people.
        identity: Digest of code, types, shardings, mesh and settings: computations with
            the same one do the same, so that a worker compiles them once.
        stablehlo: The portable module; of a function with host callbacks one in which
            zeros stand for what they return, to be read and not to be run.
        pickled_code: A function with host callbacks, pickled by value, that workers
            trace themselves; None if `stablehlo` is all. Unpickling runs code.
        in_types: Of the arguments that are arrays and that it uses, flat.
        in_specs: How they have to be sharded.
        out_types: Of the outputs, flat; first `num_results` of the function.
        out_specs: How they are sharded.
        donated: Positions of arguments whose memory the outputs may take.
        flops: About how many operations on elements it takes, over all devices.
        platform: What it is lowered for: "cpu", "cuda" or "tpu".
        calling_convention: Version of how the module takes its arguments.
        deadline_s: How long it may run at most; None: as long as it takes.
        shard: What each shard computes by itself, if it needs nothing of the others.
        idle: Then the argument that is zero on the shards that have nothing to do.
    """

    name: str
    identity: str
    mesh: LogicalMesh
    settings: Settings
    platform: str
    stablehlo: bytes
    calling_convention: int
    in_types: tuple[ArrayType, ...]
    in_specs: tuple[Spec, ...]
    out_types: tuple[ArrayType, ...]
    out_specs: tuple[Spec, ...]
    donated: tuple[int, ...] = ()
    flops: int = 0
    checks: Checks | None = None
    pickled_code: bytes | None = None
    deadline_s: float | None = None
    shard: Computation | None = None
    idle: int = 0

    def __repr__(self) -> str:
        return f"Computation({self.name!r}, {self.identity[:12]}, {self.mesh})"

    @property
    def has_callbacks(self) -> bool:
        """Whether it calls Python on the host while it runs."""
        return self.pickled_code is not None

    @property
    def has_effects(self) -> bool:
        """Whether it does more than compute its results, and may fail by itself."""
        return self.has_callbacks or self.checks is not None

    @property
    def num_results(self) -> int:
        """How many outputs are the function's own; the rest tell of its checks."""
        if self.checks is None:
            return len(self.out_types)
        return min(group.failed for group in self.checks.groups)
