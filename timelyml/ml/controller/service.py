"""The half of the service beside the controller: it carries messages to and from the core."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

from timelyml.errors import (
    InvariantError,
    PeerError,
    RunStoppedError,
    TimelyError,
    WireError,
)
from timelyml.ml.controller.admission import Limits
from timelyml.ml.controller.clients import ClientOptions
from timelyml.ml.controller.core import Core
from timelyml.ml.controller.messages import Closed
from timelyml.ml.controller.outbox import Dismiss, Effect, ToClient, ToHost, Upkeep
from timelyml.ml.controller.upkeep_flows import UpkeepFlows
from timelyml.ml.hosts import Present
from timelyml.ml.hosts.delays import Delayed
from timelyml.ml.scheduling import Fifo, Policy, Priority, ProportionalShare
from timelyml.runtime.failure import pack_error
from timelyml.runtime.service import ServiceSite

MAX_MESSAGES_PER_STEP = 256
TURN_S = 1e-3
"""How long clients are listened to before what follows is sent, and hosts are heard: a
client that runs ahead says more than that, while devices wait for what is next."""

PRIORITY_AGING_NS = 1_000_000_000
"""Device time for which a gang waits to rise by one, so that none waits for ever."""

POLICIES: dict[str, Callable[[], Policy]] = {
    "fifo": Fifo,
    "share": ProportionalShare,
    "priority": partial(Priority, PRIORITY_AGING_NS),
}
"""By name: in the order of calls; device time in proportion to weights; or larger
priorities first, where whoever waits rises."""

Receive: TypeAlias = Callable[[Any], None]


class ControllerService:
    """Serves the clients of this process, and steps the core.

    `connect`, `submit` and `disconnect` may be called from any thread.
    """

    def __init__(self, site: ServiceSite) -> None:
        self._site = site
        self._limits = Limits(**site.options.get("limits", {}))
        self._core = Core(
            site.options["islands"],
            memory_bytes=site.options["memory_bytes"],
            host_memory_bytes=site.options["host_memory_bytes"],
            policy=POLICIES[site.options["policy"]],
            limits=self._limits,
        )
        delay_s = site.options.get("delay_s", 0.0)
        self._late: Delayed[tuple[int, Any]] = Delayed(delay_s, site.clock, site.wake)
        self._flows = UpkeepFlows(site, self.handle, self._lose)
        self._inbox: deque[Callable[[], None]] = deque()
        self._clients: dict[int, Receive] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._error: TimelyError | None = None
        self._due_s: float | None = None  # asked of the core once in each step

    @property
    def max_calls(self) -> int:
        """Calls that a client may have under way."""
        return self._limits.max_calls

    def connect(self, receive: Receive, weight: int = 1, priority: int = 0) -> int:
        """Admit a client and return its number.

        Args:
            receive: Called with what it is told, in the controller's thread; quick.
            weight: Its share of device time, where the policy looks at it.
            priority: Larger ones go first, where the policy looks at it.

        Raises:
            AdmissionError: There are as many as there may be.
            ConfigError: A wish makes no sense.
        """
        ClientOptions(weight, priority)  # in the caller's turn, not in the controller's
        with self._lock:
            self._limits.check_clients(len(self._clients))
            client = next(self._numbers)
            self._clients[client] = receive
        self._post(lambda: self._core.join(client, weight=weight, priority=priority))
        return client

    def submit(self, client: int, message: Any) -> None:
        """Take a message of a client; one that cannot be taken ends that client only."""
        self._post(partial(self._take, client, message))

    def disconnect(self, client: int) -> None:
        """Forget a client, with all that is its own; it hears of its end."""
        ended = RunStoppedError("the client was closed")
        with contextlib.suppress(TimelyError):  # all have left
            self._post(lambda: self._forget(client, ended))

    def joined(self) -> None:
        """Nothing: hosts tell what they have."""

    def handle(self, peer: int, body: Any) -> None:
        """Take a message of a host."""
        if isinstance(body, Present):
            self._flows.start(peer)
        if not self._late.take((peer, body)):
            self._core.heard(peer, body, self._site.clock())

    def step(self) -> bool:
        """Take what hosts and clients say, and send what follows."""
        for peer, body in self._late.due():
            self._core.heard(peer, body, self._site.clock())
        count = self._listen()
        if self._due_s is not None and self._site.clock() >= self._due_s:
            self._core.tick(self._site.clock())
        effects = self._core.flush()
        self._carry_out(effects)
        self._due_s = self._core.next_deadline()
        return bool(count or effects)

    def _listen(self) -> int:
        """Take what clients say, for a turn; return how much of it."""
        most, count = min(len(self._inbox), MAX_MESSAGES_PER_STEP), 0
        until = self._site.clock() + TURN_S
        while count < most:
            self._inbox.popleft()()
            count += 1
            if self._site.clock() >= until:
                break
        return count

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToHost):
                self._site.send(effect.host, effect.body, effect.lane)
            elif isinstance(effect, Upkeep):
                self._flows.send(effect.host, effect.epoch, effect.orders)
            elif isinstance(effect, ToClient):
                receive = self._clients.get(effect.client)
                if receive is not None:
                    receive(effect.body)
            elif isinstance(effect, Dismiss):
                self._flows.forget(effect.host)
                self._site.dismiss(effect.host, effect.is_at_once)
            else:
                hosts = self._site.start_workers(effect.num_hosts)
                self._core.hosts_started(effect.order, hosts, self._site.clock())
                self._carry_out(self._core.flush())

    def has_work(self) -> bool:
        """Whether a client said something."""
        return bool(self._inbox)

    def next_deadline(self) -> float | None:
        """Return when somebody has waited long enough, or a message is due."""
        deadlines = self._due_s, self._late.next_due()
        return min((each for each in deadlines if each is not None), default=None)

    def lost(self, peer: int, error: PeerError) -> None:
        """Give up the island of a host, unless the end of its flow has told of it."""
        if not self._flows.is_over(peer):
            self._core.lose(peer, error, self._site.clock())
            self._due_s = self._core.next_deadline()

    def _lose(self, host: int, error: TimelyError) -> None:
        """Give up the island of a host whose upkeep is over; it can be told nothing."""
        self._core.lose(host, error, self._site.clock())
        self._due_s = self._core.next_deadline()
        if not isinstance(error, PeerError):
            self._site.dismiss(host, True)

    def close(self, error: TimelyError | None) -> None:
        """Tell every client that nothing more comes."""
        self._late.close()
        self._flows.close()
        error = error or RunStoppedError("the cluster is closed")
        with self._lock:
            self._error = error
            inbox, self._inbox = self._inbox, deque()
        del inbox
        for receive in list(self._clients.values()):
            receive(Closed(pack_error(error)))

    def _take(self, client: int, message: Any) -> None:
        try:
            self._core.handle(client, message, self._site.clock())
        except WireError as error:
            self._forget(client, error)
        except Exception as error:  # noqa: BLE001 - others must not suffer from it
            failure = InvariantError(
                f"client {client} was put out; got {type(error).__name__}: {error} "
                f"from {type(message).__name__}; expected what a client says; "
                "report it, as this is a bug"
            )
            failure.__cause__ = error
            self._forget(client, failure)

    def _forget(self, client: int, error: TimelyError) -> None:
        self._core.leave(client)
        receive = self._clients.pop(client, None)
        if receive is not None:
            receive(Closed(pack_error(error)))

    def _post(self, action: Callable[[], None]) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            self._inbox.append(action)
            is_first = len(self._inbox) == 1
        if is_first:  # else whoever came before has woken it; a wake costs 10 us
            self._site.wake()
