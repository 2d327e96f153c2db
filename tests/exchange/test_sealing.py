from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from timelyml.exchange import seal_message

from .samples import (
    MESSAGES,
    Arrival,
    Block,
    Data,
    Parcel,
    Part,
    Piece,
    Report,
    data,
)


@pytest.mark.parametrize(
    "wrap",
    [
        data,
        lambda array: data({"x": (array, None)}),
        lambda array: data([array]),
        lambda array: Report(1, {"a": {"b": array}}),
        lambda array: Report(1, holdings=((1, array),)),
        lambda array: Arrival(1, array),
        lambda array: ["send", array],
        lambda array: {"body": ("send", 5, {"x": array})},
        lambda array: array,
        lambda array: Report(1, {"a": Arrival(1, array)}),
        lambda array: Arrival(1, Arrival(2, array)),
    ],
)
def test_an_array_anywhere_in_a_message_becomes_read_only(wrap):
    base = np.zeros(4)
    seal_message(wrap(base[1:]))
    assert not base.flags.writeable


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_without_arrays_are_left_alone(message):
    seal_message(message)


@dataclass(frozen=True)
class Perhaps:
    part: Part | None


def test_an_array_in_an_optional_part_becomes_read_only():
    array = np.zeros(2)
    seal_message(Perhaps(None))
    seal_message(Perhaps(Part(0, False, array)))
    assert not array.flags.writeable


def test_named_tuples_are_sealed_as_dataclasses_are():
    arrays = [np.zeros(2) for _ in range(2)]
    seal_message(
        Parcel(0, (Piece(0, True, arrays[0]), Piece(1, True, {"x": arrays[1]})))
    )
    assert not any(array.flags.writeable for array in arrays)


def test_all_parts_of_all_blocks_are_sealed():
    arrays = [np.zeros(2) for _ in range(4)]
    parts = [Part(0, False, array) for array in arrays]
    seal_message(
        Data(1, (Block(0, 0, tuple(parts[:2])), Block(1, 0, tuple(parts[2:]))))
    )
    assert not any(array.flags.writeable for array in arrays)
