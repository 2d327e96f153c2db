"""Handles by which the driver feeds a run and watches it: inputs and probes.

Neither holds anything of its own: they read the record of the run, which the
controller's thread writes, and post what they send. Every wait ends with the run.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, Protocol, Self

from timelyml.errors import RunStoppedError, TimeError
from timelyml.exchange import as_payload, num_records, seal, size_bytes
from timelyml.graph import OperatorSpec
from timelyml.progress import Timestamp, check_time, less_equal, less_than
from timelyml.runtime.options import check_wait
from timelyml.runtime.record import RunRecord
from timelyml.runtime.stall import StallReport, late

INPUT_LIMIT_BYTES = 32 << 20
MAX_EPOCH = 2**63 - 1


class RunLink(Protocol):
    """What a handle needs of its run."""

    record: RunRecord

    def send_input(self, operator: int, shard: int, body: Any) -> None:
        """Send a message to one shard of an input, in order."""

    def explain_stall(self, timeout_s: float = 5.0) -> StallReport:
        """Say what holds the run back."""


class InputHandle:
    """The driver's end of an input: sends records at an epoch that only grows.

    Handles may be used from any thread. `send` blocks while what it sent before
    waits unread, beyond 32 MiB or beyond the run's `max_epochs_ahead`; while the
    oldest epoch is held by an input of this run itself, only the bytes count, so
    that filling one input after the other cannot lock up.
    """

    def __init__(
        self, link: RunLink, spec: OperatorSpec, max_epochs_ahead: int
    ) -> None:
        self.name = spec.name
        self._link = link
        self._record = link.record
        self._operator = spec.index
        self._num_shards = spec.num_shards or 1
        self._max_epochs_ahead = max_epochs_ahead
        self._next_shard = itertools.cycle(range(self._num_shards))
        self._epoch = 0
        self._is_closed = False
        make_check = getattr(spec.logic, "make_check", None)
        self._check = None if make_check is None else make_check()
        self._lock = threading.RLock()

    @property
    def time(self) -> int:
        """The epoch at which `send` sends now."""
        return self._epoch

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._is_closed

    def send(self, payload: Any, *, timeout_s: float | None = None) -> None:
        """Send records or columns at the present epoch.

        With several shards, whole payloads go to them in turn. Arrays are sealed,
        read-only from now on; a list is copied, its records are not.

        Args:
            payload: A list of records, or a pytree of arrays that share their
                leading axis.
            timeout_s: How long to wait for credit; None as long as the run lives.

        Raises:
            PayloadError: It is neither, or does not fit the schema of the input.
            DeadlineError: There was no credit in time.
            TimelyError: The run failed, with its error, or it is over.
        """
        check_wait(timeout_s)
        checked = as_payload(payload)
        checked = list(checked) if isinstance(checked, list) else seal(checked)
        with self._lock:
            self._check_open()
            if self._check is not None:
                self._check(checked)
            if num_records(checked) == 0:
                return
            size = size_bytes(checked)
            self._wait(
                lambda: self._is_closed or self._has_credit(size),
                timeout_s,
                "had no credit",
            )
            self._check_open()  # `close` does not wait for a send that has no credit
            with self._record.changed:
                self._record.outstanding_bytes[self.name] += size
            shard = next(self._next_shard)
            self._link.send_input(self._operator, shard, ("data", self._epoch, checked))

    def advance_to(self, epoch: int) -> None:
        """Promise that nothing more comes before `epoch`; does not block.

        Raises:
            TimeError: `epoch` is no integer, or earlier than the present one.
        """
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch > MAX_EPOCH:
            msg = (
                f"input {self.name!r} cannot advance; got epoch {epoch!r}; expected an "
                "integer below 2**63"
            )
            raise TimeError(msg, input=self.name, epoch=epoch)
        with self._lock:
            if epoch < self._epoch:
                msg = (
                    f"input {self.name!r} cannot move backwards; got epoch {epoch}; "
                    f"expected {self._epoch} or later; advance_to only moves forward"
                )
                raise TimeError(msg, input=self.name, epoch=epoch)
            self._check_open()
            if epoch == self._epoch:
                return
            self._epoch = epoch
            with self._record.changed:
                if not self._is_closed:
                    self._record.input_epochs[self.name] = epoch
                self._record.changed.notify_all()
            self._to_every_shard(("advance", epoch))

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Block until the workers took everything sent so far into the dataflow.

        Raises:
            DeadlineError: They did not in time.
            TimelyError: The run failed, with its error.
        """
        check_wait(timeout_s)
        outstanding = self._record.outstanding_bytes
        self._wait(
            lambda: outstanding[self.name] <= 0,
            timeout_s,
            "could not flush",
            ended=True,
        )

    def close(self) -> None:
        """Send nothing more; closing twice, or after the run, changes nothing.

        A `send` that waits for credit in another thread gives up.
        """
        with self._record.changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._record.input_epochs.pop(self.name, None)
            self._record.changed.notify_all()
        with self._lock:
            self._to_every_shard(("close",))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"at epoch {self._epoch}"
        return f"<InputHandle {self.name!r} {state}>"

    def _to_every_shard(self, body: tuple[Any, ...]) -> None:
        for shard in range(self._num_shards):
            self._link.send_input(self._operator, shard, body)

    def _check_open(self) -> None:
        who = f"input {self.name!r}"
        if self._record.is_ended:
            raise self._record.over_error(who)
        if self._is_closed:
            msg = (
                f"{who} is closed; got more to do; expected nothing after close(); close "
                "it later"
            )
            raise RunStoppedError(msg, input=self.name)

    def _has_credit(self, size: int) -> bool:
        """Called with the record's lock held."""
        record = self._record
        outstanding = record.outstanding_bytes[self.name]
        if outstanding > 0 and outstanding + size > INPUT_LIMIT_BYTES:
            return False
        oldest = record.oldest_epochs.get(self._operator, 0)
        if oldest is None or self._epoch - oldest < self._max_epochs_ahead:
            return True
        return oldest >= min(record.input_epochs.values(), default=oldest)

    def _wait(
        self,
        condition: Callable[[], bool],
        timeout_s: float | None,
        what: str,
        *,
        ended: bool = False,
    ) -> None:
        is_in_time = self._record.wait_until(condition, timeout_s)
        if self._record.is_ended:
            self._record.raise_if_failed()
            if not ended:
                raise self._record.over_error(f"input {self.name!r}")
        elif not is_in_time:
            who = f"input {self.name!r} {what}"
            raise late(who, timeout_s, self._link.explain_stall())


