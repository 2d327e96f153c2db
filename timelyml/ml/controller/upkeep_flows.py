"""The dataflows that carry the orders of upkeep to hosts, and their reports back.

Each host has one of its own, so that the loss of a host ends no flow but its own; that end
is the report of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from timelyml.errors import InvariantError, TimelyError
from timelyml.exchange import Lane
from timelyml.ml.hosts import CarriedOut, UpkeepDue
from timelyml.ml.hosts.upkeep import ORDERS, REPORT_TAG, upkeep_flow
from timelyml.runtime.effects import DriverMessage, Effect, Ended, FrontierMoved
from timelyml.runtime.service import OwnRun, ServiceSite
from timelyml.runtime.service_runs import passed


class UpkeepFlows:
    """Sources and sinks of all hosts' flows; for the controller's thread.

    Args:
        site: Runs dataflows, and sends what marks their epochs' places.
        heard: Takes what a host has to say, as if it had sent it.
        ended: Takes a host whose flow is over, and why.
    """

    def __init__(
        self,
        site: ServiceSite,
        heard: Callable[[int, Any], None],
        ended: Callable[[int, TimelyError], None],
    ) -> None:
        self._site = site
        self._heard = heard
        self._ended = ended
        self._graph = upkeep_flow()
        self._runs: dict[int, OwnRun] = {}
        self._over: set[int] = set()

    def start(self, host: int) -> None:
        """Begin the upkeep of a host that has come."""
        run = self._site.run(self._graph, (host,), partial(self._hear, host))
        if host not in self._over:  # which it may be at once
            self._runs[host] = run

    def send(self, host: int, epoch: int, orders: Sequence[Any]) -> None:
        """Have a host carry out the orders of an epoch, after all that it was told before.

        One that has no flow yet is told them as they are.
        """
        run = self._runs.get(host)
        if run is None:
            for order in orders:
                self._site.send(host, order, Lane.CONTROL)
            self._heard(host, CarriedOut(epoch + 1))
            return
        run.send(ORDERS, 0, epoch, list(orders))
        run.advance_to(ORDERS, epoch + 1)
        self._site.send(host, UpkeepDue(epoch), Lane.CONTROL)

    def forget(self, host: int) -> None:
        """Expect the end of a host's flow: it is let go."""
        self._runs.pop(host, None)
        self._over.add(host)

    def is_over(self, host: int) -> bool:
        """Whether the flow of a host is over, or its end expected."""
        return host in self._over

    def close(self) -> None:
        """Hear of nothing any more: the cluster ends all flows."""
        for host in list(self._runs):
            self.forget(host)

    def _hear(self, host: int, effect: Effect) -> None:
        match effect:
            case DriverMessage(tag=tag) if tag == REPORT_TAG:
                self._heard(host, effect.body)
            case FrontierMoved() if effect.elements:
                self._heard(host, CarriedOut(passed(effect.elements)))
            case Ended():
                is_expected = host in self._over
                self.forget(host)
                if not is_expected:
                    self._ended(host, effect.error or _unasked_end(host))


def _unasked_end(host: int) -> TimelyError:
    return InvariantError(
        f"the upkeep of host {host} came to its end; got no error; expected it to go on "
        "as long as the host; report it, as this is a bug"
    )
