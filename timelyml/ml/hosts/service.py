"""The half of the service in a worker: it makes the worker a host."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import jax

from timelyml.errors import InvariantError, PeerError, TimelyError
from timelyml.exchange import CONTROLLER, Lane
from timelyml.ml.functions import Executables
from timelyml.ml.hosts.delays import Delayed
from timelyml.ml.hosts.executor import Executor
from timelyml.ml.hosts.island import (
    LOOPBACK,
    Departure,
    devices_by_rank,
    join,
    reserved_address,
)
from timelyml.ml.hosts.lost_peers import EXPLAINED_S, LostPeers, Torn, TornPieces
from timelyml.ml.hosts.messages import (
    AbandonSlices,
    Arrived,
    Coordinator,
    Formed,
    Gone,
    HostRefused,
    Leave,
    Leaving,
    Load,
    LoadProgram,
    Orders,
    Pieces,
    RemapSlice,
    Reports,
    SliceMade,
)
from timelyml.ml.hosts.paced import PacedExecutables
from timelyml.ml.hosts.pending_reports import PendingReports
from timelyml.ml.hosts.presence import present_of
from timelyml.ml.hosts.slices import HostSlice
from timelyml.ml.hosts.timing import Arrival, AskTime, Time
from timelyml.ml.hosts.upkeep import Upkeep
from timelyml.ml.hosts.upkeep_messages import (
    AskHoldings,
    CleanUp,
    ForgetFunctions,
    Holdings,
    Result,
    UpkeepDue,
)
from timelyml.ml.hosts.waiting import Over
from timelyml.runtime.service import ServiceSite

NO_EPOCH = 0
"""Of orders that a host is told as they are, before it has a flow."""


class HostService:
    """A host of an island: takes orders, launches, reports."""

    def __init__(self, site: ServiceSite) -> None:
        self._site = site
        paced_s = site.options.get("paced_s")
        executables: Executables | PacedExecutables = (
            Executables() if paced_s is None else PacedExecutables(paced_s)
        )
        self._executor = Executor(str(site.index), site.wake, executables)
        self._late: Delayed[tuple[int, Any]] = Delayed(
            site.options.get("delay_s", 0.0), site.clock, site.wake
        )
        self._guest: dict[str, Any] | None = site.options.get("guest")
        self._hosts: Sequence[int] = next(
            (each for each in site.options["islands"].values() if site.index in each),
            (),
        )
        self._lost_peers = LostPeers(site.options["give_up_s"])
        self._torn = TornPieces(EXPLAINED_S)
        self._pending_reports = PendingReports()
        self._moves: list[Arrival] = []
        self._is_traced = False
        self.upkeep = Upkeep(self._obey)
        self.refusal = ""
        self.is_present = False

    def joined(self) -> None:
        """Form the island, and tell the controller what devices are here.

        Who comes later asks the controller first which hosts form an island with it.
        """
        if self._guest is None:
            self._form()
            return
        wanted = self._guest
        arrived = Arrived(wanted["island"], wanted["num_hosts"], wanted["num_devices"])
        self._site.send(CONTROLLER, arrived, Lane.CONTROL)

    def leave(self, drain_s: float) -> None:
        """Ask the controller to let this host go, once nothing on its island is left."""
        self._site.send(CONTROLLER, Leaving(drain_s), Lane.CONTROL)

    def _form(self) -> None:
        if len(self._hosts) == 1:
            self._present()
        elif self._site.index == self._hosts[0]:
            where = LOOPBACK if self._guest is None else self._guest["address"]
            departure = Departure(others=len(self._hosts) - 1, host=where)
            with reserved_address(where) as address:
                coordinator = Coordinator(
                    address, departure.address, tuple(self._hosts)
                )
                for host in self._hosts[1:]:
                    self._site.send(host, coordinator, Lane.CONTROL)
                self._join(address)

    def _join(self, address: str) -> None:
        rank = self._hosts.index(self._site.index)
        join(address, rank, len(self._hosts))
        self._present()

    def _present(self) -> None:
        present = present_of(
            jax.local_devices(),
            self._hosts.index(self._site.index),
            len(self._hosts),
            self._site.options.get("mesh"),
        )
        self._site.send(CONTROLLER, present, Lane.CONTROL)
        self.is_present = True

    def handle(self, peer: int, body: Any) -> None:
        """Take an order of the controller, or pieces from anyone."""
        if not self._late.take((peer, body)):
            self._handle(peer, body)

    def _handle(self, peer: int, body: Any) -> None:
        if self.upkeep.is_behind and peer == CONTROLLER and _has_place(body):
            self.upkeep.hold(body)
        else:
            self._take_in(peer, body)

    def _obey(self, order: Any, epoch: int) -> tuple[bool, Any]:
        """Carry out an order of upkeep; return whether it goes on, and a report."""
        report: Any = None
        match order:
            case Load():
                slice_ = self._executor.slices[order.slice]
                compiler = self._executor.compiler
                compiler.load(order, slice_, epoch)
            case LoadProgram():
                self._executor.load_program(order.program, order.pickled)
            case Leave():
                self._executor.leave(order)
            case AbandonSlices():
                self._executor.abandon(order.slices)
            case Gone():
                self._hear_of_loss(order)
            case RemapSlice():
                self._executor.remap(order)
            case SliceMade():
                self._executor.add_slice(HostSlice(order, devices_by_rank()))
            case CleanUp():
                self._executor.take(_dropping(order))
            case ForgetFunctions():
                self._executor.compiler.forget(order.identities)
            case AskHoldings():
                report = self._holdings(epoch)
            case _:
                raise InvariantError(
                    f"host {self._site.index} got what is no order; got {order!r:.200}; "
                    "expected what the controller says; report it, as this is a bug"
                )
        return isinstance(order, Load), report

    def _take_in(self, peer: int, body: Any) -> None:
        match body:
            case Orders():
                self._executor.take(body)
            case Pieces():
                self._take(peer, body)
            case UpkeepDue():
                self.upkeep.turn(body.epoch)
            case Coordinator() | Formed() | HostRefused():
                self._hear_of_island(body)
            case AskTime():
                self._say_time(is_traced=body.is_traced)
            case _:
                self._obey(body, NO_EPOCH)

    def _holdings(self, epoch: int) -> Holdings:
        executor = self._executor
        return Holdings(
            epoch,
            os.getpid(),
            num_slices=len(executor.slices),
            num_functions=len(executor.code),
            num_programs=len(executor.plans),
            num_buffers=len(executor.store),
            num_launches=executor.num_ordered,
        )

    def _hear_of_loss(self, gone: Gone) -> None:
        self._lost_peers.explain(gone)
        if gone.host in self._hosts:
            self._torn.explain(gone)

    def _hear_of_island(self, body: Coordinator | Formed | HostRefused) -> None:
        if isinstance(body, HostRefused):
            self.refusal = body.reason
            return
        self._hosts = body.hosts
        if isinstance(body, Formed):
            self._form()
        else:
            Departure(address=body.departure)
            self._join(body.address)

    def step(self) -> bool:
        """Tell what is over, and send what others asked for."""
        for peer, body in self._late.due():
            self._handle(peer, body)
        for body in self.upkeep.ready():
            self._take_in(CONTROLLER, body)
        for gone in self._lost_peers.lost(self._site.clock()):
            self._executor.lost(gone)
        said = self._executor.advance()
        now_s = self._site.clock()
        self._pending_reports.add(
            (each for each in said if isinstance(each, Over)), now_s
        )
        for each in said:
            if isinstance(each, tuple):  # first, as a device of a peer may wait for it
                self._send(*each)
            elif isinstance(each, Torn):
                self._torn.add(each, now_s)
            elif isinstance(each, Result):
                self.upkeep.finish(each)
        for peer, pieces in self._torn.due(now_s):
            self._send(peer, pieces)
        others = [
            each for each in said if not isinstance(each, Over | tuple | Torn | Result)
        ]
        # What else is told comes after the launches that were over before.
        if (
            others
            or self._moves
            or self._pending_reports.is_due(self._executor.num_ordered, now_s)
        ):
            self._report()
        for each in others:
            self._site.send(CONTROLLER, each, Lane.CONTROL)
        return bool(said)

    def has_work(self) -> bool:
        """Whether something came from another thread."""
        return self._executor.has_news() or self.upkeep.is_ready

    def next_deadline(self) -> float | None:
        """Return when something is due that is held back; other threads wake it."""
        deadlines = (
            self._late.next_due(),
            self._pending_reports.due_s,
            self._lost_peers.next_due(),
            self._torn.next_due(),
        )
        return min((each for each in deadlines if each is not None), default=None)

    def lost(self, peer: int, error: PeerError) -> None:
        """Let programs go on without what a peer would have sent, once it is known why."""
        self._lost_peers.broke(peer, str(error), self._site.clock())

    def close(self, error: TimelyError | None) -> None:
        """End the threads of the executor."""
        del error
        self._late.close()
        self._executor.close()

    def _report(self) -> None:
        done = self._pending_reports.take()
        if done or self._moves:
            reports = Reports(done, tuple(self._moves))
            self._moves.clear()
            self._site.send(CONTROLLER, reports, Lane.CONTROL)

    def _say_time(self, *, is_traced: bool) -> None:
        self._report()  # what a trace that ends now has of this host is told before
        self._is_traced = is_traced
        self._site.send(CONTROLLER, Time(time.monotonic_ns()), Lane.CONTROL)

    def _take(self, peer: int, pieces: Pieces) -> None:
        arrived_ns = self._executor.add(pieces)
        if self._is_traced and pieces.sent_ns:
            size_bytes = sum(each.array.nbytes for each in pieces.pieces)
            arrival = Arrival(peer, size_bytes, pieces.sent_ns, arrived_ns)
            self._moves.append(arrival)

    def _send(self, peer: int, pieces: Pieces) -> None:
        if peer == self._site.index:
            self._take(peer, pieces)
        else:
            self._site.send(peer, pieces, Lane.BULK)


def _dropping(clean_up: CleanUp) -> Orders:
    """Return orders that do no more than drop things."""
    releases, dropped = clean_up.releases, clean_up.dropped
    return Orders((), (), (), (), (), (), (), (), releases, (), dropped)


def _has_place(body: Any) -> bool:
    """Whether it matters what the controller said before."""
    return not isinstance(body, Pieces | AskTime)
