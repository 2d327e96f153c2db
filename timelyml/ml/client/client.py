"""The client: asks for slices, starts calls, and hears how they end.

Calls are sent and not waited for; the client numbers what they will return itself. It
runs ahead of the workers by a bounded number of calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
from jax.sharding import AbstractMesh

from timelyml.errors import HandleError
from timelyml.ml.client.ahead import Ahead
from timelyml.ml.client.computations import Computations
from timelyml.ml.client.elements import as_sealed
from timelyml.ml.client.handle import Handle, check_all, give_away_all
from timelyml.ml.client.inbox import Inbox
from timelyml.ml.client.link import Link
from timelyml.ml.client.programs import Programs
from timelyml.ml.client.releases import Releases
from timelyml.ml.client.requests import Requests
from timelyml.ml.client.resources import Resources
from timelyml.ml.client.sharing import held, numbers_of, put_together, taken_apart
from timelyml.ml.client.slices import Slice, check_axes, check_demands, placed_leaves
from timelyml.ml.client.waits import Waits
from timelyml.ml.controller.clients import ClientOptions
from timelyml.ml.controller.code_messages import NotCompiled
from timelyml.ml.controller.messages import (
    AskObjects,
    AskSlice,
    AskUsage,
    Call,
    CancelCalls,
    ClientUsage,
    DropSlice,
    ObjectInfo,
    Objects,
    Open,
    Opened,
    Publish,
    Put,
    SliceGiven,
    Unpublish,
    Usage,
    Watch,
)
from timelyml.ml.controller.resource_messages import Moved
from timelyml.ml.functions import (
    ArrayType,
    Computation,
    Spec,
    TracedCall,
)
from timelyml.ml.programs import ProgramCall
from timelyml.ml.store import CLIENT_BITS

MAX_UNFINISHED_CALLS = 512


class Client:
    """A client of a cluster of islands; a context manager.

    Its methods may be called from any thread.

    Args:
        link: Its way to the controller; closed with it.
        max_unfinished_calls: A call waits while so many are not over.

    Attributes:
        resources: The devices of the cluster.
    """

    def __init__(
        self, link: Link, *, max_unfinished_calls: int = MAX_UNFINISHED_CALLS
    ) -> None:
        self._link = link
        self._inbox = Inbox(max_unfinished_calls, self._on_slice)
        requests = Requests(self.send, self._inbox)
        self._ask, self._why = requests.ask, requests.why
        self.resources = Resources(self._ask, self.send)
        self._slices: dict[str, Slice] = {}
        self._computations = Computations(self.send, self._ask)
        self.register = self._computations.register
        self.compiled = self._computations.compiled
        self.check_compiled = self._computations.check
        self._programs = Programs(self, self._slices)
        self._number, max_calls = link.connect(self._inbox.receive)
        self._inbox.max_unfinished_calls = min(max_unfinished_calls, max_calls)
        self._releases = Releases(link)  # has a thread, so not before it is let in
        # Of each value that goes, so without a call of a method in between.
        self.release, self.let_go = self._releases.add, self._inbox.forget
        self._ahead = Ahead(link, self._inbox, self._releases, self._programs.register)
        self.flush_calls = self._ahead.flush
        waits = Waits(self._ahead, self._inbox, self._why)
        self.ask_news, self.wait_ready = waits.ask_news, waits.wait_ready
        self.value_of, self.arrival = waits.value_of, waits.arrival
        self._buffers = itertools.count((self._number << CLIENT_BITS) + 1)

    def slice(
        self,
        axes: Mapping[str, int],
        *,
        kind: str | None = None,
        island: str | None = None,
        memory_bytes: int | None = None,
        timeout_s: float | None = None,
        adjacent: bool = False,
    ) -> Slice:
        """Ask for devices of one island in the shape of a mesh, and wait for them.

        Args:
            axes: The size of each axis of the mesh, by its name; 1 to 3 axes.
            kind: Kind of the devices, as JAX names it; None: any.
            island: The name of an island; None: any.
            memory_bytes: Reserved on every device for this slice alone; None shares.
            timeout_s: How long to wait while others hold the devices; None: until they
                are free, 0: not at all.
            adjacent: Whether neighbours in the slice have to be neighbours in the mesh
                of the island, the line of its devices; otherwise they are if loads are
                equal.

        Raises:
            SliceError: No island has what is asked for, or not in time.
            ConfigError: The shape, or another demand, makes no sense.
        """
        check_axes(axes)
        check_demands(memory_bytes, adjacent)
        names, sizes = tuple(axes), tuple(axes.values())
        wanted = (names, sizes, kind, island, memory_bytes or 0, timeout_s, adjacent)
        answer: SliceGiven = self._ask(lambda n: AskSlice(n, *wanted), "a slice")
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
        self._ahead.forget(slice_)
        self._releases.flush()
        self.send(DropSlice(slice_.name))

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
        placed, treedef = placed_leaves(tree, sharding, self)
        return jax.tree.unflatten(treedef, [self.put_array(*each) for each in placed])

    def call(self, call: TracedCall) -> Sequence[Handle]:
        """Start a traced call; return a handle for each result.

        Waits only while too many calls are not over.

        Raises:
            TimelyError: Its computation is known by now not to compile.
        """
        computation, slice_ = call.computation, call.slice
        if not isinstance(slice_, Slice) or slice_.client is not self:
            raise HandleError(f"{slice_!r} is no slice of this client")
        if self._ahead.takes(call):
            self.register(computation, slice_, call.line)
            for each in call.operands:
                each.check()
            handles = self._results(computation, slice_)
            self._ahead.add(slice_, computation, call.operands, handles)
            return handles
        self.register(computation, slice_, call.line)
        operands = [
            each
            if type(each) is Handle
            else self._operand(each, computation, position, slice_)
            for position, each in enumerate(call.operands)
        ]
        check_all(operands)
        if computation.donated:
            given = [call.operands[position] for position in computation.donated]
            fate = f"donated to {computation.name!r}"
            give_away_all([each for each in given if isinstance(each, Handle)], fate)
        handles = self._results(computation, slice_)
        args = tuple([each.buffer for each in operands])
        outs = tuple([each.buffer for each in handles])
        self.start(Call(computation.identity, slice_.name, args, outs, call.order))
        return handles

    def call_program(self, call: ProgramCall) -> Sequence[Any]:
        """Start a traced program; return a value for each result."""
        self._ahead.flush()
        return self._programs.call(call)

    def put_array(
        self, value: Any, slice_: Slice, array_type: ArrayType, spec: Spec
    ) -> Handle:
        """Send a host array to a slice; return a handle of it."""
        handle = self.new_handle(slice_, array_type, spec)
        handle.put()
        self._inbox.put(handle)
        array = as_sealed(value, array_type)
        self._releases.flush()  # what they took may be needed
        self.send(Put(handle.buffer, slice_.name, array_type, spec, array))
        return handle

    def new_handle(self, slice_: Slice, array_type: ArrayType, spec: Spec) -> Handle:
        """Return a handle of a value to come."""
        handle = Handle(self, next(self._buffers), slice_, array_type, spec)
        self._inbox.add([handle])
        return handle

    def start(self, message: Any) -> None:
        """Send what counts as a call; waits while too many are not over."""
        self._ahead.start(message)

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            TimelyError: The client has ended.
        """
        self._ahead.send(message)

    def cancel(self, tree: Any) -> None:
        """Drop what has not run of the calls that compute these handles; does not wait."""
        self.send(CancelCalls(numbers_of(tree)))

    def publish(self, name: str, tree: Any) -> None:
        """Share values with other clients, which `open` them by their name.

        They belong to the name from now on: they stay when this client lets go of them,
        ends or is killed, until somebody takes the name back.

        Args:
            name: A new one.
            tree: Handles, or a tree of them; also of values still being computed.

        Raises:
            HandleError: The name is taken, or no str; a leaf is no handle of this client.
            ShippingError: The tree has parts that cannot be pickled.
        """
        buffers, structure = taken_apart(name, tree, self)
        self._ask(lambda n: Publish(n, name, buffers, structure), f"name {name!r}")

    def open(self, name: str, *, timeout_s: float | None = 0) -> Any:
        """Return the tree of handles that a client published under a name.

        They lie on the slice of whoever made them. Calls on an own slice of the same
        shape on the same devices take them where they are; to others they move.
        Donating one copies it, as others may hold it.

        Args:
            name: The name.
            timeout_s: How long to wait until it is published; None: without end.

        Raises:
            HandleError: Nothing is published under the name.
            DeadlineError: Nothing was in time.
            ShippingError: A class of the tree cannot be imported here.
        """
        opened: Opened = self._ask(lambda n: Open(n, name, timeout_s), f"name {name!r}")
        tree = put_together(opened, lambda each: held(each, self, self._inbox))
        self.send(Watch(tuple(each.buffer for each in opened.buffers)))
        return tree

    def unpublish(self, name: str) -> None:
        """Take a name back, whoever gave it; values that others opened stay theirs.

        Raises:
            HandleError: Nothing is published under the name.
        """
        self._ask(lambda request: Unpublish(request, name), f"name {name!r}")

    def objects(self) -> tuple[ObjectInfo, ...]:
        """Return all values there are on the cluster, of all clients, oldest first."""
        self._releases.flush()
        answer: Objects = self._ask(AskObjects, "the list of objects")
        return answer.objects

    def usage(self) -> tuple[ClientUsage, ...]:
        """Return what device time and memory each client takes.

        The last line may be of what belongs to no client: published values, and those
        that only calls under way need.
        """
        self._releases.flush()
        answer: Usage = self._ask(AskUsage, "the list of clients")
        return answer.clients

    def explain_stall(self, handle: Handle | None = None) -> str:
        """Say what a value waits for, who holds it up, and since when.

        Args:
            handle: The value; None: which slices and islands are not there yet.

        Raises:
            TimelyError: The controller does not answer.
        """
        buffer = 0 if handle is None else handle.buffer
        self._ahead.flush()
        return self._why(buffer)

    def another(self, *, weight: int = 1, priority: int = 0) -> Client:
        """Return another client of the same cluster, as if it were another program.

        It has its own slices and handles, and ends before one that ends the cluster.

        Args:
            weight: Its share of device time, under the policy "share"; this client's
                is 1 unless it was given another.
            priority: Larger ones go first, under the policy "priority"; this client's
                is 0 unless it was given another.

        Raises:
            ConfigError: A number makes no sense.
            AdmissionError: The cluster has as many clients as it takes.
            TimelyError: The client has ended.
        """
        self._inbox.check()
        link = self._link.another(ClientOptions(weight, priority))
        return Client(link, max_unfinished_calls=self._inbox.max_unfinished_calls)

    def close(self) -> None:
        """Give everything back and end the client; closing twice changes nothing."""
        self._releases.close()
        self._link.close()
        self._ahead.close()

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
        return f"<Client {self._number}, {'open' if self._inbox.is_open else 'closed'}>"

    def _on_slice(self, news: Moved | NotCompiled) -> None:
        if isinstance(news, NotCompiled):
            self._computations.refuse(news)
            return
        self._computations.moved(news.slice)
        if (slice_ := self._slices.get(news.slice)) is not None:
            slice_.island, slice_.platform = news.island, news.platform
            slice_.devices = news.devices

    def _results(self, computation: Computation, slice_: Slice) -> list[Handle]:
        """Return a handle for each result of a call."""
        numbers = itertools.islice(self._buffers, computation.num_results)
        kinds = zip(numbers, computation.out_types, computation.out_specs, strict=False)
        handles = [Handle(self, number, slice_, of, spec) for number, of, spec in kinds]
        self._inbox.add(handles)
        return handles

    def _operand(
        self, value: Any, computation: Computation, position: int, slice_: Slice
    ) -> Handle:
        if isinstance(value, Handle):
            return value
        in_type, spec = computation.in_types[position], computation.in_specs[position]
        return self.put_array(value, slice_, in_type, spec)
