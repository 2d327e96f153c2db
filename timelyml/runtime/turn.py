"""What an operator instance asks of the dataflow that schedules it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from timelyml.runtime.channels import Arrival
from timelyml.runtime.whereabouts import Whereabouts


class Turn(Protocol):
    """The run on this worker, as an instance sees it while it has its turn."""

    whereabouts: Whereabouts
    worker_index: int
    num_workers: int
    service: Callable[[str], Any]

    def now(self) -> float:
        """Seconds by the worker's clock."""

    def must_stop(self, operator: int) -> bool:
        """Whether the time budget of this turn is used up, or the operator blocked."""

    def is_blocked(self, operator: int) -> bool:
        """Whether an output of the operator waits for credit."""

    def consumed(self, arrival: Arrival) -> None:
        """Count an arrival as consumed and give its credit back."""

    def left_queue(self, arrival: Arrival) -> None:
        """Give the credit of an arrival back: it left the queue."""

    def activate(self, operator: int, shard: int, after_s: float) -> None:
        """Run `on_activate` of a shard, now or later."""

    def waker(self, operator: int, shard: int) -> Callable[[], None]:
        """Return what activates a shard from any thread."""

    def can_start_epoch(self, operator: int, shard: int, epoch: int) -> bool:
        """Whether the epoch credit allows a source to open `epoch`."""

    def emit(self, operator: int, shard: int, tag: str, body: Any) -> None:
        """Send something to the driver."""

    def state_cell(
        self, operator: int, shard: int, name: str, operator_name: str
    ) -> dict[Any, Any]:
        """Return declared state."""