class Probe:
    """Shows how far a run has come at a probe; may be used from any thread."""

    def __init__(self, link: RunLink, spec: OperatorSpec) -> None:
        self.name = spec.name
        self._depth = spec.depth
        self._link = link
        self._record = link.record

    @property
    def frontier(self) -> tuple[Timestamp, ...]:
        """The minimal times that may still come; empty once none can."""
        return self._record.frontiers[self.name]

    @property
    def done(self) -> bool:
        """Whether nothing can come any more."""
        return not self.frontier

    def less_equal(self, time: Timestamp) -> bool:
        """Whether something at `time` or before it may still come.

        Raises:
            TimeError: It is no timestamp of the probe's scope.
        """
        check_time(time, self._depth, f"probe {self.name!r}")
        return any(less_equal(element, time) for element in self.frontier)

    def less_than(self, time: Timestamp) -> bool:
        """Whether something before `time` may still come; raises as `less_equal`."""
        check_time(time, self._depth, f"probe {self.name!r}")
        return any(less_than(element, time) for element in self.frontier)

    def wait_until(self, time: Timestamp, timeout_s: float | None = None) -> None:
        """Block until `time` is complete here: nothing at it or before it can come.

        Raises:
            TimeError: It is no timestamp of the probe's scope.
            DeadlineError: It was not in time; says what holds it back.
            TimelyError: The run failed, with its error.
        """
        check_wait(timeout_s)
        is_in_time = self._record.wait_until(
            lambda: not self.less_equal(time), timeout_s
        )
        if not self.less_equal(time):
            return
        self._record.raise_if_failed()
        if not is_in_time:
            what = f"probe {self.name!r} did not pass time {time!r}"
            raise late(what, timeout_s, self._link.explain_stall())

    def __repr__(self) -> str:
        return f"<Probe {self.name!r} at {list(self.frontier)!r}>"
