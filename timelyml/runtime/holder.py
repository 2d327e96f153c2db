"""What holds a shard, as the shard sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from timelyml.progress import Capability, Frontier, UserTime


class Host(Protocol):
    """What a shard asks of the operator instance that holds it."""

    name: str
    num_shards: int
    worker_index: int
    num_workers: int
    notified_ports: tuple[int, ...]
    received: Any  # payload of the delivery being processed, sealed by its sender
    now: Callable[[], float]  # the worker's clock
    metrics: dict[str, float]  # figures of the operator on this worker
    may_send: Callable[[int, UserTime], bool]  # whether anything justifies it
    service: Callable[[str], Any]  # the half of one that the worker has

    def mint(self, output: int, time: UserTime, site: str) -> Capability:
        """Mint a capability; the caller has checked that it is justified."""

    def initial(self, output: int, site: str) -> Capability:
        """Clone the initial capability; only while operators start."""

    def request(
        self,
        shard: int,
        time: UserTime,
        ports: tuple[int, ...] | None,
        outputs: tuple[int, ...] | None,
    ) -> None:
        """Ask for a notification."""

    def state_cell(self, shard: int, name: str) -> dict[Any, Any]:
        """The dictionary of (this operator, shard, name)."""

    def port_frontier(self, port: int) -> Frontier:
        """Frontier of an input port, over all workers."""

    def is_complete(self, shard: int, time: UserTime, ports: tuple[int, ...]) -> bool:
        """Whether the ports have everything for the shard at `time`."""

    def activate(self, shard: int, after_s: float) -> None:
        """Run `on_activate` of the shard, now or later."""

    def waker(self, shard: int) -> Callable[[], None]:
        """Return what activates a shard from any thread."""

    def can_start_epoch(self, shard: int, epoch: int) -> bool:
        """Whether the epoch credit allows `epoch` to be opened."""

    def may_go_on(self) -> bool:
        """Whether a callback may do more than one thing now."""

    def emit(self, shard: int, tag: str, body: Any) -> None:
        """Send something to the driver."""

    def blame(self, shard: int, time: UserTime) -> None:
        """Note where a send failed, for the error report."""
