"""What the families of methods need of the dataflow or stream that they belong to.

A family knows one kind of operator, and neither `Dataflow` nor `Stream`, which are
composed of them: so each reads by itself, and none imports another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Self, TypeVar

from timelyml.errors import GraphError
from timelyml.graph import GraphBuilder, StreamRef
from timelyml.operators import Diverted, StreamLike


class StreamBase(ABC):
    """A stream, as its methods see it: what operators read, and how to go on from it."""

    ref: StreamLike

    @abstractmethod
    def _with(self, ref: StreamLike) -> Self:
        """Return another stream of the same dataflow."""

    def _each(self, made: StreamLike | Diverted[StreamRef]) -> Self | Diverted[Self]:
        if isinstance(made, Diverted):
            return Diverted(self._with(made.results), self._with(made.failed))
        return self._with(made)


def ref_of(stream: StreamBase) -> StreamLike:
    """Return what the operators work on.

    Raises:
        GraphError: `stream` is none.
    """
    if not isinstance(stream, StreamBase):
        raise GraphError(
            f"an operator needs a stream to read; got {stream!r}; expected a Stream; "
            f"pass what a method of a stream or dataflow returned"
        )
    return stream.ref


StreamT = TypeVar("StreamT", bound=StreamBase)


class FlowBase(ABC, Generic[StreamT]):
    """A dataflow, as its methods see it: the graph so far, and how to make streams."""

    builder: GraphBuilder

    @abstractmethod
    def _stream(self, ref: StreamLike) -> StreamT:
        """Return a stream of this dataflow."""
