"""What a client's message must be before the core takes it.

The codec has checked the fields whose types are plain. The rest is checked here, so
that what a client says wrongly puts out that client, and never reaches a host or the
books of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from timelyml.errors import ConfigError, WireError
from timelyml.ml.controller.code_messages import Register
from timelyml.ml.controller.gauged import MAX_GROUPS, CountBuffers
from timelyml.ml.controller.messages import (
    REQUESTS,
    AskSlice,
    Call,
    CallProgram,
    Open,
    Put,
)
from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.functions.specs import check_spec
from timelyml.ml.functions.types import dtype_named
from timelyml.ml.store import CLIENT_BITS

_MAX_BYTES = 1 << 62


def check_message(client: int, message: Any, slices: Mapping[str, SliceRecord]) -> None:
    """Refuse what no client of ours would say.

    Raises:
        WireError: It is that.
    """
    match message:
        case Put():
            _check_numbers(client, [message.buffer])
            _check_put(client, message, slices.get(message.slice))
        case Call() | CallProgram():
            _check_numbers(client, message.outs)
        case CountBuffers():
            _check_numbers(client, message.buffers)
            if not 0 <= message.group < MAX_GROUPS:
                raise _wrong(client, "counts buffers in an impossible group", message)
        case Register():
            slice_ = slices.get(message.slice)
            if slice_ is not None and slice_.client != client:
                raise _wrong(client, "registers for a slice of another", message.slice)
        case AskSlice():
            _check_slice(client, message)
            _check_timeout(client, message)
        case Open():
            _check_timeout(client, message)
        case _ if not isinstance(message, REQUESTS):
            raise _wrong(client, "says what no client says", message)


def _check_numbers(client: int, numbers: Iterable[int]) -> None:
    """Each client has numbers of its own for its buffers."""
    for number in numbers:
        if number >> CLIENT_BITS != client:
            raise _wrong(client, "makes a buffer under the number of another", number)


def _check_put(client: int, put: Put, slice_: SliceRecord | None) -> None:
    if slice_ is None:
        return  # refused by itself
    physical = put.type.physical
    array = put.array
    try:
        is_fitting = array.shape == physical.shape and (
            np.dtype(array.dtype) == np.dtype(dtype_named(physical.dtype))
        )
        is_fitting = is_fitting and put.type.size_bytes == array.nbytes
        check_spec("what is put", slice_.mesh, put.spec, put.type.shape)
    except (ConfigError, AttributeError, TypeError, ValueError) as error:
        raise _wrong(client, "puts what cannot lie there", error) from error
    if not is_fitting:
        shape = getattr(array, "shape", None)
        raise _wrong(client, f"puts an array that is no {put.type}", shape)


# ``Any``: compiled code reads a field of a message whose type it knows as that type, and
# fails with an error of its own where it is not.
def _check_slice(client: int, ask: Any) -> None:
    names = ask.kind, ask.island
    is_named = all(each is None or type(each) is str for each in names)
    if (
        not is_named
        or not 0 <= ask.memory_bytes < _MAX_BYTES
        or len(ask.axis_names) != len(ask.axis_sizes)
    ):
        raise _wrong(client, "asks for an impossible slice", ask)


def _check_timeout(client: int, ask: Any) -> None:
    timeout_s = ask.timeout_s
    is_number = isinstance(timeout_s, int | float) and not math.isnan(timeout_s)
    if timeout_s is not None and not is_number:
        raise _wrong(client, "waits for no number of seconds", timeout_s)


def _wrong(client: int, what: str, got: object) -> WireError:
    return WireError(
        f"client {client} {what}, and is put out; got {got!r:.120}; expected what a "
        f"client of this version says; connect anew",
        client=client,
    )
