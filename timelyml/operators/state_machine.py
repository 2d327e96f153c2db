"""State by key, stepped in order of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from timelyml.exchange import records_of
from timelyml.graph import Exchange, StreamRef
from timelyml.operators.checks import check_callable, check_optional_count
from timelyml.operators.edges import StreamLike
from timelyml.operators.expiry import on_frontier, touch, untouch
from timelyml.operators.keys import Key, check_key, key_function, value_function
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.ordered import keep, take_kept
from timelyml.operators.schema import require
from timelyml.operators.steps import send_in_steps
from timelyml.progress import Timestamp, epoch_of
from timelyml.runtime.operator import Delivery, Logic
from timelyml.runtime.shard import Shard

Step: TypeAlias = Callable[[Any, Any, Any], tuple[Any, Iterable[Any]]]
"""From key, value and state to the next state and what to send."""


def state_machine(
    up: StreamLike,
    step: Step,
    *,
    key: Key | None = None,
    ttl_epochs: int | None = None,
    num_shards: int | None = None,
    name: str | None = None,
) -> StreamRef:
    """Step each key's own state through its values, in order of time.

    It exchanges by key itself. A time is worked off once it is complete; within a time
    values come by producer shard, and within one as they were sent.

    Args:
        up: Stream to read.
        step: `step(key, value, state)` returns `(state, results)`. The state is None
            at first; returning None for it forgets the key. All results are sent.
        key: From one record to its key, or the name of a field; the value is the
            record. Default: records are pairs `(key, value)`.
        ttl_epochs: A state that was not stepped for more than so many epochs is
            forgotten: the next value finds None. Default: it stays for ever.
        num_shards: Shards that share the keys; default: as many as `up` has.
        name: Shown in traces and errors; the key of its state.

    Raises:
        GraphError: `step` cannot be called.

    Source:
        timely dataflow (state_machine), with a time to live.
    """
    who = name or "state_machine"
    check_callable(who, "step", step)
    if key is not None:
        check_key(who, key)
        require(who, up, [key] if isinstance(key, str) else [])
    check_optional_count(who, "ttl_epochs", ttl_epochs, least=0)
    key_of, value_of = key_function(key), value_function(key)

    def on_batch(shard: Shard, delivery: Delivery) -> None:
        shard.notify_at(delivery.time)
        keep(shard.state_of("kept"), delivery)

    def on_notify(shard: Shard, time: Timestamp) -> Iterator[None]:
        machines = _Machines(shard, epoch_of(time), ttl_epochs)

        def work(records: list[Any]) -> Iterator[Any]:
            for record in records:
                value = record if value_of is None else value_of(record)
                yield from machines.step(step, key_of(record), value)

        for payload in take_kept(shard.state_of("kept"), time):
            yield from send_in_steps(shard, time, records_of(payload), work)

    def forget(shard: Shard, its_key: Any) -> None:
        shard.state.pop(its_key, None)

    expires = None
    if ttl_epochs is not None:
        expires = on_frontier("touched", ttl_epochs, forget)
    (out,) = add_operator(
        "state_machine",
        [up],
        Logic(
            on_batch=on_batch, on_notify=on_notify, on_frontier=expires, in_order=True
        ),
        name=name,
        pacts=[Exchange.by_key(key_of)],
        states=("state", "kept", "touched"),
        num_shards=num_shards,
    )
    return out


class _Machines:
    """The states of one shard, at one epoch.

    `state` maps a key to its state, and to the epoch of its last step if states have a
    time to live.
    """

    def __init__(self, shard: Shard, epoch: int, ttl_epochs: int | None) -> None:
        self._states = shard.state
        self._touched = shard.state_of("touched")
        self._epoch = epoch
        self._ttl_epochs = ttl_epochs

    def step(self, step: Step, key: Any, value: Any) -> Iterable[Any]:
        """Step one key, and return what to send."""
        if self._ttl_epochs is None:
            state, results = step(key, value, self._states.get(key))
            if state is None:
                self._states.pop(key, None)
            else:
                self._states[key] = state
            return results
        return self._step_with_ttl(step, key, value, self._ttl_epochs)

    def _step_with_ttl(
        self, step: Step, key: Any, value: Any, ttl_epochs: int
    ) -> Iterable[Any]:
        state, touched = self._states.get(key, (None, None))
        if touched is not None and touched + ttl_epochs < self._epoch:
            state = None
        state, results = step(key, value, state)
        if state is not None:
            self._states[key] = state, self._epoch
            touch(self._touched, key, touched, self._epoch)
        elif touched is not None:
            del self._states[key]
            untouch(self._touched, key, touched)
        return results
