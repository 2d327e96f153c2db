"""A shard on the move: all that the runtime keeps of it as bytes, and back.

That is its state, the capabilities in it, and the notifications that it waits for.
The operator takes no part. A capability is written as what it stands for, and minted
where the shard arrives, once for each, wherever in the state it is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from timelyml.progress import Capability, CapabilityTable, Timestamp
from timelyml.runtime.instance import OperatorInstance
from timelyml.runtime.shipping import dumps, loads
from timelyml.runtime.state import StateStore


@dataclass(frozen=True, slots=True)
class ShardImage:
    """All that the runtime keeps of one shard.

    Attributes:
        states: State by name.
        requests: Its pending notifications.
        capabilities: Location, time, where it was created, and whether it is held; of
            each capability in the above, which refer to it by its number here.
    """

    states: dict[str, bytes]
    requests: bytes
    capabilities: tuple[tuple[int, Timestamp, str, bool], ...]


class Carrier(Protocol):
    """The run on one worker, as far as its shards can leave or come."""

    state: StateStore
    table: CapabilityTable
    instances: list[OperatorInstance]


def export_shard(carrier: Carrier, operator: int, shard: int) -> ShardImage:
    """Return a shard as it is; it stays in place."""
    found: dict[int, tuple[int, Capability]] = {}  # by identity

    def refer(value: Any) -> int | None:
        if not isinstance(value, Capability):
            return None
        number, _ = found.setdefault(id(value), (len(found), value))
        return number

    encode = partial(dumps, refer=refer)
    states = carrier.state.export_shard(operator, shard, encode)
    requests = encode(carrier.instances[operator].notifications.of_shard(shard))
    capabilities = tuple(
        (each.location, each.time, each.site, each.is_held)
        for _, each in found.values()
    )
    return ShardImage(states, requests, capabilities)


def import_shard(
    carrier: Carrier, operator: int, shard: int, image: ShardImage
) -> None:
    """Put a shard in place of what is there; something must justify what it holds."""
    minted: dict[int, Capability] = {}

    def resolve(number: int) -> Capability:
        if number not in minted:
            location, time, site, is_held = image.capabilities[number]
            minted[number] = carrier.table.mint(location, time, site)
            if not is_held:
                minted[number].release()
        return minted[number]

    decode = partial(loads, resolve=resolve)
    carrier.state.install_shard(operator, shard, image.states, decode)
    for request in decode(image.requests):
        carrier.instances[operator].wait_for(request)
