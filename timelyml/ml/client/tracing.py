"""What devices do while a block of a client's program runs: launches and transfers."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeAlias

from timelyml.errors import ConfigError, TimelyError
from timelyml.ml.controller.messages import Acknowledged
from timelyml.ml.controller.traced import AskTrace, LaunchSpan, Traced, TransferSpan

Ask: TypeAlias = Callable[[Callable[[int], Any], str, float | None], Any]


class DeviceTrace:
    """A context manager; what ended inside it, of all clients, can be read afterwards.

    Wait inside for whatever is to be in it: when a value is ready, the launch that made
    it is traced.

    Args:
        ask: As of `Resources`.

    Attributes:
        launches: Of each host in the order in which they ended.
        transfers: From slice to slice, within a host or between two.
        num_left_out: Spans beyond 100,000 launches and as many transfers, of which the
            newest are kept; and those of hosts that never said what time it is.
        clock_error_s: How far times of a host may be off beside those of another; 0
            where all have one clock, as on one machine.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._number = 0
        self.launches: tuple[LaunchSpan, ...] = ()
        self.transfers: tuple[TransferSpan, ...] = ()
        self.num_left_out = 0
        self.clock_error_s = 0.0

    def __enter__(self) -> Self:
        begun: Acknowledged = self._ask(AskTrace, "a trace", None)
        self._number = begun.request
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        number, self._number = self._number, 0
        if not number:
            raise ConfigError(
                "a trace cannot end; got the end of one that was not begun; expected "
                "`with client.resources.trace() as trace:` around what is to be in it"
            )
        try:
            found: Traced = self._ask(
                lambda request: AskTrace(request, number), "what was traced", None
            )
        except TimelyError:
            if error is None:
                raise
            return  # what went wrong inside says more
        self.launches, self.transfers = found.launches, found.transfers
        self.num_left_out = found.num_left_out
        self.clock_error_s = found.clock_error_s
