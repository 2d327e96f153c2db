"""What a client may have at once: calls under way, and bytes of values.

Who goes beyond that is refused what it asks for, with an error that says how much it
has; others notice nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from timelyml.errors import AdmissionError
from timelyml.ml.store import Buffer, Directory

DEFAULT_MAX_CLIENTS = 1024
DEFAULT_MAX_CALLS = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """How much clients may have at once.

    Attributes:
        max_clients: Clients that are connected.
        max_calls: Calls of one client that are not over.
        max_bytes: Bytes of the values that one client holds, each counted once; without
            limit if None.
    """

    max_clients: int = DEFAULT_MAX_CLIENTS
    max_calls: int = DEFAULT_MAX_CALLS
    max_bytes: int | None = None

    def check_clients(self, num_clients: int) -> None:
        """Refuse one client more than there may be.

        Raises:
            AdmissionError: There are as many.
        """
        if num_clients >= self.max_clients:
            raise AdmissionError(
                f"a client is not let in; got {num_clients} that are connected; expected "
                f"fewer than {self.max_clients}; close one, or raise max_clients",
                limit=self.max_clients,
            )


class Admission:
    """Counts what clients have, and refuses what goes beyond their limits.

    Args:
        limits: How much they may have.
        directory: Knows the bytes of what they hold.

    Attributes:
        now_s: The time, as those set it who take what clients say.
    """

    def __init__(self, limits: Limits, directory: Directory) -> None:
        self._limits = limits
        self._directory = directory
        self._num_calls: Counter[int] = Counter()
        self.now_s = 0.0

    def check_call(
        self, client: int, outputs: Iterable[Buffer], given: Iterable[int] = ()
    ) -> None:
        """Refuse a call that would be one too many, or make too much.

        Args:
            client: Whose it is.
            outputs: What it makes.
            given: Buffers that the client gives away to it.

        Raises:
            AdmissionError: So it is.
        """
        if self._num_calls[client] >= self._limits.max_calls:
            raise AdmissionError(
                f"client {client} has too many calls under way; got "
                f"{self._num_calls[client]}; expected fewer than "
                f"{self._limits.max_calls}; wait for results before calling more",
                client=client,
                limit=self._limits.max_calls,
            )
        self.check_bytes(client, outputs, given)

    def check_bytes(
        self, client: int, buffers: Iterable[Buffer], given: Iterable[int] = ()
    ) -> None:
        """Refuse values that are too much with what the client goes on to hold.

        Raises:
            AdmissionError: So it is.
        """
        limit = self._limits.max_bytes
        if limit is None:
            return
        freed = [self._directory.get(number) for number in given]
        held = self._directory.held_bytes(client)
        held -= sum(each.buffer.type.size_bytes for each in freed if each is not None)
        added = sum(each.type.size_bytes for each in buffers)
        if held + added > limit:
            raise AdmissionError(
                f"client {client} may not hold so much; got {added:,} bytes more than "
                f"the {held:,} that it holds; expected at most {limit:,}; let go of "
                f"handles first",
                client=client,
                limit=limit,
            )

    def begin_call(self, client: int) -> None:
        """Count a call."""
        self._num_calls[client] += 1

    def end_call(self, client: int) -> None:
        """Count a call that is over."""
        self._num_calls[client] -= 1
        if not self._num_calls[client]:
            del self._num_calls[client]  # or clients that are gone would stay
