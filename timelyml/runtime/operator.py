"""What the author of an operator writes: callbacks, and what they are given.

The callbacks hold no state of their own: one copy serves every shard that a
worker has, and what a shard remembers lives in `shard.state`, which belongs to
the runtime.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from timelyml.progress import Timestamp


class Delivery(NamedTuple):  # as a frozen dataclass, each takes 1 us more to make
    """One block that reached one shard.

    Attributes:
        port: Input port that it came in by.
        time: Its timestamp, in the operator's own scope.
        payload: Records (a list) or columns (a pytree of arrays), read-only.
        weight: The number of records that progress counts for it, at least 1.
        source_shard: The shard that produced it.
    """

    port: int
    time: Timestamp
    payload: Any
    weight: int
    source_shard: int


class Wait:
    """What a generator yields to be left alone until its shard is activated."""

    __slots__ = ()


WAIT = Wait()

Steps = Iterator[Wait | None] | None


@dataclass(frozen=True, slots=True)
class Precedence:
    """What a notification waits for beside its own ports, where order matters.

    Attributes:
        first: Sets of ports whose notifications go first at the same time: it waits
            until they, too, are complete at that time, and delivered if asked for.
        earlier: Ports whose notifications go first at every earlier time.
    """

    first: tuple[tuple[int, ...], ...] = ()
    earlier: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Logic:
    """The callbacks of an operator; `None` means not interested.

    `on_batch` and `on_notify` may be generators: the runtime steps them with a
    time budget, so that one long batch does not keep a worker from the others;
    a batch counts as consumed when its generator ends. One that yields `WAIT` is not
    stepped again before a shard of its operator is activated; until then the operator
    takes nothing in, so that credit holds its producers back. Other callbacks return
    nothing.

    Attributes:
        on_start: Once per shard, before anything else; the only place where
            `shard.initial_capability()` is legal.
        on_batch: For each block that arrives.
        on_notify: When every input asked for in `shard.notify_at` is complete.
        on_frontier: After the frontier of any input port moved.
        on_activate: After `shard.activate()` or `shard.activate_after()`.
        on_message: For a control message from the driver.
        on_close: Once per worker, when the run is over there in whatever way: frees
            threads, files and sockets, which are no state.
        make_check: Of an input: makes what the driver calls with each payload that is
            to be sent, and that raises to refuse it.
        in_order: Deliver the notifications of a shard in the order of their times: in
            scopes and on dense edges, too, none comes while one of its ports may still
            bring an earlier time, by Python's order.
        precedence: With `in_order`, by the ports of a notification: which others, by
            other ports, go first.
    """

    on_start: Callable[[Any], None] | None = None
    on_batch: Callable[[Any, Delivery], Steps] | None = None
    on_notify: Callable[[Any, Timestamp], Steps] | None = None
    on_frontier: Callable[[Any], None] | None = None
    on_activate: Callable[[Any], None] | None = None
    on_message: Callable[[Any, Any], None] | None = None
    on_close: Callable[[], None] | None = None
    make_check: Callable[[], Callable[[Any], None]] | None = None
    in_order: bool = False
    precedence: Mapping[tuple[int, ...], Precedence] = field(default_factory=dict)


CALLBACKS = (
    "on_start",
    "on_batch",
    "on_notify",
    "on_frontier",
    "on_activate",
    "on_message",
    "on_close",
)


def broken_rule(
    function: Any, *, may_await: bool = False, may_yield: bool = False
) -> str | None:
    """Return what is expected of a function that would not do what it says.

    Called where nobody awaits it, or takes what it yields, it does nothing at all; and
    as the answer of a predicate a coroutine or a generator is true.
    """
    call = getattr(function, "__call__", None)  # noqa: B004  of an object, its method
    if call is None:
        return "expected a callable; pass the function itself, not its result"
    either = (function, call)
    if not may_await and any(map(is_async, either)):
        return "expected one without async; await in map_async"
    if not may_yield and any(map(inspect.isgeneratorfunction, either)):
        return "expected one that returns; yield in flat_map, on_batch or on_notify"
    return None


def is_async(function: Any) -> bool:
    """Whether it gives something to await, or to iterate with `async for`."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
