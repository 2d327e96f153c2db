"""The core of the controller: takes events of clients and hosts, returns what follows.

Pure: no socket, thread or clock. A slice, a buffer and a call cost the same here
however many devices they have, but for the few numbers that each host must be told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from timelyml.errors import (
    RunStoppedError,
    TimelyError,
)
from timelyml.ml.controller.admission import Limits
from timelyml.ml.controller.arrivals import Arrivals, has_left
from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.calls import Calls
from timelyml.ml.controller.checks import check_message
from timelyml.ml.controller.clients import ClientOptions
from timelyml.ml.controller.code import Code
from timelyml.ml.controller.code_messages import AskCompiled, Register
from timelyml.ml.controller.dispatching import Dispatch
from timelyml.ml.controller.explaining import Explanations
from timelyml.ml.controller.flow_runs import MAX_PARTS_AHEAD
from timelyml.ml.controller.gauging import Gauges
from timelyml.ml.controller.messages import (
    Call,
    CallProgram,
    CancelCalls,
    DropSlice,
    Fetch,
    Put,
    RegisterProgram,
    Release,
)
from timelyml.ml.controller.monitoring import Monitor
from timelyml.ml.controller.names import Names
from timelyml.ml.controller.outbox import Effect, Outbox
from timelyml.ml.controller.places import Places
from timelyml.ml.controller.programs import Programs
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.controller.renewals import Island
from timelyml.ml.controller.tracing import Traces
from timelyml.ml.hosts import (
    Arrived,
    Compiled,
    Leaving,
    Left,
    Pieces,
    Present,
    Reports,
    Spilled,
    Time,
)
from timelyml.ml.scheduling import WINDOW_ALONE_NS, GangScheduler, Policy
from timelyml.runtime.failure import pack_error

DEFAULT_MEMORY_BYTES = 4 << 30


class Core:
    """Islands, slices, computations and clients.

    Methods are events; `flush` returns what follows from them, so that what several of
    them have for one host leaves as one message.

    Args:
        islands: The hosts of each island, in the order of their ranks, by its name.
        memory_bytes: What buffers and temporaries may take on a device.
        host_memory_bytes: What a host may keep in its memory of buffers that were
            spilled from its devices; as much as there are if None.
        policy: Makes the policy of each island's scheduler; FIFO unless given.
        limits: How much clients may have at once.
    """

    def __init__(
        self,
        islands: dict[str, Sequence[int]],
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        host_memory_bytes: int | None = None,
        policy: Callable[[], Policy] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._outbox = Outbox()
        self._slices: dict[str, SliceRecord] = {}
        self._code = Code(self._slices, self._outbox)
        self._limits = limits or Limits()
        self.buffers = Buffers(self._slices, self._outbox, self._idle, self._limits)
        self.dispatch = Dispatch(
            self._slices, self.buffers, self._code, self._outbox, self._idle
        )
        common = self._slices, self.buffers, self._code, self._outbox
        self._calls = Calls(self.dispatch, *common)
        self._programs = Programs(self.dispatch, *common)
        self._names = Names(
            self._slices, self.buffers, self.dispatch.device_time, self._outbox
        )
        self._traces = Traces(self._outbox, self.dispatch.by_sequence)
        self._gauges = Gauges(self.buffers, self._outbox)
        self._policy = policy
        self._now_s = 0.0  # of the last event
        self._clients = self.dispatch.clients
        self.places = Places(
            memory_bytes,
            host_memory_bytes,
            slices=self._slices,
            buffers=self.buffers,
            dispatch=self.dispatch,
            code=self._code,
            outbox=self._outbox,
            add_order=self._add_order,
        )
        self._explanations = Explanations(
            self.dispatch,
            self.buffers.directory,
            slices=self._slices,
            places=self.places,
            code=self._code,
            outbox=self._outbox,
        )
        self._monitor = Monitor(self.places.islands, self._outbox)
        self._arrivals = Arrivals(
            self.places.names,
            self._add_island,
            self._outbox,
        )
        for island, hosts in islands.items():
            self._add_island(island, hosts, is_own=True)

    @property
    def is_complete(self) -> bool:
        """Whether every host has come, or is lost."""
        return self.places.is_complete

    @property
    def slices(self) -> list[str]:
        """Names of all slices."""
        return list(self._slices)

    @property
    def num_open_epochs(self) -> int:
        """Epochs of upkeep that some host has not carried out."""
        return self._outbox.epochs.num_open

    def join(self, client: int, *, weight: int = 1, priority: int = 0) -> None:
        """Admit a client; numbers begin at 1."""
        self._clients.join(client, ClientOptions(weight, priority))

    def leave(self, client: int) -> None:
        """Forget a client and all that is its own; what is ordered runs to its end."""
        if client not in self._clients:
            return
        self._clients.leave(client)
        self._names.leave(client)
        self._traces.leave(client)
        self._gauges.leave(client)
        self._code.leave(client)
        self._monitor.leave(client)
        self.places.leave(client)
        gone = pack_error(RunStoppedError("the client of a call is gone; got its end"))
        self.dispatch.cancel(lambda call: call.client == client, gone)
        self.buffers.memory.leave(client, gone)
        self.dispatch.follow(self._clients.drop(client))
        self.buffers.leave(client, gone)
        for slice_ in [each for each in self._slices.values() if each.client == client]:
            slice_.is_dropped = True
            self._idle(slice_)
        self._clean_up()

    def handle(self, client: int, message: Any, now_s: float) -> None:
        """Take a message of a client; one that has left is not heard.

        Raises:
            WireError: It is none that a client says; nothing has changed.
        """
        self._now_s = self.buffers.admission.now_s = now_s
        if client not in self._clients:
            return
        check_message(client, message, self._slices)
        match message:
            case Call():
                self._calls.start(client, message)
            case CallProgram():
                self._programs.start(client, message)
            case Put():
                self.buffers.put(client, message)
            case CancelCalls():
                self._cancel_makers(client, message.buffers)
            case Release():
                released = self.buffers.directory.drop(client, message.buffers)
                self.buffers.follow(released)
            case Fetch():
                self.buffers.fetches.begin(client, message)
            case Register() | AskCompiled():
                self._code.handle(client, message)
            case RegisterProgram():
                self._programs.register(client, message)
            case DropSlice():
                self._drop_slice(client, message.slice)
            case _:
                event = client, message, now_s
                if not (
                    self._traces.handle(*event)
                    or self._gauges.handle(client, message)
                    or self._monitor.handle(client, message)
                    or self.places.handle(*event)
                    or self._explanations.handle(*event)
                ):
                    self._names.handle(*event)

    def heard(self, host: int, message: Any, now_s: float) -> None:
        """Take a message of a host; one of an island that was given up is not heard."""
        self._now_s = now_s
        if isinstance(message, Arrived):
            if not self.places.renewals.arrived(host):
                self._arrivals.arrive(host, message)
            return
        island = self.places.island_of(host)
        if island is not None and host not in island.dead:
            self._explanations.heard(host, now_s)
            self._hear(island, host, message, now_s)

    def _hear(self, island: Island, host: int, message: Any, now_s: float) -> None:
        match message:
            case Leaving():
                self._arrivals.leave(host, now_s + message.drain_s)
                self.places.withdraw(island)
            case Reports() if island.ends_s is not None:
                pass  # what runs there was given up
            case Reports():
                if self._traces.is_on:
                    self._traces.reported(island.order, host, message)
                self.dispatch.finished(island.order, host, message.done)
            case Pieces():
                self.buffers.fetches.take(message)
            case Compiled():
                if slice_name := self._code.compiled(host, message):
                    self.dispatch.compiled(message.identity, slice_name)
            case Left():
                self.places.left(host)
            case Spilled():
                self.buffers.memory.spilled(host, message.buffers)
            case Present():
                self.places.welcome(host, message, now_s)
                self._traces.welcome(host, island.name, now_s)
            case Time():
                self._traces.time(host, message, now_s)
            case _:
                self._monitor.heard(host, island, message)

    def lose(self, host: int, error: TimelyError, now_s: float) -> None:
        """Take note that a host is dead; what only it had is reported lost."""
        self._arrivals.lose(host)
        self._traces.lose(host)
        self.places.lose(host, error, now_s)

    def tick(self, now_s: float) -> None:
        """Give up what has waited for too long."""
        self._now_s = now_s
        self.places.follow(self.places.manager.tick(now_s))
        self._names.tick(now_s)
        self._traces.tick(now_s)
        self._let_go()
        self.places.renewals.tick(now_s)
        self.places.answer(now_s)
        for timed in self.dispatch.deadlines.overdue(now_s):
            error = timed.fail(self.buffers, self._outbox)
            host = self._slices[timed.placement].hosts[0]
            self.places.renewals.end_stuck(host, error)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if ever."""
        deadlines = (
            self.places.manager.next_deadline(),
            self.places.next_deadline(),
            self._names.next_deadline(),
            self._traces.next_deadline(),
            self._arrivals.next_deadline(),
            self.places.renewals.next_deadline(),
            self.dispatch.deadlines.next_deadline(),
        )
        return min((each for each in deadlines if each is not None), default=None)

    def flush(self) -> list[Effect]:
        """Return what follows from all events since the last call, in order."""
        self._programs.go_on()
        self.dispatch.deadlines.step(self._now_s)
        self.places.step()
        self._code.step()
        self._let_go()
        self._monitor.step()
        effects = self._outbox.flush()
        if self._monitor.ask():  # by an epoch that comes after all of this
            effects += self._outbox.flush()
        return effects

    def hosts_started(self, order: str, hosts: tuple[int, ...], now_s: float) -> None:
        """Take note of processes that were started for an island; none if not."""
        self.places.renewals.hosts_started(order, hosts, now_s)
        self.places.answer(now_s)

    def _add_order(self, order: str) -> None:
        policy = self._policy() if self._policy is not None else None
        # Each call may be a loop, which has several parts under way.
        most = self._limits.max_calls * (MAX_PARTS_AHEAD + 1)
        scheduler = GangScheduler(
            policy, window_alone_ns=WINDOW_ALONE_NS, max_programs=most
        )
        self._clients.add_island(order, scheduler)

    def _add_island(
        self, island: str, hosts: Sequence[int], *, is_own: bool = False
    ) -> None:
        """Make an island known, before any of its hosts is present."""
        self._add_order(island)
        self.places.add(island, hosts, is_own=is_own)

    def _let_go(self) -> None:
        """Let those leave that would, once their island is empty or they waited enough."""
        for host, deadline_s in self._arrivals.leaving():
            island = self.places.island_of(host)
            if island is None or island.error is not None:
                continue
            orders = {each.order for each in self._slices.values()}
            if island.order not in orders or deadline_s <= self._now_s:
                self._arrivals.dismiss(island.hosts)
                self.places.lose(host, has_left(host, island.name), self._now_s)

    def _cancel_makers(self, client: int, numbers: Iterable[int]) -> None:
        """Drop what is not ordered of the work of a client that makes buffers."""
        found = map(self.buffers.directory.get, numbers)
        entries = [entry for entry in found if entry is not None]
        stopped = RunStoppedError("a call was cancelled; got that of its client")
        error = pack_error(stopped)
        names = {entry.producer for entry in entries}
        names -= self._programs.collected.cancel(client, entries, error)
        self.dispatch.cancel(
            lambda work: work.client == client and work.program in names, error
        )

    def _drop_slice(self, client: int, name: str) -> None:
        slice_ = self._slices.get(name)
        if slice_ is not None and slice_.client == client:
            slice_.is_dropped = True
            self._idle(slice_)

    def _idle(self, slice_: SliceRecord) -> None:
        """Take a slice apart that was given back, once nothing of it is left."""
        if self.places.idle(slice_):
            self._calls.forget_slice(slice_.name)
            self._programs.forget_slice(slice_.name)
            if slice_.client not in self._clients:
                self._clean_up()

    def _clean_up(self) -> None:
        """Have hosts drop what a client left behind that is gone, in an epoch."""
        self._code.forget_unused()
        self._outbox.clean_up()
