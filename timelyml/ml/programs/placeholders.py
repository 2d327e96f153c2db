"""What stands for a value while a program is traced: types and no elements."""

from __future__ import annotations

from typing import Any, NoReturn

from timelyml.errors import TraceError
from timelyml.ml.functions import ArrayType, Spec
from timelyml.ml.functions.blame import calling_line
from timelyml.ml.functions.types import dtype_named
from timelyml.ml.programs.nodes import Ref, Value


class Placeholder:
    """A value of a program that is being traced.

    It can be passed to compiled functions and returned, and tells its shape and type.
    Whatever needs its elements is refused, with the line that asked.
    """

    def __init__(self, recorder: Any, ref: Ref, value: Value) -> None:
        self._recorder = recorder
        self._ref = ref
        self._value = value

    @property
    def recorder(self) -> Any:
        """What traces the program it is part of."""
        return self._recorder

    @property
    def ref(self) -> Ref:
        """Which output of which node it is."""
        return self._ref

    @property
    def type(self) -> ArrayType:
        """Shape and element type."""
        return self._value.type

    @property
    def spec(self) -> Spec | None:
        """How it is sharded; None on the client."""
        return self._value.spec

    @property
    def slice(self) -> Any:
        """The slice that it is on; None on the client."""
        return self._recorder.slice_of(self._value)

    @property
    def client(self) -> Any:
        """The client whose program it is part of; None before that is known."""
        return self._recorder.client

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.type.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.type.size_bytes // self.type.itemsize

    @property
    def dtype(self) -> Any:
        """The element type, as JAX has it."""
        return dtype_named(self.type.dtype)

    def __repr__(self) -> str:
        where = self._value.slice or "the client"
        return f"Placeholder({self.type} on {where} in {self._recorder.name!r})"

    def __len__(self) -> int:
        if not self.shape:
            self._refuse("ask for its length, which it has none of")
        return self.shape[0]

    def _refuse(self, what: str) -> NoReturn:
        where = calling_line()
        raise TraceError(
            f"program {self._recorder.name!r} cannot {what} at {where}; got {self!r}; "
            f"expected calls of compiled functions only, as values come when it runs; "
            f"do it in a function that ml.jit compiles, or after the program",
            function=self._recorder.name,
            where=where,
        )

    def _ask_value(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("ask for a value")

    def _compute(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("compute outside of a compiled function")

    __bool__ = __int__ = __float__ = __complex__ = __index__ = _ask_value
    __array__ = __iter__ = __contains__ = _ask_value
    __getitem__ = __neg__ = __abs__ = __invert__ = _compute
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = _compute
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = _compute
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __rmod__ = _compute
    __lt__ = __le__ = __gt__ = __ge__ = _compute
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other or self._compute()
