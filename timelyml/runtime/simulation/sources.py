"""The sources of random graphs: on their own, or fed by the driver.

A source holds its capabilities in state and moves them epoch by epoch; it opens an
epoch only when the epoch credit allows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from timelyml.runtime.operator import Logic
from timelyml.runtime.simulation.rules import Rule, source_batches
from timelyml.runtime.simulation.trace import Held, Sent, trace_of

CLOSE = ("close",)


@dataclass(frozen=True, slots=True)
class Source:
    """A source operator of a random graph.

    Attributes:
        operator: Its index in the graph.
        rule: How much it sends.
        is_columns: Whether it sends arrays, not lists.
        is_regular: Whether it sends one logical block per epoch, shard and output.
        is_fed: Whether the driver tells it what to send.
        pause_s: Between epochs.
        is_slow: Whether it gives an epoch up only after the pause, not as it sends.
    """

    operator: int
    rule: Rule
    is_columns: bool = False
    is_regular: bool = False
    is_fed: bool = False
    pause_s: float = 0.0
    is_slow: bool = False

    def logic(self) -> Logic:
        """Return the callbacks."""
        return Logic(
            on_start=self.on_start,
            on_activate=None if self.is_fed else self.on_activate,
            on_message=self.on_message,
        )

    def script(self, shard: int) -> list[tuple[Any, ...]]:
        """Return the messages that the driver sends to a shard of a fed source."""
        messages: list[tuple[Any, ...]] = []
        for epoch in range(self.rule.num_epochs):
            for output, batches in enumerate(source_batches(self.rule, shard, epoch)):
                messages += [("data", epoch, output, batch) for batch in batches]
            messages.append(("advance", epoch + 1))
        return [*messages, CLOSE]

    def on_start(self, shard: Any) -> None:
        """Keep the initial capabilities."""
        outputs = range(self.rule.num_outputs)
        shard.state["capabilities"] = [shard.initial_capability(o) for o in outputs]
        shard.state["epoch"] = 0
        shard.state["until"] = self.rule.num_epochs
        for output in outputs:
            trace_of(shard).append(Held(self.operator, output, (0,), 1))
        if not self.is_fed:
            shard.activate()

    def on_activate(self, shard: Any) -> None:
        """Send the next epoch, or close."""
        epoch = shard.state["epoch"]
        if not shard.state["capabilities"]:
            return
        if shard.state.pop("is_sent", False):
            epoch += 1
            self._advance(shard, epoch)
        if epoch >= min(self.rule.num_epochs, shard.state["until"]):
            self._close(shard)
            return
        if not shard.can_start_epoch(epoch):
            return
        for output, batches in enumerate(source_batches(self.rule, shard.index, epoch)):
            blocks = batches or ([[]] if self.is_regular else [])
            for number, records in enumerate(blocks):
                is_last = number + 1 == len(blocks)
                self._send(shard, output, epoch, records, is_last)
        if self.is_slow:
            shard.state["is_sent"] = True
        else:
            self._advance(shard, epoch + 1)
        if self.pause_s:
            shard.activate_after(self.pause_s)
        else:
            shard.activate()

    def on_message(self, shard: Any, body: tuple[Any, ...]) -> None:
        """Do what the driver says; a source that has stopped does nothing."""
        if not shard.state["capabilities"]:
            return
        match body:
            case ("data", epoch, output, records):
                self._send(shard, output, epoch, list(records), True)
            case ("advance", epoch):
                self._advance(shard, epoch)
            case ("close",):
                self._close(shard)
            case ("stop", None):
                self._close(shard)
            case ("stop", until):  # regular: every shard ends before this epoch
                shard.state["until"] = until
                shard.activate()

    def _send(
        self, shard: Any, output: int, epoch: int, records: list[int], is_last: bool
    ) -> None:
        payload = np.array(records, np.int64) if self.is_columns else records
        shard.output(output).send(epoch, payload, is_last=is_last)
        rows = tuple(records)
        trace_of(shard).append(
            Sent(self.operator, shard.index, output, (epoch,), rows, is_last, None)
        )

    def _advance(self, shard: Any, epoch: int) -> None:
        trace = trace_of(shard)
        for output, capability in enumerate(shard.state["capabilities"]):
            trace.append(Held(self.operator, output, (capability.time,), -1))
            capability.downgrade(epoch)
            trace.append(Held(self.operator, output, (epoch,), 1))
        shard.state["epoch"] = epoch

    def _close(self, shard: Any) -> None:
        trace = trace_of(shard)
        for output, capability in enumerate(shard.state["capabilities"]):
            trace.append(Held(self.operator, output, (capability.time,), -1))
            capability.release()
        shard.state["capabilities"] = []
