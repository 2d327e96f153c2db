"""Time to live of keyed state: which keys were last touched in which epoch.

State that was touched at epoch `e` is there up to epoch `e + ttl_epochs`. The reader
checks that by itself, so that results do not depend on when state is freed; this index
finds what to free without looking at every key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from timelyml.progress import epoch_of
from timelyml.runtime.shard import Shard

Cell = dict[Any, Any]
"""State of a shard: from an epoch to the keys last touched in it."""


def touch(cell: Cell, key: Hashable, before: int | None, epoch: int) -> None:
    """Note that `key`, touched at `before` if at all, is touched at `epoch`."""
    if before == epoch:
        return
    if before is not None:
        untouch(cell, key, before)
    cell.setdefault(epoch, {})[key] = None


def untouch(cell: Cell, key: Hashable, before: int) -> None:
    """Forget a key that was last touched at `before`."""
    keys = cell.get(before)
    if keys is not None:
        keys.pop(key, None)
        if not keys:
            del cell[before]


def take_expired(cell: Cell, epoch: int | None, ttl_epochs: int) -> list[Any]:
    """Remove and return the keys whose state is not there any more at `epoch`.

    Args:
        cell: The index.
        epoch: The first epoch that may still come; None if none can.
        ttl_epochs: See the module.

    >>> cell = {}
    >>> touch(cell, "a", None, 1); touch(cell, "b", None, 2); touch(cell, "a", 1, 5)
    >>> take_expired(cell, 5, ttl_epochs=2), cell
    (['b'], {5: {'a': None}})
    """
    expired: list[Any] = []
    for touched in list(cell):  # mostly ascending, since epochs are worked off in order
        if epoch is not None and touched + ttl_epochs >= epoch:
            break
        expired.extend(cell.pop(touched))
    return expired


def on_frontier(
    index: str, ttl_epochs: int, forget: Callable[[Shard, Any], object]
) -> Callable[[Shard], None]:
    """Return a callback that forgets keys as the frontier passes their time to live."""

    def expire(shard: Shard) -> None:
        cell = shard.state_of(index)
        if cell:
            epochs = map(epoch_of, shard.frontier().elements)
            for key in take_expired(cell, min(epochs, default=None), ttl_epochs):
                forget(shard, key)

    return expire
