from __future__ import annotations

import collections
import contextlib
import datetime as dt
import enum
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import InvariantError, PayloadError, WireError
from timelyml.exchange import Codec

from .samples import MESSAGES, Checked, Credit, Parcel, Part, Piece, codec


class Ping(NamedTuple):
    """Says all by being there."""


class Colour(enum.IntEnum):
    RED = 1


@dataclass(frozen=True)
class Columns:
    ids: np.ndarray
    words: np.ndarray


ENCODER, DECODER, TRUSTING = codec(), codec(), codec(allow_pickle=True)


def carried(value: Any, decoder: Codec = DECODER) -> Any:
    """Encode, copy as a wire would, decode with another codec."""
    body, buffers = ENCODER.encode(value)
    return decoder.decode(bytes(body), [bytes(b) for b in buffers])


def same(left: Any, right: Any) -> bool:
    """Equality with types, NaN equal to itself, and arrays by bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        equal = left.dtype == right.dtype and left.shape == right.shape
        content = np.ndarray.tolist if left.dtype.hasobject else np.ndarray.tobytes
        return equal and content(left) == content(right)
    if isinstance(left, float):
        return repr(left) == repr(right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same([*left.items()], [*right.items()])
    return bool(left == right)


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(st.characters(), max_size=8),
    st.binary(max_size=8),
    st.dates(),
    st.datetimes(),
    st.timedeltas(),
    st.complex_numbers(allow_nan=False),
    st.frozensets(st.integers() | st.text(max_size=2), max_size=3),
)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(st.tuples(inner, inner), max_size=4)
        | st.dictionaries(st.integers() | st.text(max_size=3) | st.tuples(), inner)
    ),
    max_leaves=12,
)
arrays = st.tuples(
    st.sampled_from(
        [
            "i1",
            "<u2",
            ">i4",
            "i8",
            "f2",
            "f4",
            ">f8",
            "g",
            "c8",
            "?",
            "U3",
            "S2",
            "M8[ns]",
            "m8[s]",
            "V3",
            ml_dtypes.bfloat16,
            ml_dtypes.float8_e4m3fn,
            ml_dtypes.float8_e5m2,
        ]
    ),
    st.lists(st.integers(0, 40), min_size=0, max_size=3),
).map(lambda drawn: np.zeros(drawn[1], drawn[0]))


@given(values)
def test_plain_values_survive_with_their_types(value):
    assert same(carried(value), value)


@given(st.lists(arrays, max_size=3))
def test_arrays_survive_with_dtype_and_shape(payload):
    assert same(carried(payload), payload)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        {"a": {(1, "x"): [(), ((),)]}},
        2**64,
        -(2**63) - 1,
        b"",
        "\ud800",
        dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
        dt.datetime(2020, 1, 1, fold=1),  # noqa: DTZ001 - naive on purpose
        np.float32(0.1),
        np.int64(-1),
        np.str_("word"),
        np.datetime64("2020-01-01"),
        np.bool_(True),
        [(1, 2), (3, 4)],
        [(1, 2), (3,)],
        [(), ()],
        [(1, [2]), [3, 4]],
        [(i, str(i), None, (i, [i])) for i in range(20)],
        [(i,) * (1 + i % 2) for i in range(20)],
        [()] * 20,
        [np.float32(i) for i in range(20)],
        [np.int64(i) if i else i for i in range(20)],
        [np.bool_(i % 2) for i in range(20)],
        [np.str_(i) for i in range(20)],
        [np.full(3, i, np.int16) for i in range(20)],
        [np.zeros(i, np.int16) for i in range(20)],
        [np.array(i) for i in range(20)],
        [np.zeros(5000)] * 9,
        [(np.int64(i), np.zeros(2), {i}, b"") for i in range(20)],
        [{"k": (i, np.float32(i))} for i in range(20)],
        [[i] for i in range(20)],
        [i if i % 2 else {i} for i in range(20)],
    ],
)
def test_values_of_every_kind_need_no_pickle(value):
    assert same(carried(value), value)


def test_a_bytearray_arrives_as_bytes():
    assert carried([bytearray(b"x")]) == [b"x"]


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        OrderedDict(a=1),
        dt.time(12),
        dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "here")),
        range(3),
        np.zeros(3, [("x", "i4"), ("y", "f8")]),
        np.zeros(3000, [("x", "i4"), ("y", "f8")]),
        np.array([1, "a"], object),
        np.zeros(2, "V0"),
    ],
)
def test_other_objects_are_pickled_between_authenticated_peers(value):
    assert same(carried(value, TRUSTING), value)
    body, buffers = codec().encode(value)
    with pytest.raises(WireError, match="pickled code; got it from a peer"):
        codec().decode(body, buffers)


@pytest.mark.parametrize(
    "records",
    [
        [Colour.RED] * 20,
        [Columns(i, np.zeros(5000)) for i in range(20)],
        [(i, Colour.RED) for i in range(20)],
        [i if i % 2 else Colour.RED for i in range(20)],
    ],
)
def test_many_objects_are_pickled_at_once(records):
    calls = []

    def dumps(value, callback):
        calls.append(value)
        return pickle.dumps(value, protocol=5, buffer_callback=callback)

    encoded = codec(dumps=dumps).encode(records)
    assert str(TRUSTING.decode(*encoded)) == str(records)
    assert len(calls) == 1


def test_columns_in_a_dataclass_travel_out_of_band():
    value = Columns(np.arange(5000), np.array(["a", "b"]))
    body, buffers = codec().encode(value)
    assert len(body) < 1000
    assert len(buffers) == 1
    assert np.shares_memory(np.frombuffer(buffers[0], np.uint8), value.ids)
    back = codec(allow_pickle=True).decode(body, buffers)
    assert same([back.ids, back.words], [value.ids, value.words])
    assert np.shares_memory(back.ids, value.ids)


def test_large_arrays_are_neither_copied_on_the_way_out_nor_in():
    array = np.arange(4096.0).reshape(64, 64)
    body, (buffer,) = codec().encode({"x": array})
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), array)
    wire = bytearray(buffer)
    back = codec().decode(body, [wire])["x"]
    assert np.shares_memory(back, np.frombuffer(wire, np.uint8))
    assert len(body) < 100


@pytest.mark.parametrize("size", [10, 10_000])
def test_decoded_arrays_are_read_only_for_good(size):
    body, buffers = codec().encode(np.zeros(size))
    back = codec().decode(body, [bytearray(b) for b in buffers])
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        back.setflags(write=True)


def test_an_array_that_is_not_contiguous_is_sent_in_row_order():
    array = np.arange(10_000).reshape(100, 100).T[::2]
    assert same(carried(array), np.ascontiguousarray(array))


def test_a_misaligned_buffer_is_copied_into_place():
    array = np.arange(2000.0)
    body, (buffer,) = codec().encode(array)
    shifted = memoryview(b"x" + bytes(buffer))[1:]
    back = codec().decode(body, [shifted])
    assert back.flags.aligned
    assert not back.flags.writeable
    assert np.array_equal(back, array)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_without_pickle(message):
    assert carried(message) == message
    assert type(carried(message)) is type(message)
    assert carried([message, {"inner": message}]) == [message, {"inner": message}]


def test_integers_that_numpy_computed_arrive_as_integers():
    back = carried(Credit(np.int64(1), ((np.int32(0), np.int64(9)),)))
    assert back == Credit(1, ((0, 9),))
    assert type(back.generation) is int
    assert type(back.refunds[0][1]) is int


def test_a_message_of_the_wrong_shape_is_refused():
    index = list(codec()._schemas).index(Part)
    for fields in ([1, True], [1, True, 0, 0], ["1", True, 0], [1, 1, 0], 7, "abc"):
        with pytest.raises(
            WireError,
            match=r"^a message (does not fit its class Part|holds a wrong value)",
        ):
            codec().decode(msgpack.packb([index, fields, 0]), [])


def test_a_named_tuple_of_the_wrong_shape_is_refused_whatever_came_before_it():
    shared = codec()
    index = list(shared._schemas).index(Piece)

    def decoded(*fields):
        return shared.decode(msgpack.packb([index, fields, 0]), [])

    for _ in range(2):
        assert decoded(1, True, [7]) == Piece(1, True, [7])
        for fields in ([1, True], [1, True, 0, 0], ["1", True, [7]], [1, 1, [7]]):
            with pytest.raises(
                WireError,
                match=r"^a message (does not fit its class Piece|holds a wrong value)",
            ):
                decoded(*fields)
    with pytest.raises(WireError, match="does not fit its class Piece"):
        shared.decode(msgpack.packb([index, {1: 2, 3: 4, 5: 6}, 0]), [])


def test_a_named_tuple_takes_what_numpy_computed_for_plain_values():
    back = carried(Parcel(0, (Piece(np.int64(1), np.True_, [1]),)))
    assert [type(value) for value in back.pieces[0]] == [int, bool, list]


def test_payloads_of_all_kinds_fit_a_named_tuple():
    shared = codec()
    for payload in [[1], "a", 1, None, 2.5, b"x", {"a": 1}] * 2:
        message = Piece(0, True, payload)
        assert shared.decode(*shared.encode(message)) == message


def test_a_named_tuple_without_fields_is_a_message():
    shared = Codec([Ping])
    assert shared.decode(*shared.encode(Ping())) == Ping()


def test_a_message_that_its_own_class_refuses_is_refused():
    body, _ = codec().encode(Checked(5))
    with pytest.raises(WireError, match="ValueError: negative"):
        codec().decode(body.replace(b"\x05", b"\xff"), [])


def test_an_object_that_does_not_pickle_is_named():
    with pytest.raises(PayloadError, match=r"record cannot be sent .* got function"):
        codec().encode([lambda: 1])


def test_a_record_that_contains_itself_is_refused():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(PayloadError, match="expected nesting below 500"):
        codec().encode(loop)


def test_a_codec_works_on_after_an_error():
    shared = codec()
    body, buffers = shared.encode([np.zeros(5000)])
    with pytest.raises(PayloadError, match="record cannot be sent"):
        shared.encode([np.zeros(5000), lambda: 1])
    with pytest.raises(WireError, match="cannot be decoded; got IndexError"):
        shared.decode(body, [])
    assert len(shared.encode([np.zeros(5000)])[1]) == 1
    assert shared.decode(body, buffers)[0].shape == (5000,)


def test_a_body_says_in_its_last_byte_whether_it_holds_marks():
    shared = codec()
    assert [shared.encode(v)[0][-1] for v in (1, (1,), [1], {(): 1}, 1)] == [
        0,
        1,
        0,
        1,
        0,
    ]


def test_objects_can_be_pickled_by_value():
    def dumps(value: Any, callback: Any) -> bytes:
        named = ("by value", type(value).__name__)
        return pickle.dumps(named, protocol=5, buffer_callback=callback)

    encoded = codec(dumps=dumps).encode(lambda: 1)
    assert TRUSTING.decode(*encoded) == ("by value", "function")


@dataclass(frozen=True)
class Endless:
    inner: tuple[Endless, ...]


def test_a_message_class_that_contains_itself_is_a_bug():
    with pytest.raises(InvariantError, match="Endless contains itself"):
        Codec([Endless])


def refuse_or_decode(body: bytes, buffers: list[bytes]) -> None:
    """Whatever comes in, only WireError may come out."""
    with contextlib.suppress(WireError):
        DECODER.decode(body, buffers)


@given(st.binary(max_size=64), st.lists(st.binary(max_size=8), max_size=2))
def test_random_bytes_raise_nothing_but_wire_errors(body, buffers):
    refuse_or_decode(body, buffers)


REAL = [codec().encode(m) for m in (*MESSAGES, {"x": np.zeros(5000), "y": {1, 2}})]


@given(st.sampled_from(REAL), st.data())
def test_damaged_messages_raise_nothing_but_wire_errors(encoded, data):
    body, buffers = bytearray(encoded[0]), list(encoded[1])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    refuse_or_decode(bytes(body[:cut]), buffers[: data.draw(st.integers(0, 1))])


garbage = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=5)
    | st.sampled_from(["<f8", "O", "<U9", "bfloat16", "os", "int", "set", "datetime"])
    | st.binary(max_size=9)
    | st.integers(0, 8).map(lambda code: msgpack.ExtType(code, b""))
    | st.just(msgpack.ExtType(9, b"x")),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.tuples(st.integers(0, 8), st.lists(inner, max_size=4)).map(
            lambda drawn: [msgpack.ExtType(drawn[0], b""), *drawn[1]]
        )
    ),
    max_leaves=15,
)


@given(
    st.integers(-2, 30), garbage, st.integers(0, 1), st.lists(st.binary(max_size=16))
)
def test_wellformed_nonsense_raises_nothing_but_wire_errors(
    index, fields, flag, buffers
):
    refuse_or_decode(msgpack.packb([index, fields, flag]), buffers)


def marked(code: int, *items: Any) -> bytes:
    return msgpack.packb([-1, [msgpack.ExtType(code, b""), *items], 1])


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (marked(3, "<f8", [2], b"12345678"), "does not fit its bytes; got 8"),
        (marked(3, "<f8", [2**40, 2**40], b""), "does not fit its bytes"),
        (marked(3, "<f8", [-1], b""), "malformed shape"),
        (marked(3, "<f8", [1] * 40, b"12345678"), "malformed shape"),
        (marked(3, "<f8", [1], 3), "IndexError"),
        (marked(3, "|O", [1], b"12345678"), "unknown dtype"),
        (marked(3, "f8,f8", [1], b"0123456789abcdef"), "unknown dtype"),
        (marked(3, "popen", [1], b""), "unknown dtype"),
        (marked(4, "<f8", b"1"), "does not fit its bytes"),
        (marked(5, "eval", "1"), "unknown kind of value"),
        (marked(6, 999, []), "IndexError"),
        (marked(7, pickle.dumps(1), []), "pickled code"),
        (marked(1, [1, 2], [1]), "ValueError"),
        (marked(2, 7), "TypeError"),
        (msgpack.packb([-1, msgpack.ExtType(0, b""), 1]), "stray mark"),
        (msgpack.packb([-1, [1, msgpack.ExtType(0, b"")], 1]), "stray mark"),
        (msgpack.packb([-1, msgpack.ExtType(0, b""), 0]), "none was announced"),
        (msgpack.packb([-1, 1, 0]) + b"\x00", "ExtraData"),
        (b"\x91" * 5000 + b"\x00", "StackError"),
        (b"\xdd\xff\xff\xff\xff" * 100 + b"\x00", "ValueError"),
        (b"", "IndexError"),
    ],
)
def test_a_hostile_frame_is_refused(body, match):
    with pytest.raises(WireError, match=match):
        codec().decode(body, [])


def test_collections_namedtuples_are_pickled():
    pair = collections.namedtuple("pair", "a b")  # noqa: PYI024 - what users have
    globals()["pair"] = pair
    pair.__module__, pair.__qualname__ = __name__, "pair"
    try:
        value = pair(1, 2)
        assert type(carried(value, TRUSTING)) is pair
    finally:
        del globals()["pair"]


@dataclass(frozen=True, slots=True)
class OddNames:
    """Fields that are called like what a decoder is made of."""

    type: int
    cls: str
    values: tuple[int, ...]
    new: Any
    m: Inner | None


@dataclass(frozen=True, slots=True)
class Inner:
    list: float
    len: bool


def test_fields_may_be_called_like_anything():
    codec = Codec([OddNames])
    message = OddNames(1, "a", (1, 2), {"x": None}, Inner(0.5, True))
    assert codec.decode(*codec.encode(message)) == message


class Box:
    def __init__(self, array):
        self.array = array


@pytest.mark.parametrize("memory", [bytes, bytearray])
def test_arrays_inside_of_objects_can_be_written_whichever_way_they_came(memory):
    body, (buffer,) = Codec([], allow_pickle=True).encode(Box(np.zeros(10_000)))
    came = memory(buffer)
    box = Codec([], allow_pickle=True).decode(body, [came])
    box.array += 1
    assert np.all(box.array == 1)
