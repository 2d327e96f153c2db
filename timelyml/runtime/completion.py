"""What is complete at the inputs of one operator on one worker, and what is due.

A port is complete at a time for a shard once its frontier has passed the time, or
once every producer shard of its dense edges has been heard. What a notification
waits for beyond the ports that it names follows from the operator's order.
"""

from __future__ import annotations

from collections.abc import Sequence

from timelyml.progress import Frontier, Timestamp
from timelyml.runtime.dense import DenseInput
from timelyml.runtime.operator import Logic, Precedence

Ports = tuple[int, ...]


class Completion:
    """Answers whether ports have everything for a shard.

    Args:
        logic: Of the operator; its order.
        frontiers: By port.
        dense: By port: channel to counter.
        depth: Of the operator's scope.
    """

    def __init__(
        self,
        logic: Logic,
        frontiers: Sequence[Frontier],
        dense: Sequence[dict[int, DenseInput]],
        *,
        depth: int,
    ) -> None:
        self._logic = logic
        self._frontiers = frontiers
        self._dense = dense
        self._depth = depth
        self._waits: dict[Ports, tuple[Ports, Ports]] = {}

    def is_complete(self, shard: int, time: Timestamp, ports: Ports) -> bool:
        """Whether every port has everything for the shard at `time`."""
        for port in ports:
            if not self._frontiers[port].less_equal(time):
                continue
            if not self._is_counted(port, shard, time):
                return False
        return True

    def is_due(self, shard: int, time: Timestamp, ports: Ports) -> bool:
        """Whether a notification by these ports may come, if none goes before it."""
        at_time, before = self._waits.get(ports) or self._waits_of(ports)
        if not self.is_complete(shard, time, at_time):
            return False
        return not before or all(
            self._is_complete_before(port, shard, time) for port in before
        )

    def is_by_shard(self, ports: Ports) -> bool:
        """Whether such a notification may be due for one shard alone, by counting."""
        at_time, before = self._waits_of(ports)
        return any(self._dense[port] for port in (*at_time, *before))

    def _waits_of(self, ports: Ports) -> tuple[Ports, Ports]:
        """Return the ports to be complete at the time, and at all earlier ones."""
        if ports not in self._waits:
            self._waits[ports] = self._find_waits(ports)
        return self._waits[ports]

    def _find_waits(self, ports: Ports) -> tuple[Ports, Ports]:
        logic = self._logic
        if not logic.in_order:
            return ports, ()
        precedence = logic.precedence.get(ports, Precedence())
        at_time = {*ports}.union(*precedence.first)
        # A frontier of ints that has passed a time has passed all earlier ones.
        before = {port for port in at_time if self._depth or self._dense[port]}
        return tuple(at_time), tuple(before.union(precedence.earlier))

    def _is_complete_before(self, port: int, shard: int, time: Timestamp) -> bool:
        """Whether nothing can come that Python's order puts before `time`."""
        frontier = self._frontiers[port]
        if isinstance(time, int):
            if not frontier.less_than(time):
                return True
            # What was heard at the time before was due in its turn, and so on.
            return self._is_counted(port, shard, time - 1)
        *outer, innermost = time
        earlier = [
            each
            for each in frontier.elements
            if isinstance(each, tuple) and each < time
        ]
        return not earlier or (
            all(each[:-1] == time[:-1] for each in earlier)
            and self._is_counted(port, shard, (*outer, innermost - 1))
        )

    def _is_counted(self, port: int, shard: int, time: Timestamp) -> bool:
        counters = self._dense[port]
        return bool(counters) and all(
            counter.is_complete(time, shard) for counter in counters.values()
        )
