"""What an operator's callbacks see: their shard, and the outputs they may use.

Everything here checks the caller's rights at the call: a send needs a delivery
or notification being processed, or a capability held at that output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from timelyml.errors import CapabilityError, RoutingError
from timelyml.exchange import as_payload, seal
from timelyml.progress import Capability, Frontier, UserTime
from timelyml.runtime.channels import OutChannel
from timelyml.runtime.holder import Host
from timelyml.runtime.metrics import PEAK_SUFFIX
from timelyml.runtime.state import DEFAULT_NAME


class Output:
    """One output of one shard."""

    __slots__ = ("_channels", "_host", "_index", "_is_heeded", "_shard")

    def __init__(
        self, host: Host, shard: int, index: int, channels: list[OutChannel]
    ) -> None:
        self._host = host
        self._shard = shard
        self._index = index
        self._channels = channels
        # Whether a reader lets shards be named, or there is nobody to mind.
        self._is_heeded = not channels or any(
            each.num_direct_shards is not None for each in channels
        )

    def send(self, time: UserTime, payload: Any, *, is_last: bool = True) -> None:
        """Send records or columns at `time`; the payload is sealed by it.

        Args:
            time: UserTime in the operator's scope; justified by the delivery or
                notification being processed, or by a held capability.
            payload: A list of records, or a pytree of arrays that share their
                leading axis. Read-only from now on, in every run mode.
            is_last: On a dense edge, whether this ends the logical block of
                this shard and time.

        Raises:
            CapabilityError: Nothing justifies a send at `time`.
            PayloadError: The payload is neither records nor columns.
            RoutingError: A destination lies outside the receiving shards.
        """
        host = self._host
        if not host.may_send(self._index, time):
            raise self._refusal(time)
        if payload is not host.received:
            payload = _sealed(payload)
        try:
            for channel in self._channels:
                channel.push(self._shard, time, payload, is_last=is_last)
        except BaseException:
            host.blame(self._shard, time)
            raise

    def send_to(self, time: UserTime, shard: int, payload: Any) -> None:
        """Send to one shard of the receiver, over an edge with a `Direct` pact.

        Readers over other edges get it as well, by the pact of theirs.

        Raises:
            CapabilityError: Nothing justifies a send at `time`.
            RoutingError: The receiver has no such shard, or no edge is direct.
        """
        host = self._host
        if not host.may_send(self._index, time):
            raise self._refusal(time)
        if not self._is_heeded:
            raise self._unheeded()
        if payload is not host.received:
            payload = _sealed(payload)
        try:
            for channel in self._channels:
                channel.push(self._shard, time, payload, is_last=True, target=shard)
        except BaseException:
            host.blame(self._shard, time)
            raise

    def send_rows(
        self,
        time: UserTime,
        payload: Any,
        destinations: Any,
        *,
        is_last: bool = True,
    ) -> None:
        """Send each row to the shard that is named for it, over a `Direct` edge.

        Only shards that get rows get anything, in one block each, with their rows in
        order. Rows that already stand in the order of shards are not copied. Readers
        over other edges get all rows, by the pact of theirs.

        Args:
            time: See `send`.
            payload: See `send`.
            destinations: One shard of the receiver for each row, as integers.
            is_last: See `send`; a dense edge brings the other shards an empty block.

        Raises:
            CapabilityError: Nothing justifies a send at `time`.
            PayloadError: The payload is neither records nor columns.
            RoutingError: The receiver has no such shard, there is not one destination
                for each row, or no edge is direct.
        """
        host = self._host
        if not host.may_send(self._index, time):
            raise self._refusal(time)
        if not self._is_heeded:
            raise self._unheeded()
        if payload is not host.received:
            payload = _sealed(payload)
        shards = np.asarray(destinations)
        try:
            for channel in self._channels:
                channel.push(self._shard, time, payload, is_last=is_last, target=shards)
        except BaseException:
            host.blame(self._shard, time)
            raise

    @property
    def num_target_shards(self) -> int:
        """Shards that `send_to` and `send_rows` can name: those of the `Direct` reader.

        Of several such readers, the fewest; of none, this operator's own.
        """
        counts = [channel.num_direct_shards for channel in self._channels]
        return min(filter(None, counts), default=self._host.num_shards)

    def _refusal(self, time: UserTime) -> CapabilityError:
        msg = (
            f"operator {self._host.name!r} shard {self._shard} may not send on "
            f"output {self._index}; got time {time!r}; expected a time justified by "
            "the delivery or notification being processed, or by a held "
            "capability; retain one first"
        )
        return CapabilityError(
            msg, operator=self._host.name, shard=self._shard, time=time
        )

    def _unheeded(self) -> RoutingError:
        pacts = [each.spec.pact.describe() for each in self._channels]
        msg = (
            f"operator {self._host.name!r} names shards on output {self._index}, "
            f"but nobody heeds them; got readers by {', '.join(pacts)}; expected a "
            "direct edge; read the stream through direct()"
        )
        return RoutingError(msg, operator=self._host.name, output=self._index)


class Shard:
    """One shard of an operator, as its callbacks see it.

    Attributes:
        index: Its number, from 0.
        outputs: Its outputs, by port.
        now: Returns seconds by the worker's clock, which a simulation replaces.
        records_per_step: How many records its last step took; the runtime's own.
    """

    __slots__ = ("_host", "_state", "index", "now", "outputs", "records_per_step")

    def __init__(
        self, host: Host, index: int, channels: list[list[OutChannel]]
    ) -> None:
        self._host = host
        self.index = index
        self.now = host.now
        self._state: dict[Any, Any] | None = None  # once it has been asked for
        self.records_per_step = 1
        self.outputs = tuple(
            Output(host, index, output, outgoing)
            for output, outgoing in enumerate(channels)
        )

    @property
    def operator(self) -> str:
        """Name of the operator."""
        return self._host.name

    @property
    def num_shards(self) -> int:
        """Shards of the operator, over all workers."""
        return self._host.num_shards

    @property
    def worker_index(self) -> int:
        """The worker that holds this shard."""
        return self._host.worker_index

    @property
    def num_workers(self) -> int:
        """Workers of the run."""
        return self._host.num_workers

    @property
    def notified_ports(self) -> tuple[int, ...]:
        """In `on_notify`: the ports whose completion was asked for."""
        return self._host.notified_ports

    @property
    def state(self) -> dict[Any, Any]:
        """The state declared under the name "state"."""
        if self._state is None:
            self._state = self._host.state_cell(self.index, DEFAULT_NAME)
        return self._state

    def state_of(self, name: str) -> dict[Any, Any]:
        """The state declared under `name`.

        Raises:
            GraphError: The operator never declared it.
        """
        return self._host.state_cell(self.index, name)

    def output(self, index: int = 0) -> Output:
        """The output with that index."""
        return self.outputs[index]

    def notify_at(
        self,
        time: UserTime,
        ports: tuple[int, ...] | None = None,
        outputs: tuple[int, ...] | None = None,
    ) -> None:
        """Ask for `on_notify(time)` once `ports` are complete at `time`.

        Asking again for the same time and ports brings no second callback. Until
        the callback has run, the runtime keeps the right to send at what `time`
        becomes at each of `outputs`, of every call.

        Args:
            time: At or after the delivery or notification being processed.
            ports: Input ports that must be complete; all of them by default.
            outputs: Outputs to keep open; those connected to the port of the
                delivery being processed by default.

        Raises:
            CapabilityError: Nothing justifies a send at `time`.
        """
        self._host.request(self.index, time, ports, outputs)

    def retain(self, time: UserTime, output: int = 0) -> Capability:
        """Keep the right to send on `output` at `time` and later.

        Raises:
            CapabilityError: Nothing justifies a send at `time`.
        """
        if not self._host.may_send(output, time):
            msg = (
                f"operator {self.operator!r} shard {self.index} may not retain a "
                f"capability on output {output}; got time {time!r}; expected a time "
                "justified by what is being processed or by a held capability; retain "
                "it while something justifies it"
            )
            raise CapabilityError(
                msg, operator=self.operator, shard=self.index, time=time
            )
        return self._host.mint(output, time, _call_site())

    def initial_capability(self, output: int = 0) -> Capability:
        """The right to send from the minimum time on; only in `on_start`.

        Raises:
            CapabilityError: Called after the operator started.
        """
        return self._host.initial(output, _call_site())

    def frontier(self, port: int = 0) -> Frontier:
        """Frontier of an input port, over all workers."""
        return self._host.port_frontier(port)

    def is_complete(self, port: int, time: UserTime) -> bool:
        """Whether this shard has everything of `port` at `time`."""
        return self._host.is_complete(self.index, time, (port,))

    def activate(self) -> None:
        """Run `on_activate` again soon."""
        self._host.activate(self.index, 0.0)

    def activate_after(self, seconds: float) -> None:
        """Run `on_activate` again after that many seconds."""
        self._host.activate(self.index, seconds)

    def waker(self) -> Callable[[], None]:
        """Return a function that activates this shard, from any thread, at any time.

        Everything else here belongs to the worker's own thread.
        """
        return self._host.waker(self.index)

    def can_start_epoch(self, epoch: int) -> bool:
        """Whether a source may open `epoch` now.

        At most `max_epochs_ahead` epochs may be open; where the answer is no,
        `on_activate` runs again when it may have changed.
        """
        return self._host.can_start_epoch(self.index, epoch)

    def may_go_on(self) -> bool:
        """Whether a callback that could return may as well do more.

        Not once its share of the turn is used up, nor while what it sent waits for
        credit; it activates the shard then, and goes on in the next turn.
        """
        return self._host.may_go_on()

    def blame(self, time: UserTime) -> None:
        """Let what is raised next be reported at `time`, where no callback is at it."""
        self._host.blame(self.index, time)

    def report_peak(self, figure: str, value: float) -> None:
        """Note a figure of the operator, of which the largest counts.

        Metrics of the run have it as `<figure>_peak`, over all shards and workers.
        """
        metrics, name = self._host.metrics, figure + PEAK_SUFFIX
        metrics[name] = max(value, metrics.get(name, value))

    def service(self, name: str) -> Any:
        """Return the half of a service that this worker has; in callbacks only.

        Raises:
            ConfigError: The cluster has no such service.
        """
        return self._host.service(name)

    def emit(self, tag: str, body: Any) -> None:
        """Send a message to the driver, e.g. a collected batch."""
        self._host.emit(self.index, tag, body)


def _sealed(payload: Any) -> Any:
    return seal(payload if type(payload) is list else as_payload(payload))


def _call_site() -> str:
    """File and line of the user's call, for explanations of stalls."""
    is_compiled = not __file__.endswith(".py")  # such functions have no frames
    frame = sys._getframe(0 if is_compiled else 2)  # noqa: SLF001  inspect.stack costs milliseconds
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
