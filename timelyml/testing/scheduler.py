"""A seeded scheduler: it decides whose step is next and which link delivers next.

Everything that it steps is real; only the network and the clock are simulated. Time
stands still while anything can be done, and then jumps to the next deadline. Within a
step the clock ticks, as work takes time and an operator's turn must end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

from timelyml.errors import TimelyError
from timelyml.runtime.loop import Endpoint
from timelyml.runtime.simulation.clock import SimClock
from timelyml.runtime.simulation.network import LinkKey, SimNetwork

MAX_ACTIONS = 500_000
SLOW_SHARE = 0.3  # of links that deliver rarely
SLOWNESS = 0.9  # how often such a link delivers nothing when it could


class StuckError(TimelyError):
    """A wait that never ends: nothing is under way, or the same goes on for ever."""


class Scheduler:
    """Acts for all endpoints of a cluster, in an order that a seed decides.

    Args:
        rng: Where every choice comes from.
        network: What delivers.
        clock: What all endpoints read.
        endpoints: Who takes steps, by index on the network.
    """

    def __init__(
        self,
        rng: random.Random,
        network: SimNetwork,
        clock: SimClock,
        endpoints: Mapping[int, Endpoint],
    ) -> None:
        self.num_actions = 0
        self.is_acting = False  # a callback that waits now waits for itself
        self._rng = rng
        self._network = network
        self._clock = clock
        self._endpoints = endpoints
        self._order = sorted(endpoints)
        self._deliver_share = rng.choice((0.3, 0.6, 0.9))
        self._slow: dict[LinkKey, bool] = {}
        self._wants_step = set(self._order)

    def run_until(self, is_enough: Callable[[], bool], until_s: float | None) -> bool:
        """Act until `is_enough()`, or until the clock's time `until_s`; which of them.

        Raises:
            StuckError: There is no `until_s`, and nothing can happen; or too much did.
        """
        first = self.num_actions
        while not is_enough():
            if self._act():
                if self.num_actions - first > MAX_ACTIONS:
                    raise StuckError(
                        f"a simulated flow does not get on; got {MAX_ACTIONS} actions; "
                        f"expected what is waited for; end its sources, or wait for less"
                    )
                continue
            deadline = self._next_deadline()
            if until_s is not None and (deadline is None or deadline > until_s):
                self._clock.advance_to(until_s)
                return is_enough()
            if deadline is None:
                raise StuckError(
                    "a simulated flow waits for ever; got nothing under way and no "
                    "time-out; expected input, or a notification that can come; see "
                    "what holds it back below"
                )
            self._clock.advance_to(deadline)
        return True

    def settle(self) -> None:
        """Do all that can be done without letting time pass."""
        self.run_until(lambda: False, self._clock.now_s)

    def _act(self) -> bool:
        """Do one thing; False if nothing can be done now."""
        links = self._network.busy_links
        ready = [index for index in self._order if self._is_ready(index)]
        if not (links or ready):
            return False
        self.num_actions += 1
        self.is_acting = True
        try:
            self._do(links, ready)
        finally:
            self.is_acting = False
        return True

    def _do(self, links: list[LinkKey], ready: list[int]) -> None:
        if links and (not ready or self._rng.random() < self._deliver_share):
            self._deliver(links, must=not ready)
        else:
            self._step(self._rng.choice(ready))

    def _deliver(self, links: list[LinkKey], *, must: bool) -> None:
        link = links[self._rng.randrange(len(links))]
        slow = self._slow.get(link)
        if slow is None:
            slow = self._slow[link] = self._rng.random() < SLOW_SHARE
        if must or not slow or self._rng.random() >= SLOWNESS:
            self._network.deliver(link)

    def _step(self, index: int) -> None:
        endpoint = self._endpoints[index]
        now_s = self._clock.now_s
        worked = endpoint.step()
        self._clock.now_s = now_s
        if worked or endpoint.has_work():
            self._wants_step.add(index)
        else:
            self._wants_step.discard(index)

    def _is_ready(self, index: int) -> bool:
        if index in self._wants_step:
            return True
        transport = self._network.transport(index)
        if transport.has_mail or transport.is_awake:
            return True
        deadline = self._endpoints[index].next_deadline()
        return deadline is not None and deadline <= self._clock.now_s

    def _next_deadline(self) -> float | None:
        deadlines = [self._endpoints[index].next_deadline() for index in self._order]
        return min((due for due in deadlines if due and due < math.inf), default=None)
