"""Capturing a stream: its data and its progress, to be replayed elsewhere.

Each shard writes a tape of its own. A stream that was captured can be replayed with
any number of workers and shards, in another dataflow, on another day.

Source:
    timely dataflow (capture, EventWriter).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from timelyml.errors import GraphError
from timelyml.operators.addresses import Address, Place, addresses_of
from timelyml.operators.edges import StreamLike, check_stream
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.tape_writers import (
    FileWriter,
    MemoryWriter,
    SocketWriter,
    Writer,
    close_all,
)
from timelyml.progress import Capability
from timelyml.runtime.operator import WAIT, Delivery, Logic, Wait
from timelyml.runtime.record import CAPTURE_TAG
from timelyml.runtime.shard import Shard
from timelyml.runtime.tape import PREAMBLE, Data, Label, Progress, pack, tape_codec

FLUSH_AGAIN_S = 0.002


def capture(
    up: StreamLike,
    to: Place | None = None,
    *,
    overwrite: bool = False,
    name: str | None = None,
) -> None:
    """Write a stream, with its progress, so that `replay` can bring it back.

    Args:
        up: Stream to capture; not in a nested scope.
        to: A directory, which gets one file for each shard once it is complete. Or an
            address where a replay listens, `tcp://127.0.0.1:port` or `unix:/path`; or
            several, which the shards share. Default: memory, as
            `result.recording(name)`.
        overwrite: Replace tapes that are in the directory already.
        name: Key of the recording; default: "capture".

    Raises:
        GraphError: The stream is in a nested scope.
        ConfigError: An address cannot be used.
    """
    who = name or "capture"
    check_stream(who, up)
    if up.depth:
        raise GraphError(
            f"operator {who!r} captures epochs only; got a stream {up.depth} scopes "
            f"deep; expected one outside of scopes; leave the scope first",
            operator=who,
        )
    addresses = None if to is None else addresses_of(who, to)
    directory = Path(str(to)) if to is not None and addresses is None else None
    capturing = _Capturing(directory, addresses, overwrite=overwrite)
    logic = Logic(
        on_start=capturing.on_start,
        on_batch=capturing.on_batch,
        on_frontier=capturing.on_frontier,
        on_activate=capturing.on_activate,
        on_close=capturing.on_close,
    )
    add_operator("capture", [up], logic, name=name, num_outputs=0, states=("state",))


class _Capturing:
    """The tapes of one operator on one worker, by shard."""

    def __init__(
        self,
        directory: Path | None,
        addresses: list[Address] | None,
        *,
        overwrite: bool,
    ) -> None:
        self._directory = directory
        self._addresses = addresses
        self._overwrite = overwrite
        self._codec: Any = None  # made on the worker
        self._writers: dict[int, list[Writer]] = {}
        self._again_at: dict[int, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_codec": None, "_writers": {}}

    def on_start(self, shard: Shard) -> None:
        """Open the shard's tape; hold the run open until it is written."""
        self._codec = self._codec or tape_codec(allow_pickle=False)
        writers = self._writers[shard.index] = []
        goes_on = "frontier" in shard.state  # it was begun elsewhere
        if goes_on and shard.state["capability"] is None:
            return
        for writer, label in self._open(shard):
            writers.append(writer)
            if goes_on:
                writer.go_on(shard.state["written"])
                continue
            writer.put([PREAMBLE, *pack(self._codec, label)])
            if len(writers) > 1:  # an address that has no shard of its own
                writer.put(pack(self._codec, Progress(((0, -1),))))
        if not goes_on:
            shard.state["capability"] = shard.initial_capability()
            shard.state["frontier"] = 0
            shard.state["written"] = writers[0].num_written

    def on_batch(self, shard: Shard, delivery: Delivery) -> Iterator[Wait | None]:
        """Write a block."""
        assert isinstance(delivery.time, int)  # noqa: S101  outside of scopes
        writer = self._writers[shard.index][0]
        writer.put(pack(self._codec, Data(delivery.time, delivery.payload)))
        shard.state["written"] = writer.num_written
        while not self._has_room(shard):
            yield WAIT

    def on_frontier(self, shard: Shard) -> None:
        """Write how the frontier moved."""
        before = shard.state.get("frontier")
        after = min(shard.frontier().elements, default=None)
        if before is None or before == after:
            return
        shard.state["frontier"] = after
        changes = [(before, -1), *([] if after is None else [(after, 1)])]
        writer = self._writers[shard.index][0]
        writer.put(pack(self._codec, Progress(tuple(changes))))
        shard.state["written"] = writer.num_written
        shard.activate()

    def on_activate(self, shard: Shard) -> None:
        """Write what waits; at the end, let the run end."""
        self._has_room(shard)
        capability: Capability | None = shard.state.get("capability")
        if shard.state.get("frontier") is not None or capability is None:
            return
        if all(writer.is_idle for writer in self._writers[shard.index]):
            for writer in self._writers[shard.index]:
                writer.finish()
            shard.state["capability"] = None
            capability.release()

    def _has_room(self, shard: Shard) -> bool:
        """Write what can be written, now and again soon; whether more can be taken."""
        writers = self._writers[shard.index]
        for writer in writers:
            writer.flush()
        if not all(writer.is_idle for writer in writers):
            now = shard.now()
            if now >= self._again_at.get(shard.index, 0.0):
                self._again_at[shard.index] = now + FLUSH_AGAIN_S
                shard.activate_after(FLUSH_AGAIN_S)
        return all(writer.has_room for writer in writers)

    def on_close(self) -> None:
        """Give up what is not complete."""
        for writers in self._writers.values():
            close_all(writers)

    def _open(self, shard: Shard) -> Iterator[tuple[Writer, Label]]:
        """Yield the shard's writers: its own first, then those without data."""
        index, number = shard.index, shard.num_shards
        if self._addresses is None:
            label = Label(index, number, 1)
            if self._directory is not None:
                writer = FileWriter(self._directory, index, overwrite=self._overwrite)
                yield writer, label
            else:
                yield MemoryWriter(lambda data: shard.emit(CAPTURE_TAG, data)), label
            return
        places = len(self._addresses)
        mine = [index % places]
        mine += [place for place in range(number, places) if place % number == index]
        for place in mine:
            here = len(range(place, number, places)) or 1
            address = self._addresses[place]
            yield SocketWriter(address, shard.now), Label(index, number, here)
