"""Completion of dense edges by counting.

Every producer shard sends one logical block per time to each of its static
consumers. What is complete is a set of producer shards, not a number, so a
duplicate cannot miscount: it is refused.
"""

from __future__ import annotations

from timelyml.errors import InvariantError, OperatorError
from timelyml.progress import Timestamp


class DenseInput:
    """Which producer shards of one dense channel have been heard, by consumer."""

    def __init__(
        self, channel: int, producer: str, consumer: str, *, num_expected: int
    ) -> None:
        self._channel = channel
        self._producer = producer
        self._consumer = consumer
        self._num_expected = num_expected
        self._heard: dict[Timestamp, dict[int, set[int]]] = {}

    def hear(self, time: Timestamp, shard: int, source_shard: int) -> bool:
        """Note a finished block; True if `shard` now has everything at `time`.

        Raises:
            InvariantError: The producer shard was already heard.
        """
        heard = self._heard.setdefault(time, {}).setdefault(shard, set())
        if source_shard in heard:
            msg = (
                f"operator {self._consumer!r} shard {shard} got a dense block twice; "
                f"got shard {source_shard} of {self._producer!r} at {time!r}; "
                "expected one logical block per producer shard and time; report it, as "
                "this is a bug"
            )
            raise InvariantError(msg, operator=self._consumer, shard=shard, time=time)
        heard.add(source_shard)
        return len(heard) == self._num_expected

    def is_complete(self, time: Timestamp, shard: int) -> bool:
        """Whether every producer shard has been heard."""
        return len(self._heard.get(time, {}).get(shard, ())) == self._num_expected

    def forget_passed(self, has_passed: list[Timestamp]) -> None:
        """Forget times that the frontier has passed.

        Raises:
            OperatorError: Some producer shards fired at such a time, others never.
        """
        for time in has_passed:
            for shard, heard in self._heard.pop(time, {}).items():
                if len(heard) != self._num_expected:
                    msg = (
                        f"operator {self._producer!r} did not fire on every shard; "
                        f"got {len(heard)} of {self._num_expected} blocks for "
                        f"{self._consumer!r} shard {shard} at {time!r}; expected one "
                        "of each; send exactly once per time, even with nothing to send"
                    )
                    raise OperatorError(
                        msg, operator=self._producer, shard=shard, time=time
                    )

    def open_times(self) -> list[Timestamp]:
        """Times at which something was heard and that are not forgotten yet."""
        return list(self._heard)
