"""Upkeep of a host: orders that come by a dataflow, beside launches.

The paper uses a dataflow engine for background work too: distributing configuration,
cleaning up, monitoring, reporting failures. Each host has such a flow, with a source and a
sink beside the controller: `orders` -> `carry_out`, on the host -> `reports`. What the
controller decides in one step is an epoch; the frontier passes it once the host has carried
out all of it, what is compiled in the background included.

Launches take another way. `UpkeepDue` marks the place of an epoch among them, and what comes
behind waits, so hosts obey everything in the order in which it was decided.

Source:
    Pathways, section 4 (a general dataflow engine for background housekeeping).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from timelyml.graph import Graph, GraphBuilder
from timelyml.ml.hosts.upkeep_messages import Result
from timelyml.operators.inputs import input as input_
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.outputs import probe
from timelyml.progress import Capability
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard

SERVICE = "ml"
"""By which the halves of the service are known in a cluster."""

ORDERS, REPORT_TAG = "orders", "report"


def upkeep_flow() -> Graph:
    """Return the dataflow of one host's upkeep."""
    flow = GraphBuilder("upkeep", num_shards=1)
    orders = input_(flow, name=ORDERS)
    carry_out = Logic(on_start=_begin, on_batch=_take, on_activate=_go_on)
    (reports,) = add_operator(
        "carry_out", [orders], carry_out, states=("state",), name="carry_out"
    )
    add_operator("reports", [reports], Logic(on_batch=_tell), num_outputs=0)
    probe(reports, name="carried out")
    return flow.build()


class Upkeep:
    """Puts the orders of a host's flow into their place among all other messages.

    Args:
        obey: Carries out an order; returns whether it goes on in the background, to be
            told of by `finish`, and what there is to report at once.
    """

    def __init__(self, obey: Callable[[Any, int], tuple[bool, Any]]) -> None:
        self._obey = obey
        self._due: int | None = None
        self._held: deque[Any] = deque()
        self._activate: Callable[[], None] = lambda: None  # until there is a flow
        self._left: dict[int, int] = {}  # orders under way, by epoch
        self._results: deque[Result] = deque()

    @property
    def is_behind(self) -> bool:
        """Whether what is said now has to wait."""
        return self._due is not None or bool(self._held)

    @property
    def is_ready(self) -> bool:
        """Whether something waits that need not wait any more."""
        return self._due is None and bool(self._held)

    def hold(self, message: Any) -> None:
        """Keep a message until all that is before it is done."""
        self._held.append(message)

    def ready(self) -> Iterator[Any]:
        """Return messages that need not wait any more, as long as that is so."""
        while self.is_ready:
            yield self._held.popleft()

    def turn(self, epoch: int) -> None:
        """Take note that it is the turn of an epoch's orders."""
        self._due = epoch
        self._activate()

    def finish(self, result: Result) -> None:
        """Report on an order that went on in the background."""
        self._results.append(result)
        self._activate()

    def begin(self, activate: Callable[[], None]) -> None:
        """Take note of the flow; `activate` gives its operator a turn."""
        self._activate = activate

    def go_on(self, waiting: dict[int, list[Any]]) -> Iterator[tuple[int, list[Any]]]:
        """Obey what is due of the orders that came, by epoch; return epochs and reports.

        An epoch is returned again for what ends later.
        """
        while (epoch := self._due) in waiting and epoch is not None:
            reports = self._begin_all(epoch, waiting.pop(epoch))
            self._due = None  # not if one cannot be obeyed: the rest must not be either
            yield epoch, reports
        while self._results:
            result = self._results.popleft()
            self._left[result.epoch] -= 1
            yield result.epoch, [] if result.report is None else [result.report]

    def is_over(self, epoch: int) -> bool:
        """Whether nothing of an epoch goes on in the background; asked once if so."""
        is_over = not self._left[epoch]
        if is_over:
            del self._left[epoch]
        return is_over

    def _begin_all(self, epoch: int, orders: list[Any]) -> list[Any]:
        self._left[epoch] = 0
        reports = []
        for order in orders:
            goes_on, report = self._obey(order, epoch)
            self._left[epoch] += goes_on
            if report is not None:
                reports.append(report)
        return reports


def _upkeep(shard: Shard) -> Upkeep:
    found: Upkeep = shard.service(SERVICE).upkeep
    return found


def _begin(shard: Shard) -> None:
    _upkeep(shard).begin(shard.activate)


def _take(shard: Shard, delivery: Delivery) -> None:
    epoch = delivery.time
    shard.state[epoch] = list(delivery.payload), shard.retain(epoch)
    _go_on(shard)


def _go_on(shard: Shard) -> None:
    upkeep = _upkeep(shard)
    waiting = {epoch: orders for epoch, (orders, _) in shard.state.items() if orders}
    for epoch, reports in upkeep.go_on(waiting):
        capability: Capability = shard.state[epoch][1]
        shard.state[epoch] = [], capability
        if reports:
            shard.output().send(epoch, reports)
        if upkeep.is_over(epoch):
            del shard.state[epoch]
            capability.release()


def _tell(shard: Shard, delivery: Delivery) -> None:
    for report in delivery.payload:
        shard.emit(REPORT_TAG, report)
