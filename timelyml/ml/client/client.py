"""The client: asks for slices, starts calls, and hears how they end.

Calls are sent and not waited for; the client numbers what they will return itself. It
runs ahead of the workers by a bounded number of calls.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
from jax.sharding import AbstractMesh

from timelyml.errors import ConfigError, DeadlineError, HandleError, TimelyError
from timelyml.ml.client.elements import as_sealed, assembled
from timelyml.ml.client.handle import Handle
from timelyml.ml.client.link import Link, checked_weight
from timelyml.ml.client.programs import run_program
from timelyml.ml.client.slices import Slice, SliceSharding, check_axes
from timelyml.ml.controller.messages import (
    AskSlice,
    Call,
    Closed,
    DropSlice,
    Failed,
    Fetch,
    Fetched,
    Finished,
    Put,
    Refused,
    Register,
    Release,
    SliceGiven,
)
from timelyml.ml.functions import (
    ArrayType,
    Computation,
    Spec,
    TracedCall,
    spec_of,
    type_of,
)
from timelyml.ml.functions.specs import check_spec, logical_mesh
from timelyml.ml.hosts.waiting import SMALL_BYTES
from timelyml.ml.programs import ProgramCall
from timelyml.ml.store import CLIENT_BITS
from timelyml.runtime.failure import unpack_error

MAX_UNFINISHED_CALLS = 512
RELEASE_BATCH = 256


class Client:
    """A client of a cluster of islands; a context manager.

    Its methods may be called from any thread.

    Args:
        link: Its way to the controller; closed with it.
        max_unfinished_calls: A call waits while so many are not over.
    """

    def __init__(
        self, link: Link, *, max_unfinished_calls: int = MAX_UNFINISHED_CALLS
    ) -> None:
        self._link = link
        self._max_unfinished = max_unfinished_calls
        self._changed = threading.Condition()
        self._handles: weakref.WeakValueDictionary[int, Handle] = (
            weakref.WeakValueDictionary()
        )
        self._answers: dict[int, SliceGiven | Refused] = {}
        self._slices: dict[str, Slice] = {}
        self._fetching: set[int] = set()
        self._num_unfinished = 0
        self._end: TimelyError | None = None  # why nothing will be answered any more
        self._released: deque[int] = deque()
        self._registered: set[tuple[str, str]] = set()
        self._requests = itertools.count(1)
        self._number = link.connect(self._receive)
        self._buffers = itertools.count((self._number << CLIENT_BITS) + 1)

    def slice(
        self,
        axes: Mapping[str, int],
        *,
        kind: str | None = None,
        island: str | None = None,
        memory_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> Slice:
        """Ask for devices of one island in the shape of a mesh, and wait for them.

        Args:
            axes: The size of each axis of the mesh, by its name; 1 to 3 axes.
            kind: Kind of the devices, as JAX names it; None: any.
            island: The name of an island; None: any.
            memory_bytes: Reserved on every device for this slice alone; None shares.
            timeout_s: How long to wait while others hold the devices; None: until they
                are free, 0: not at all.

        Raises:
            SliceError: No island has what is asked for, or not in time.
            ConfigError: The shape makes no sense.
        """
        check_axes(axes)
        request = next(self._requests)
        names, sizes = tuple(axes), tuple(axes.values())
        self._send(
            AskSlice(request, names, sizes, kind, island, memory_bytes or 0, timeout_s)
        )
        self._wait(lambda: request in self._answers, None, "a slice")
        answer = self._answers.pop(request)
        if isinstance(answer, Refused):
            raise unpack_error(answer.error)
        given = Slice(
            answer.slice,
            AbstractMesh(sizes, names),
            answer.platform,
            answer.island,
            answer.devices,
            self,
        )
        self._slices[given.name] = given
        return given

    def give_back(self, slice_: Slice) -> None:
        """Give a slice back; what is still on it goes first."""
        self._slices.pop(slice_.name, None)
        self._flush_released()
        self._send(DropSlice(slice_.name))

    def put(self, tree: Any, sharding: Any) -> Any:
        """Bring arrays to a slice and return handles in their place.

        The values are those at the call: what is changed afterwards changes nothing.

        Args:
            tree: Arrays, numbers, or a tree of them.
            sharding: As `slice.sharding(P(...))`: one for all, or a tree that begins as
                `tree` does.

        Raises:
            ConfigError: A sharding is none of a slice of this client, or does not fit.
            TypeError: A leaf is no array.
        """
        leaves, treedef = jax.tree.flatten(tree)
        full = jax.tree.broadcast(sharding, tree, is_leaf=_is_sharding)
        shardings = jax.tree.leaves(full, is_leaf=_is_sharding)
        handles = []
        for leaf, each in zip(leaves, shardings, strict=True):
            if not isinstance(each, SliceSharding) or each.slice.client is not self:
                raise ConfigError(
                    f"put needs a sharding of a slice of this client; got {each!r}; "
                    f"expected slice.sharding(P(...)); ask the client for a slice",
                    option="sharding",
                )
            array_type, spec = type_of(leaf), spec_of(each.spec)
            mesh = logical_mesh(each.slice.mesh)
            check_spec("what is put", mesh, spec, array_type.shape)
            handles.append(self._put(leaf, each.slice, array_type, spec))
        return jax.tree.unflatten(treedef, handles)

    def call(self, call: TracedCall) -> Sequence[Handle]:
        """Start a traced call; return a handle for each result.

        Waits only while too many calls are not over.
        """
        computation, slice_ = call.computation, call.slice
        if not isinstance(slice_, Slice) or slice_.client is not self:
            raise HandleError(f"{slice_!r} is no slice of this client")
        self._register(computation, slice_)
        operands = [
            self._operand(each, computation, position, slice_)
            for position, each in enumerate(call.operands)
        ]
        for position in computation.donated:
            if isinstance(call.operands[position], Handle):
                operands[position].give_away(f"donated to {computation.name!r}")
        handles = [
            self._handle(slice_, array_type, spec)
            for array_type, spec in zip(
                computation.out_types[: computation.num_results],
                computation.out_specs,
                strict=False,
            )
        ]
        self._admit()
        self._send(
            Call(
                computation.identity,
                slice_.name,
                tuple([each.buffer for each in operands]),
                tuple([each.buffer for each in handles]),
            )
        )
        self._flush_released()
        return handles

    def call_program(self, call: ProgramCall) -> Sequence[Any]:
        """Start a traced program; return a value for each result."""
        return run_program(self, call.program, call.operands, self._slices)

    def wait_ready(self, handle: Handle, timeout_s: float | None) -> None:
        """Wait until a value is computed."""
        handle.check()
        if not handle._is_ready:  # noqa: SLF001 - the client keeps what handles show
            self._wait(handle.is_ready, timeout_s, repr(handle))
        self._raise_error(handle)

    def value_of(self, handle: Handle, timeout_s: float | None) -> Any:
        """Wait for the elements of a value."""
        handle.check()

        def is_known() -> bool:
            return handle._value is not None or handle._error is not None  # noqa: SLF001

        if not is_known() and handle.nbytes <= SMALL_BYTES:
            # Then it most likely comes with the news that it is ready.
            self._wait(handle.is_ready, timeout_s, repr(handle))
        if not is_known():
            with self._changed:
                is_new = handle.buffer not in self._fetching and not is_known()
                if is_new:
                    self._fetching.add(handle.buffer)
            if is_new:
                self._send(Fetch(handle.buffer))
            self._wait(is_known, timeout_s, repr(handle))
        self._raise_error(handle)
        return handle._value  # noqa: SLF001

    def release(self, buffer: int) -> None:
        """Let go of a value; told to the controller together with others."""
        self._released.append(buffer)
        if len(self._released) >= RELEASE_BATCH and self._end is None:
            self._flush_released()

    def another(self, *, weight: int = 1) -> Client:
        """Return another client of the same cluster, as if it were another program.

        It has its own slices and handles. It ends before this one does, if that ends
        the cluster.

        Args:
            weight: Its share of device time, under the policy "share"; this client's
                is 1 unless it was given another.

        Raises:
            ConfigError: The weight is no positive whole number.
        """
        link = self._link.another(checked_weight(weight))
        return Client(link, max_unfinished_calls=self._max_unfinished)

    def close(self) -> None:
        """Give everything back and end the client; closing twice changes nothing."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client {self._number}, {'closed' if self._end else 'open'}>"

    def _put(
        self, value: Any, slice_: Slice, array_type: ArrayType, spec: Spec
    ) -> Handle:
        handle = self._handle(slice_, array_type, spec)
        handle._is_ready = True  # noqa: SLF001
        array = as_sealed(value, array_type)
        self._send(Put(handle.buffer, slice_.name, array_type, spec, array))
        return handle

    def _operand(
        self, value: Any, computation: Computation, position: int, slice_: Slice
    ) -> Handle:
        if isinstance(value, Handle):
            value.check()
            return value
        in_type, spec = computation.in_types[position], computation.in_specs[position]
        return self._put(value, slice_, in_type, spec)

    def _handle(self, slice_: Slice, array_type: ArrayType, spec: Spec) -> Handle:
        handle = Handle(self, next(self._buffers), slice_, array_type, spec)
        self._handles[handle.buffer] = handle
        return handle

    def _register(self, computation: Computation, slice_: Slice) -> None:
        key = computation.identity, slice_.name
        if key not in self._registered:
            self._registered.add(key)
            pickled = pickle.dumps(computation)
            self._send(Register(computation.identity, slice_.name, pickled))

    def _admit(self) -> None:
        """Count one more call, once there are few enough."""
        with self._changed:
            while self._num_unfinished >= self._max_unfinished and self._end is None:
                self._changed.wait()
            self._num_unfinished += 1

    def _flush_released(self) -> None:
        buffers = []
        while self._released:
            try:
                buffers.append(self._released.popleft())
            except IndexError:  # another thread was faster
                break
        if buffers:
            self._send(Release(tuple(buffers)))

    def _send(self, message: Any) -> None:
        if self._end is not None:
            raise self._end
        self._link.send(message)

    def _wait(
        self, is_over: Callable[[], bool], timeout_s: float | None, what: str
    ) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not is_over():
                if self._end is not None:
                    raise self._end
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise DeadlineError(
                        f"{what} did not come in time; got none after {timeout_s} s; "
                        f"expected it by then; wait longer",
                        timeout_s=timeout_s,
                    )
                self._changed.wait(left)

    def _raise_error(self, handle: Handle) -> None:
        if handle._error is not None:  # noqa: SLF001
            raise handle._error  # noqa: SLF001

    def _receive(self, message: Any) -> None:
        """Take what the controller says; called in a thread of the link."""
        with self._changed:
            match message:
                case Finished():
                    self._on_finished(message)
                case Failed():
                    self._num_unfinished -= message.num_calls
                    self._fail(message.buffers, message.error)
                case Fetched():
                    self._on_fetched(message)
                case SliceGiven() | Refused():
                    self._answers[message.request] = message
                case Closed():
                    self._end = self._end or unpack_error(message.error)
            self._changed.notify_all()

    def _on_finished(self, message: Finished) -> None:
        self._num_unfinished -= message.num_calls
        for buffer in message.buffers:
            handle = self._handles.get(buffer)
            if handle is not None:
                handle._is_ready = True  # noqa: SLF001
        for buffer, value in message.values:
            handle = self._handles.get(buffer)
            if handle is not None and not handle.is_deleted():
                handle._value = value  # noqa: SLF001

    def _on_fetched(self, message: Fetched) -> None:
        self._fetching.discard(message.buffer)
        handle = self._handles.get(message.buffer)
        if handle is None:
            return
        if message.error is not None:
            self._fail((message.buffer,), message.error)
        else:
            handle._value = assembled(handle.type, message.pieces)  # noqa: SLF001
            handle._is_ready = True  # noqa: SLF001

    def _fail(self, buffers: Sequence[int], packed: bytes) -> None:
        for buffer in buffers:
            handle = self._handles.get(buffer)
            if handle is not None and handle._error is None:  # noqa: SLF001
                handle._error = unpack_error(packed)  # noqa: SLF001


def _is_sharding(value: Any) -> bool:
    return isinstance(value, SliceSharding)
