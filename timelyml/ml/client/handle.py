"""Handles: values on a slice, which may still be being computed."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from timelyml.errors import HandleError, TimelyError
from timelyml.ml.client.slices import Slice, SliceSharding
from timelyml.ml.functions import ArrayType, Runner, Spec, partition_spec
from timelyml.ml.functions.types import dtype_named

_ELEMENTS = (np.ndarray, np.generic, jax.Array, int, float, complex)


class HandleOwner(Runner, Protocol):
    """Whoever a handle belongs to, as far as the handle needs it: a client."""

    def wait_ready(self, handle: Handle, timeout_s: float | None) -> None:
        """Wait until the value is computed, or raise why it never will be."""

    def ask_news(self, handle: Handle) -> None:
        """Ask when a value that was put is on its devices, unless it was asked."""

    def value_of(self, handle: Handle, timeout_s: float | None) -> Any:
        """Wait for the elements, of keys their words, or raise why there are none."""

    async def arrival(self, handle: Handle) -> None:
        """Wait until the elements are here, or will never be."""

    def release(self, buffer: int) -> None:
        """Let go of a value; from any thread, and at any time."""

    def let_go(self, handle: Handle) -> None:
        """Hear that nobody holds a handle any more; as `release`."""

    def flush_calls(self) -> None:
        """Send the calls that were collected, as they may take what is deleted next."""


class Handle:
    """A value on a slice, as a leaf of what compiled functions take and return.

    It behaves as an array that may come later: whatever needs the elements waits for
    them and gets them from the slice; what needs shape, type or sharding does not wait.
    If the computation failed, the elements raise its error.

    Attributes:
        client: Whose it is.
        buffer: Its number.
        slice: Where it lies.
        type: Its shape and element type.
        spec: How it is sharded over the mesh of its slice.
        was_put: Whether nothing computes it.
        is_unasked: Whether no news will come of it unless it is asked for.
    """

    __slots__ = (
        "__weakref__", "_error", "_fate", "_is_ready", "_value", "buffer", "client",
        "is_unasked", "slice", "spec", "type", "was_put",
    )  # fmt: skip

    def __init__(
        self,
        client: HandleOwner,
        buffer: int,
        slice_: Slice,
        array_type: ArrayType,
        spec: Spec,
    ) -> None:
        self.client = client
        self.buffer = buffer
        self.slice = slice_
        self.type = array_type
        self.spec = spec
        self._value: Any = None
        self._error: TimelyError | None = None
        self._is_ready = False
        self.was_put = self.is_unasked = False
        self._fate = ""  # why it must not be used any more

    def __del__(self) -> None:
        # The right moment to free memory on the workers, and no right to anything.
        self.client.let_go(self)
        if not self._fate:
            self.client.release(self.buffer)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.type.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.type.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.type.shape, dtype=np.int64))

    @property
    def dtype(self) -> Any:
        """The type of its elements."""
        return dtype_named(self.type.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, each counted once."""
        return self.type.size_bytes

    @property
    def sharding(self) -> SliceSharding:
        """How it lies on its slice."""
        return SliceSharding(self.slice, partition_spec(self.spec))

    def is_deleted(self) -> bool:
        """Whether its value was given away."""
        return bool(self._fate)

    def is_ready(self) -> bool:
        """Whether its value is on its devices, or will never be; does not wait."""
        self.client.ask_news(self)
        return self.has_news()

    def has_news(self) -> bool:
        """As `is_ready`, of what was heard so far."""
        return self._is_ready or self._error is not None

    def is_known(self) -> bool:
        """Whether its elements are here, or will never be; does not wait."""
        return self._value is not None or self._error is not None

    def put(self) -> None:
        """Note that it is under way to its devices."""
        self.was_put = self.is_unasked = True

    def take(self, value: Any = None) -> None:
        """Note that it is computed, and its elements if they came too."""
        self._is_ready = True
        if value is not None and not self._fate:
            self._value = value

    def fail(self, error: TimelyError) -> None:
        """Note why it will never be there; the first reason stands."""
        self._error = self._error or error

    def elements(self) -> Any:
        """Return its elements once they are known, or raise why there are none."""
        if self._error is not None:
            raise self._error.anew()  # or the error would hold the handle that holds it
        return self._value

    def delete(self) -> None:
        """Give the memory back now; the handle cannot be used any more."""
        self.check()
        self.client.flush_calls()
        self.give_away("deleted")
        self.client.release(self.buffer)

    def give_away(self, fate: str) -> None:
        """Make it unusable, because of its `fate`.

        Raises:
            HandleError: It was given away before.
        """
        self.check()
        self._fate = fate
        self._value = None

    def check(self) -> None:
        """Raise unless it may be used.

        Raises:
            HandleError: Its value was given away.
        """
        if self._fate:
            raise HandleError(
                f"a handle of {self.type} on slice {self.slice.name!r} has no value any "
                f"more; got it {self._fate}; expected it to be used before; use what "
                f"the call returned, or do not donate it",
                buffer=self.buffer,
            )

    def result(self, timeout_s: float | None = None) -> Any:
        """Return the elements: a read-only numpy array; of typed keys, an array of JAX.

        Raises:
            TimelyError: What its computation, or one before it, failed with.
            DeadlineError: They did not come in time.
        """
        words = self.client.value_of(self, timeout_s)
        impl = self.type.key_impl
        return words if impl is None else jax.random.wrap_key_data(words, impl=impl)

    def item(self, *index: int) -> Any:
        """Return an element, the only one unless an index is given, as a Python number.

        Raises:
            TimelyError: As `result`.
        """
        return np.asarray(self).item(*index)

    def tolist(self) -> Any:
        """Return the elements as Python numbers in nested lists.

        Raises:
            TimelyError: As `result`.
        """
        return np.asarray(self).tolist()

    def block_until_ready(self) -> Handle:
        """Wait until it is on its devices, or raise why it will never be."""
        self.client.wait_ready(self, None)
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the elements without blocking the event loop, and without a thread.

        However many coroutines wait, and for what, each goes on when its value is there.
        """
        yield from self.client.arrival(self).__await__()
        return self.result()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        value = self.client.value_of(self, None)
        if dtype is not None and value.dtype != dtype:
            if copy is False:
                raise ValueError(f"cannot return {self.type} as {dtype} without a copy")
            return value.astype(dtype)
        return value.copy() if copy else value

    def __repr__(self) -> str:
        state = self._fate or ("ready" if self._is_ready else "pending")
        state = "failed" if self._error is not None else state
        return (
            f"Handle({self.type}, {self.slice.name!r}, {self.sharding.spec}, {state})"
        )

    def __format__(self, spec: str) -> str:
        if not spec:
            return repr(self)
        value = self.result()
        return format(value if self.type.shape else value[()], spec)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a handle of {self.type} cannot be copied or pickled; expected its "
            f"elements, or another name for them; fetch it with numpy.asarray, copy it "
            f"in a compiled function, or publish it for other clients"
        )

    def __float__(self) -> float:
        return float(self._scalar("float"))

    def __int__(self) -> int:
        return int(self._scalar("int"))

    def __complex__(self) -> complex:
        return complex(self._scalar("complex"))

    def __bool__(self) -> bool:
        return bool(self._scalar("bool"))

    def __index__(self) -> int:
        if self.type.shape or not np.issubdtype(self.dtype, np.integer):
            raise TypeError(
                f"{self.type} cannot be an index; expected an integer without dimensions"
            )
        return int(self._scalar("int"))

    def __len__(self) -> int:
        if not self.type.shape:
            raise TypeError(
                f"{self.type} has no length; expected one dimension or more"
            )
        return self.type.shape[0]

    def __iter__(self) -> Iterator[Any]:
        len(self)  # raises for what has no rows
        return iter(self.result())

    def __getitem__(self, index: Any) -> Any:
        return self.result()[index]

    def __eq__(self, other: object) -> Any:
        if isinstance(other, _ELEMENTS):  # False would be a wrong answer
            raise TypeError(
                f"a handle of {self.type} is compared with a {type(other).__name__}; "
                f"expected another handle, to tell whether they are the same one; "
                f"compare its elements, as of numpy.asarray"
            )
        return self is other

    __hash__ = object.__hash__

    def _scalar(self, kind: str) -> Any:
        if self.size != 1:
            raise TypeError(
                f"{self.type} cannot become a {kind}; expected a single element; fetch "
                f"all with numpy.asarray"
            )
        return np.asarray(self.client.value_of(self, None)).reshape(())


def check_all(handles: Iterable[Handle]) -> None:
    """Raise unless all of them may be used.

    Raises:
        HandleError: The value of one was given away.
    """
    for each in handles:
        if each._fate:  # noqa: SLF001 - a call of a method for each of hundreds
            each.check()


def give_away_all(handles: Iterable[Handle], fate: str) -> None:
    """Make handles unusable, because of their `fate`; all may be used until then."""
    for each in handles:
        each._fate = fate  # noqa: SLF001 - as above
        each._value = None  # noqa: SLF001 - as above
