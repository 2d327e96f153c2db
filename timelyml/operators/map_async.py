"""Calling services for records: many calls at once, while the worker goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, overload

from timelyml.errors import ConfigError
from timelyml.exchange import records_of
from timelyml.graph import StreamRef
from timelyml.operators.calls import CompletionQueue, Finished, calls_of
from timelyml.operators.checks import check_callable, check_count
from timelyml.operators.edges import StreamLike
from timelyml.operators.failed import Diverted, OnError, check_on_error, failed_record
from timelyml.operators.keys import first
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.records import Results, Sure
from timelyml.progress import Capability, Timestamp
from timelyml.runtime.operator import WAIT, Delivery, Logic, Wait
from timelyml.runtime.shard import Shard

CALLS_PER_STEP = 64
RESULTS_PER_CALL = 4  # that wait for an earlier one, for each call of the limit


@overload
def map_async(
    up: StreamLike,
    fn: Callable[[Any], Any],
    *,
    limit: int = ...,
    ordered: bool = ...,
    timeout_s: float | None = ...,
    on_error: Sure = ...,
    name: str | None = ...,
) -> StreamRef: ...
@overload
def map_async(
    up: StreamLike,
    fn: Callable[[Any], Any],
    *,
    limit: int = ...,
    ordered: bool = ...,
    timeout_s: float | None = ...,
    on_error: Literal["divert"],
    name: str | None = ...,
) -> Diverted[StreamRef]: ...
def map_async(
    up: StreamLike,
    fn: Callable[[Any], Any],
    *,
    limit: int = 64,
    ordered: bool = True,
    timeout_s: float | None = None,
    on_error: OnError = "fail",
    name: str | None = None,
) -> Results:
    """Send `fn(record)` for each record, where `fn` waits for something elsewhere.

    The worker goes on with other work meanwhile. At `limit`, nothing more is taken in,
    so that credit holds the producers back. Times stay open while their calls are out.

    Args:
        up: Stream to read.
        fn: A coroutine function, which runs on an asyncio loop in a thread of the
            worker; or a plain one, which runs on up to `limit` threads.
        limit: Most calls out at once, on each worker.
        ordered: Send results in the order of the records, on each shard; otherwise as
            they come.
        timeout_s: A call that takes longer fails with a `TimeoutError`.
        on_error: What happens where `fn` raises, or takes too long; see `map`.
        name: Shown in traces and errors.

    Raises:
        GraphError: `fn` cannot be called.
        ConfigError: An option is out of range.
    """
    who = name or "map_async"
    check_callable(who, "fn", fn, may_await=True)
    check_count(who, "limit", limit)
    check_on_error(who, on_error)
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(
            f"operator {who!r} has option 'timeout_s' out of range; got {timeout_s!r}; "
            f"expected seconds above 0, or None; correct the option",
            operator=who,
            option="timeout_s",
        )
    caller = _Caller(fn, limit, timeout_s, is_ordered=ordered, on_error=on_error)
    logic = Logic(
        on_start=caller.on_start,
        on_batch=caller.on_batch,
        on_activate=caller.on_activate,
        on_close=caller.on_close,
    )
    num_outputs = 2 if on_error == "divert" else 1
    streams = add_operator(
        "map_async",
        [up],
        logic,
        name=name,
        num_outputs=num_outputs,
        states=("state", "rights"),
    )
    return Diverted(*streams) if num_outputs == 2 else streams[0]


class _Caller:
    """The calls of one operator on one worker, for all its shards there.

    A shard's state maps the ticket of each call that is out to its time and record, so
    that a shard that comes from elsewhere makes these calls again; "rights" maps a time
    to a capability for each output and the number of its calls.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        limit: int,
        timeout_s: float | None,
        *,
        is_ordered: bool,
        on_error: OnError,
    ) -> None:
        self._calls = calls_of(fn, limit, timeout_s)
        self._limit = limit
        self._is_ordered = is_ordered
        self._on_error = on_error
        self._next_ticket = 0
        self._queues: list[tuple[Shard, CompletionQueue, _Order]] = []
        self._to_repeat: deque[tuple[CompletionQueue, int, Any]] = deque()
        self._look_at: float | None = None

    def on_start(self, shard: Shard) -> None:
        """Open a queue for the shard; make the calls again that were out."""
        completions, order = (
            CompletionQueue(shard.waker()),
            _Order(matters=self._is_ordered),
        )
        self._queues.append((shard, completions, order))
        for ticket, (_, record) in sorted(shard.state.items(), key=first):
            order.expect(ticket)
            self._next_ticket = max(self._next_ticket, ticket + 1)
            self._to_repeat.append((completions, ticket, record))
        self._repeat()

    def on_batch(self, shard: Shard, delivery: Delivery) -> Iterator[Wait | None]:
        """Start a call for each record, as far as there is room."""
        completions, order = next((d, o) for s, d, o in self._queues if s is shard)
        for index, record in enumerate(records_of(delivery.payload), 1):
            while self._is_full(order):
                self._send_finished()  # of any shard: the limit is the worker's
                if self._is_full(order):
                    self._look_again(shard)
                    yield WAIT
            ticket = self._next_ticket
            self._next_ticket += 1
            shard.state[ticket] = delivery.time, record
            self._hold(shard, delivery.time)
            order.expect(ticket)
            self._calls.submit(completions, ticket, record)
            if not index % CALLS_PER_STEP:
                yield None
        self._look_again(shard)

    def on_activate(self, shard: Shard) -> None:
        """Send what is finished."""
        self._send_finished()
        self._look_again(shard)

    def on_close(self) -> None:
        """Give up what is out."""
        self._calls.close()

    def _is_full(self, order: _Order) -> bool:
        if self._calls.num_out >= self._limit or self._to_repeat:
            return True
        # One slow call must not let the results behind it pile up.
        return order.num_expected >= RESULTS_PER_CALL * self._limit

    def _repeat(self) -> None:
        while self._to_repeat and self._calls.num_out < self._limit:
            self._calls.submit(*self._to_repeat.popleft())

    def _look_again(self, shard: Shard) -> None:
        now = shard.now()
        if self._look_at is not None and now < self._look_at:
            return
        seconds = self._calls.look()
        self._look_at = None if seconds is None else now + seconds
        if seconds is not None:
            shard.activate_after(seconds)

    def _send_finished(self) -> None:
        for shard, completions, order in self._queues:
            finished = completions.take()
            self._calls.num_out -= len(finished)
            self._repeat()
            finished = order.ready(finished)
            if finished:
                self._send(shard, finished)

    def _send(self, shard: Shard, finished: list[Finished]) -> None:
        """Send results, those of one time that follow each other in one block."""
        times = [shard.state[each.ticket][0] for each in finished]
        start = 0
        for stop, time in enumerate([*times[1:], None], 1):
            if time != times[start]:
                self._send_block(shard, times[start], finished[start:stop])
                start = stop

    def _send_block(
        self, shard: Shard, time: Timestamp, finished: list[Finished]
    ) -> None:
        results, failed = [], []
        for ticket, result, error in finished:
            _, record = shard.state.pop(ticket)
            if error is None:
                results.append(result)
            elif self._on_error == "fail" or not isinstance(error, Exception):
                shard.blame(time)
                raise error  # an exit is none of the record's failures
            elif self._on_error == "divert":
                failed.append(failed_record(shard, record, error))
        if results:
            shard.output().send(time, results)
        if failed:
            shard.output(1).send(time, failed)
        self._release(shard, time, len(finished))

    def _hold(self, shard: Shard, time: Timestamp) -> None:
        rights = shard.state_of("rights")
        held: tuple[list[Capability], int] | None = rights.get(time)
        if held is None:
            outputs = range(len(shard.outputs))
            held = [shard.retain(time, output) for output in outputs], 0
        rights[time] = held[0], held[1] + 1

    def _release(self, shard: Shard, time: Timestamp, number: int) -> None:
        rights = shard.state_of("rights")
        capabilities, held = rights[time]
        if held > number:
            rights[time] = capabilities, held - number
            return
        del rights[time]
        for capability in capabilities:
            capability.release()


class _Order:
    """Calls of one shard, back in the order in which they went out, if it matters."""

    def __init__(self, *, matters: bool) -> None:
        self._matters = matters
        self._expected: deque[int] = deque()
        self._early: dict[int, Finished] = {}

    @property
    def num_expected(self) -> int:
        """Calls whose results were not sent; 0 if the order does not matter."""
        return len(self._expected)

    def expect(self, ticket: int) -> None:
        """Note a call that goes out."""
        if self._matters:  # else nobody would take it out again
            self._expected.append(ticket)

    def ready(self, finished: list[Finished]) -> list[Finished]:
        """Take finished calls; return those that have no earlier one out."""
        if not self._matters:
            return finished
        self._early.update((each.ticket, each) for each in finished)
        found = []
        while self._expected and self._expected[0] in self._early:
            found.append(self._early.pop(self._expected.popleft()))
        return found
