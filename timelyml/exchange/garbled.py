"""The error of a frame that an authenticated peer sent and that means nothing."""

from __future__ import annotations

from typing import Any

from timelyml.errors import WireError


def garbled(what: str, got: str, expected: str, **values: Any) -> WireError:
    """Return the error that says what is wrong with a frame, or with a part of it."""
    return WireError(
        f"{what}; got {got}; expected {expected}; use one version of timelyml on both "
        f"sides",
        **values,
    )
