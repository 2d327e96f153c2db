"""What clients share: names for buffers, who waits for one, and what there is at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from timelyml.errors import DeadlineError, HandleError, InvariantError
from timelyml.ml.controller.buffers import Buffers
from timelyml.ml.controller.messages import (
    Acknowledged,
    AskObjects,
    AskUsage,
    ObjectInfo,
    Objects,
    Open,
    Opened,
    OpenedBuffer,
    Publish,
    Refused,
    Unpublish,
    Usage,
    Watch,
)
from timelyml.ml.controller.outbox import Outbox
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.controller.usage import DeviceTime, objects_of
from timelyml.ml.store import Entry
from timelyml.runtime.failure import pack_error


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A client that waits for a name."""

    client: int
    message: Open
    deadline_s: float | None


class Names:
    """Publishes and opens, and tells what there is.

    Args:
        slices: All slices.
        buffers: All buffers.
        device_time: That of all clients.
        outbox: Takes the answers.
    """

    def __init__(
        self,
        slices: Mapping[str, SliceRecord],
        buffers: Buffers,
        device_time: DeviceTime,
        outbox: Outbox,
    ) -> None:
        self._device_time = device_time
        self._slices = slices
        self._buffers = buffers
        self._outbox = outbox
        self._waiting: list[_Waiting] = []

    def handle(self, client: int, message: Any, now_s: float) -> None:
        """Take what a client says that is about all of them."""
        match message:
            case Publish():
                self.publish(client, message)
            case Open():
                self.open(client, message, now_s)
            case Unpublish():
                self.unpublish(client, message)
            case Watch():
                self._buffers.watch(client, message.buffers)
            case AskObjects():
                objects = Objects(message.request, self.objects())
                self._outbox.tell(client, objects)
            case AskUsage():
                clients = self._device_time.usage(self.objects())
                self._outbox.tell(client, Usage(message.request, clients))
            case _:
                raise InvariantError(
                    f"client {client} said what nobody understands; got {message!r:.200}"
                )

    def objects(self) -> tuple[ObjectInfo, ...]:
        """Return all buffers there are, oldest first."""
        ledger = self._buffers.memory.ledger
        return objects_of(self._buffers.directory, ledger, self._slices)

    def publish(self, client: int, message: Publish) -> None:
        """Give buffers of a client to a name; who waits for it opens it."""
        directory = self._buffers.directory
        try:
            directory.publish(client, message.name, message.buffers, message.structure)
        except HandleError as error:
            self._outbox.tell(client, Refused(message.request, pack_error(error)))
            return
        self._outbox.tell(client, Acknowledged(message.request))
        served = [each for each in self._waiting if each.message.name == message.name]
        self._waiting = [each for each in self._waiting if each not in served]
        for each in served:
            self._open(each.client, each.message)

    def open(self, client: int, message: Open, now_s: float) -> None:
        """Let a client hold what is published, at once or when it is."""
        is_there = self._buffers.directory.is_published(message.name)
        if is_there or message.timeout_s == 0:
            self._open(client, message)
            return
        timeout_s = message.timeout_s
        deadline_s = None if timeout_s is None else now_s + timeout_s
        self._waiting.append(_Waiting(client, message, deadline_s))

    def unpublish(self, client: int, message: Unpublish) -> None:
        """Take a name back; what clients have opened stays theirs."""
        try:
            effects = self._buffers.directory.unpublish(message.name)
        except HandleError as error:
            self._outbox.tell(client, Refused(message.request, pack_error(error)))
            return
        self._buffers.follow(effects)
        self._outbox.tell(client, Acknowledged(message.request))

    def leave(self, client: int) -> None:
        """Forget that a client waits."""
        self._waiting = [each for each in self._waiting if each.client != client]

    def tick(self, now_s: float) -> None:
        """Refuse those that have waited for too long."""
        late = [
            e
            for e in self._waiting
            if e.deadline_s is not None and e.deadline_s <= now_s
        ]
        self._waiting = [each for each in self._waiting if each not in late]
        for each in late:
            error = DeadlineError(
                f"name {each.message.name!r} was not published in time; got nothing for "
                f"{each.message.timeout_s} s; expected a client to publish it; wait longer",
                name=each.message.name,
                timeout_s=each.message.timeout_s,
            )
            refused = Refused(each.message.request, pack_error(error))
            self._outbox.tell(each.client, refused)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if ever."""
        deadlines = (each.deadline_s for each in self._waiting)
        return min((each for each in deadlines if each is not None), default=None)

    def _open(self, client: int, message: Open) -> None:
        directory = self._buffers.directory
        try:
            numbers, structure = directory.open(client, message.name)
        except HandleError as error:
            self._outbox.tell(client, Refused(message.request, pack_error(error)))
            return
        entries = [directory.readable(client, number) for number in numbers]
        opened = tuple(map(self._describe, entries))
        self._outbox.tell(client, Opened(message.request, opened, structure))

    def _describe(self, entry: Entry) -> OpenedBuffer:
        buffer = entry.buffer
        slice_ = self._slices[buffer.placement]
        return OpenedBuffer(
            buffer.number, buffer.type, buffer.spec, slice_.name, slice_.mesh.axis_names,
            slice_.mesh.axis_sizes, slice_.platform, slice_.island, slice_.devices,
        )  # fmt: skip
