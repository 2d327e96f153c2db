"""What the oracle raises: which promise was broken, and where."""

from __future__ import annotations


class Violation(Exception):  # noqa: N818 - a finding, not an error of the simulator
    """A promise of the runtime was broken.

    `promise` is one of `safety`, `liveness`, `delivery`, `notification`, `output`,
    `credit` and `failure`, which is a run that ends with an error for no reason.
    """

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"{promise}: {what}")
        self.promise = promise
        self.what = what
