"""How long a computation is expected to hold its devices."""

from __future__ import annotations

from timelyml.ml.scheduling.values import DEFAULT_ESTIMATE_NS, Gang


class DurationEstimates:
    """Device time per computation: a moving average of what was measured.

    Until there is a measurement, what is stated counts, but no less than a default:
    launches that prove longer than stated cannot be taken back, so few of them go first.

    >>> estimates = DurationEstimates()
    >>> gang = Gang("f", "slice", estimate_ns=1000)
    >>> estimates.of(gang)
    2000000
    >>> estimates.learn("f", 1200)
    >>> estimates.of(gang)
    1200
    """

    def __init__(self, default_ns: int = DEFAULT_ESTIMATE_NS) -> None:
        self._default_ns = default_ns
        self._measured: dict[str, int] = {}

    def of(self, gang: Gang) -> int:
        """Return the expected device time of a gang."""
        measured = self._measured.get(gang.computation)
        if measured is not None:
            return measured
        return max(self._default_ns, gang.estimate_ns or 0)

    def learn(self, computation: str, device_ns: int) -> None:
        """Take a measurement into account: the first one whole, later ones by a quarter."""
        before = self._measured.get(computation, device_ns)
        self._measured[computation] = before + (device_ns - before) // 4

    def forget(self, computation: str) -> None:
        """Drop what is known of a computation that is not registered any more."""
        self._measured.pop(computation, None)
