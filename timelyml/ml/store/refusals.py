"""What a program is told that can never have its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from timelyml.errors import MemoryLimitError
from timelyml.ml.store.values import Claim

NUM_NAMED = 5
"""Holders that a message names; the error has all of them."""


def too_large(
    claim: Claim,
    placement: str,
    needed: int,
    room: int,
    *,
    arguments: Sequence[str],
    reserved: Mapping[str, int],
) -> MemoryLimitError:
    """Return the error of a program that could not even run alone.

    Or not beside what other slices have `reserved` on these devices.
    """
    what = "can never fit"
    others = [f"{size:,} by slice {x!r}" for x, size in reserved.items()]
    if others:
        what = f"does not fit beside what is reserved ({_named(others)})"
    return MemoryLimitError(
        f"{_who(claim)} {what}; got {needed:,} bytes per device on slice "
        f"{placement!r}, with arguments {_named(arguments)}; expected at most {room:,}; "
        f"use more devices, smaller shards, or donate arguments",
        program=claim.program,
        placement=placement,
        needed_bytes=needed,
        limit_bytes=room,
        holders=list(arguments),
    )


def no_room_on_hosts(
    claim: Claim, missing: int, holders: Sequence[str]
) -> MemoryLimitError:
    """Return the error of a program for which nothing more can be spilled."""
    return MemoryLimitError(
        f"{_who(claim)} does not fit beside what is kept; got {missing:,} bytes per "
        f"device too few, no room for them in host memory, and nothing that runs and "
        f"would leave some; these are kept: {_named(holders)}; expected their holders to "
        f"let some go; drop handles, or serve with more host memory",
        program=claim.program,
        missing_bytes=missing,
        holders=list(holders),
    )


def _who(claim: Claim) -> str:
    return f"{claim.label or f'program {claim.program}'} of client {claim.client}"


def _named(holders: Sequence[str]) -> str:
    more = len(holders) - NUM_NAMED
    return (
        "; ".join(holders[:NUM_NAMED]) + (f"; and {more} more" if more > 0 else "")
        or "none"
    )
