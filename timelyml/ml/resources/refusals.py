"""What clients are told about slices that they cannot have."""

from __future__ import annotations

from collections.abc import Sequence

from timelyml.errors import SliceError
from timelyml.ml.resources.requests import SliceRequest, SliceState


def taken_name(name: str) -> SliceError:
    """Refuse a second slice of one name."""
    return SliceError(
        f"slice {name!r} is there already; got it again; expected a new name; release "
        f"the slice first",
        slice=name,
    )


def unknown_slice(name: str, known: Sequence[str]) -> SliceError:
    """Refuse a slice that nobody has."""
    return SliceError(
        f"slice {name!r} is unknown; got a name that nobody asked for or that was "
        f"released; expected one of {list(known[:5])}; ask for it again",
        slice=name,
    )


def not_granted(name: str, done: str) -> SliceError:
    """Refuse to do something with a slice that waits for its first devices."""
    return SliceError(
        f"slice {name!r} cannot be {done}; got it waiting for its first devices; "
        f"expected it to have some; wait until it is granted",
        slice=name,
    )


def not_active(name: str, state: SliceState) -> SliceError:
    """Refuse to migrate a slice that does not run."""
    return SliceError(
        f"slice {name!r} cannot be migrated; got it {state}; expected it active; "
        f"resume it, or wait until it has moved",
        slice=name,
    )


def nowhere_to_go(request: SliceRequest, available: str) -> SliceError:
    """Refuse to migrate a slice that fits nowhere else."""
    return SliceError(
        f"slice {request.name!r} cannot be migrated; got no other {wish(request)}; "
        f"expected them among: {available}; release other slices, or let hosts join",
        slice=request.name,
        available=available,
    )


def impossible(request: SliceRequest, available: str) -> SliceError:
    """Refuse a request that no devices that are there could ever meet."""
    return SliceError(
        f"slice {request.name!r} can never be given; got a request for {wish(request)}; "
        f"expected one that fits on one island of: {available}; ask for less, or let "
        f"hosts join first",
        slice=request.name,
        available=available,
    )


def not_in_time(
    request: SliceRequest, available: str, holders: Sequence[str]
) -> SliceError:
    """Give up a request that waited for too long; `holders` reserve memory."""
    return SliceError(
        f"slice {request.name!r} was not given in time; got no {wish(request)}; "
        f"expected some of: {available}, where slices {list(holders[:5])} reserve "
        f"memory; wait longer, or release them",
        slice=request.name,
        available=available,
        holders=list(holders),
    )


def wish(request: SliceRequest) -> str:
    """Say what a request asks for.

    >>> wish(SliceRequest("me", "s", (("data", 2),), kind="cpu"))
    "2 devices as {'data': 2} of kind 'cpu' on any island"
    """
    kind = "any kind" if request.kind is None else f"kind {request.kind!r}"
    island = "any island" if request.island is None else f"island {request.island!r}"
    text = (
        f"{request.num_devices} devices as {dict(request.shape)} of {kind} on {island}"
    )
    if request.memory_bytes:
        text += f" with {request.memory_bytes:,} bytes reserved on each"
    return text + (", neighbours" if request.is_adjacent else "")
