"""When to ask again for what cannot say that it has come: seldom, after long silence."""

from __future__ import annotations

from timelyml.runtime.shard import Shard

SOONEST_S = 0.01
LATEST_S = 0.05  # 20 turns a second take some 0.5% of a core
SHARE = 1 / 8  # of the silence so far


class Asking:
    """Has one shard activated as long as there is nothing, once for each time."""

    def __init__(self) -> None:
        self._silent_since: float | None = None
        self._ask_at = 0.0

    def found(self) -> None:
        """There was something: ask soon, when it falls silent anew."""
        self._silent_since = None

    def ask_again(self, shard: Shard) -> None:
        """Have the shard activated; only once, though others may activate it too."""
        now = shard.now()
        if self._silent_since is None:
            self._silent_since = now
        silence_s = now - self._silent_since
        after_s = min(max(SOONEST_S, silence_s * SHARE), LATEST_S)
        if now < self._ask_at <= now + after_s:
            return
        self._ask_at = now + after_s
        shard.activate_after(after_s)
