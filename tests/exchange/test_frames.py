from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.errors import WireError
from timelyml.exchange.frames import HEADER_BYTES, Kind, pack_frames, read_frames

from .samples import TOKEN

NUMBER = (1, Kind.MESSAGE, -1, 2**40)


def frames_of(body=b"body", buffers=(b"x" * 10, b"", b"yz")):
    return [bytes(f) for f in pack_frames(NUMBER, TOKEN, body, list(buffers))]


def refusal(frames, token=TOKEN):
    with pytest.raises(WireError, match="a frame is refused") as caught:
        read_frames(frames, token)
    return caught.value.reason


@given(st.binary(max_size=50), st.lists(st.binary(max_size=50), max_size=4))
def test_what_is_packed_is_read(body, buffers):
    received = read_frames(frames_of(body, buffers), TOKEN)
    assert received[:4] == (1, Kind.MESSAGE, -1, 2**40)
    assert bytes(received.body) == body
    assert [bytes(buffer) for buffer in received.buffers] == buffers


def test_buffers_are_views_of_the_frames():
    frames = frames_of()
    for buffer, frame in zip(
        read_frames(frames, TOKEN).buffers, frames[1:], strict=True
    ):
        assert buffer.obj is frame


def changed(frames, place, value):
    first = bytearray(frames[0])
    first[place] = value
    return [bytes(first), *frames[1:]]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b""], "short"),
        ([frames_of()[0][: HEADER_BYTES - 1]], "short"),
        ([b"GET / HTTP/1.1\r\n" * 4], "magic"),
        (changed(frames_of(), 4, 99), "version"),
        (changed(frames_of(), HEADER_BYTES - 5, 0), "token"),
        (frames_of()[:-1], "frames"),
        ([*frames_of(), b""], "frames"),
        ([*frames_of()[:-1], b"y"], "frames"),
        ([*frames_of()[:2], b"q", b"yz"], "frames"),
        ([frames_of(buffers=())[0], b"more"], "frames"),
        (
            [
                frames_of(buffers=())[0][: HEADER_BYTES - 4] + struct.pack("<I", 2),
                b"",
                b"",
            ],
            "short",
        ),
    ],
)
def test_foreign_and_incomplete_frames_are_refused(frames, reason):
    assert refusal(frames) == reason


def test_another_token_is_refused():
    assert refusal(frames_of(), b"f" * 16) == "token"


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=3))
def test_random_frames_are_refused(frames):
    assert refusal(frames) in {"short", "magic"}


@given(st.integers(0, HEADER_BYTES + 23), st.integers(0, 255))
def test_a_damaged_header_is_read_or_refused(place, value):
    frames = changed(frames_of(), place, value)
    with suppress(WireError):
        received = read_frames(frames, TOKEN)
        assert len(received.buffers) == 3
