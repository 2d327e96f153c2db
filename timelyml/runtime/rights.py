"""What an operator may send at the moment, and what justifies it.

A callback may send where its delivery or notification leads, by the summaries of the
port that it came by, and where a capability is held; while the operator starts, the
initial capabilities allow everything. The input frontier justifies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from timelyml.errors import CapabilityError
from timelyml.graph import OperatorSpec
from timelyml.progress import (
    TIME_LIMIT,
    Capability,
    CapabilityTable,
    Summary,
    Timestamp,
    UserTime,
    check_time,
    less_equal,
    minimum,
)

BY_CAPABILITY = -1  # no port justifies what is sent: a held capability must
STARTING = -2


class Rights:
    """The rights of one operator on one worker.

    Args:
        spec: The operator.
        locations: Of its outputs.
        table: Of the worker.
    """

    def __init__(
        self, spec: OperatorSpec, locations: Sequence[int], table: CapabilityTable
    ) -> None:
        self.via_port = BY_CAPABILITY
        self._time: Timestamp = 0
        self._depth = spec.depth
        self._spec = spec
        self._locations = locations
        self._table = table
        self._roots: list[Capability] = []
        self._keeps_time = [
            all(any(each.is_identity for each in summaries) for summaries in outputs)
            for outputs in spec.summaries
        ]

    def open(self) -> None:
        """Take the initial capabilities."""
        site = f"initial capability of {self._spec.name}"
        time = minimum(self._spec.depth)
        self._roots = [self._table.start(at, time, site) for at in self._locations]
        self.via_port = STARTING

    def end_start(self) -> None:
        """Release the initial capabilities; what was kept of them has been cloned."""
        self.via_port = BY_CAPABILITY
        for root in self._roots:
            root.release()
        self._roots = []

    def begin(self, port: int, time: Timestamp) -> None:
        """A callback runs for what came by `port` at `time`."""
        self.via_port, self._time = port, time

    def end(self) -> None:
        """No callback runs for anything that came."""
        self.via_port = BY_CAPABILITY

    def is_processed_as_is(self, time: UserTime) -> bool:
        """Whether a delivery at this very `time` runs, where every output may send."""
        port = self.via_port
        return time is self._time and port >= 0 and self._keeps_time[port]

    def may_send(self, output: int, time: UserTime) -> bool:
        """Whether the callback being run, or a held capability, justifies it.

        Raises:
            TimeError: It is no timestamp of the operator's scope.
        """
        port = self.via_port
        # Most send at the time that they were given: 0.6 us less.
        if time is self._time and port >= 0 and self._keeps_time[port]:
            return True
        if self._depth or type(time) is not int or time >= TIME_LIMIT:
            self.check(time)
        if port >= 0 and any(
            _leads_to(summary, self._time, time)
            for summary in self._spec.summaries[port][output]
        ):
            return True
        if port == STARTING:
            return less_equal(minimum(self._depth), time)
        return self._table.covers(self._locations[output], time)

    def check(self, time: UserTime) -> None:
        """Refuse what is no timestamp here: of numpy, of another scope, out of range."""
        # Spares 1 us where times are ints.
        if self._depth or type(time) is not int or time >= TIME_LIMIT:
            check_time(time, self._depth, f"operator {self._spec.name!r}")

    def mint(self, output: int, time: Timestamp, site: str) -> Capability:
        """Mint a capability at an output; the caller has checked that it is justified."""
        return self._table.mint(self._locations[output], time, site)

    def initial(self, output: int, site: str) -> Capability:
        """Clone the initial capability; only while operators start."""
        if not self._roots:
            name = self._spec.name
            msg = (
                f"operator {name!r} asked for its initial capability too late; got it "
                "after the start; expected it in on_start; keep it in state from there"
            )
            raise CapabilityError(msg, operator=name)
        root = self._roots[output]
        return self._table.mint(root.location, root.time, site)

    def kept_open(
        self, time: Timestamp, outputs: Iterable[int] | None
    ) -> Iterator[tuple[int, Timestamp]]:
        """Yield output and time of what a notification at `time` keeps open.

        Args:
            time: Of the notification.
            outputs: Those asked for; None: all that what is processed leads to.
        """
        port = self.via_port
        wanted = range(self._spec.num_outputs) if outputs is None else outputs
        for output in wanted:
            if port < 0:
                yield output, time
                continue
            for summary in self._spec.summaries[port][output]:
                held_at = summary.results_in(time)
                if held_at is not None:
                    yield output, held_at

    def is_at(self, capability: Capability, output: int, time: Timestamp) -> bool:
        """Whether a capability stands at exactly that output and time."""
        location = self._locations[output]
        return (capability.location, capability.time) == (location, time)


def _leads_to(summary: Summary, source: Timestamp, target: Timestamp) -> bool:
    if summary.is_identity:
        return less_equal(source, target)
    result = summary.results_in(source)
    return result is not None and less_equal(result, target)
