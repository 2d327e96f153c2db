"""What there is and who takes it: buffers, memory and device time, for people to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from timelyml.ml.controller.messages import ClientUsage, ObjectInfo
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.scheduling import GangDone
from timelyml.ml.store import NOBODY, Directory, Ledger


@dataclass(slots=True)
class _Ran:
    """What a client ran so far."""

    weight: int = 1
    priority: int = 0
    device_ns: int = 0
    num_launches: int = 0
    num_rows: int = 0
    num_idle_shards: int = 0
    num_left_out: int = 0


class DeviceTime:
    """Device time of each client that is there."""

    def __init__(self) -> None:
        self._ran: dict[int, _Ran] = {}

    def join(self, client: int, weight: int = 1, priority: int = 0) -> None:
        """Begin to count for a client."""
        self._ran[client] = _Ran(weight, priority)

    def leave(self, client: int) -> None:
        """Forget a client; what it has under way counts for nobody."""
        self._ran.pop(client, None)

    def charge(self, done: GangDone) -> None:
        """Count a launch that is over."""
        ran = self._ran.get(int(done.client))
        if ran is not None:
            ran.device_ns += done.device_ns * done.num_devices
            ran.num_launches += 1

    def routed(self, client: int, counts: Sequence[int]) -> None:
        """Count the rows that shards were sent, and the shards that were sent none."""
        ran = self._ran.get(client)
        if ran is not None:
            ran.num_rows += int(sum(counts))
            ran.num_idle_shards += sum(not count for count in counts)

    def left_out(self, client: int, count: int) -> None:
        """Count launches on single devices that were left out."""
        ran = self._ran.get(client)
        if ran is not None:
            ran.num_left_out += count

    def usage(self, objects: Iterable[ObjectInfo]) -> tuple[ClientUsage, ...]:
        """Return what each client takes, those that are there first, in order."""
        by_owner: dict[int | None, list[ObjectInfo]] = {each: [] for each in self._ran}
        for each in objects:
            by_owner.setdefault(each.owner, []).append(each)
        found = []
        for owner, owned in by_owner.items():
            ran = _Ran() if owner is None else self._ran.get(owner, _Ran())
            found.append(
                ClientUsage(
                    owner,
                    ran.device_ns / 1e9,
                    ran.num_launches,
                    len(owned),
                    sum(each.device_bytes for each in owned),
                    sum(each.host_bytes for each in owned),
                    ran.weight,
                    ran.priority,
                    ran.num_rows,
                    ran.num_idle_shards,
                    ran.num_left_out,
                )
            )
        return tuple(found)


def objects_of(
    directory: Directory, ledger: Ledger, slices: Mapping[str, SliceRecord]
) -> tuple[ObjectInfo, ...]:
    """Return all buffers there are, oldest first."""
    found = []
    for entry in directory.entries():
        buffer = entry.buffer
        slice_ = slices.get(buffer.placement)
        is_on_device, is_on_host = ledger.where(buffer.number)
        num_devices = len(slice_.devices) if slice_ and is_on_device else 0
        num_hosts = len(slice_.hosts) if slice_ and is_on_host else 0
        found.append(
            ObjectInfo(
                buffer.name,
                buffer.label,
                None if entry.owner == NOBODY else entry.owner,
                tuple(sorted(entry.names)),
                entry.state.value,
                buffer.type.shape,
                buffer.type.dtype,
                buffer.spec,
                buffer.placement,
                slice_.island if slice_ else "",
                buffer.size_bytes * num_devices,
                buffer.host_bytes * num_hosts,
                entry.num_references,
            )
        )
    return tuple(found)
