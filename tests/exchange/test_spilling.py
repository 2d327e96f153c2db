from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from timelyml.errors import SpillError
from timelyml.exchange import SpillingQueue, spilling

from .samples import Arrival, codec, data


@pytest.fixture
def queue(tmp_path):
    queue = SpillingQueue(100, tmp_path, codec(allow_pickle=True))
    yield queue
    queue.close()


def open_files(directory):
    """Files of the directory that this process holds open, unlinked ones too."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - they vanish
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        except OSError:
            continue
    return [link for link in links if link.startswith(str(directory))]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.none(), st.integers(0, 150)), max_size=60))
def test_blocks_leave_in_the_order_they_came_within_the_budget(tmp_path, steps):
    queue = SpillingQueue(100, tmp_path, codec())
    expected = []
    for number, size in enumerate(steps):
        if size is None:
            assert len(queue) == len(expected)
            if expected:
                assert queue.pop() == expected.pop(0)
            continue
        block = (number, "x" * size)
        queue.push(block, size)
        expected.append(block)
        assert queue.memory_bytes <= 100 or len(queue._memory) == 1
    assert [queue.pop() for _ in range(len(queue))] == expected
    assert queue.queued_bytes == 0
    queue.close()
    assert open_files(tmp_path) == []


def test_what_fits_the_budget_stays_in_memory(queue, tmp_path):
    queue.push("a", 50)
    queue.push("b", 50)
    assert open_files(tmp_path) == []
    queue.push("c", 1)
    assert len(open_files(tmp_path)) == 1
    assert queue.spilled_blocks == 1
    assert queue.queued_bytes == 101


def test_the_disk_is_freed_once_the_queue_is_drained(queue, tmp_path, monkeypatch):
    monkeypatch.setattr(spilling, "SEGMENT_BYTES", 2000)
    for number in range(40):
        queue.push(str(number) * 300, 300)
    files = len(open_files(tmp_path))
    assert files > 5
    for number in range(20):
        assert queue.pop() == str(number) * 300
    assert len(open_files(tmp_path)) < files - 1
    while len(queue):
        queue.pop()
    assert open_files(tmp_path) == []
    queue.push("small", 1)
    assert queue.memory_bytes == 1


def test_a_block_that_spilled_is_the_same_and_read_only(queue):
    rows = np.arange(10_000.0)
    queue.push("first", 100)
    queue.push(Arrival(1, data({"x": rows, "y": [("a", 1), object]})), 80_000)
    queue.pop()
    peer, message = queue.pop()
    payload = message.blocks[0].parts[0].payload
    assert peer == 1
    assert np.array_equal(payload["x"], rows)
    assert payload["y"] == [("a", 1), object]
    assert not payload["x"].flags.writeable


def test_a_full_disk_is_reported_with_its_path(queue, tmp_path, monkeypatch):
    class FullDisk:
        def seek(self, position):
            return position

        def write(self, piece):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    monkeypatch.setattr(spilling.tempfile, "TemporaryFile", lambda **_: FullDisk())
    queue.push("a", 100)
    with pytest.raises(SpillError, match="No space left on device") as caught:
        queue.push("b", 1)
    assert caught.value.path == str(tmp_path)
    assert len(queue) == 1
    assert queue.pop() == "a"


def test_a_directory_that_does_not_exist_is_reported(tmp_path):
    queue = SpillingQueue(1, tmp_path / "nowhere", codec())
    queue.push("a", 1)
    with pytest.raises(SpillError, match=r"No such file.*nowhere"):
        queue.push("b", 1)


def test_an_empty_queue_has_nothing_to_pop(queue):
    with pytest.raises(IndexError, match="empty"):
        queue.pop()


def test_closing_frees_memory_and_disk(queue, tmp_path):
    for _ in range(5):
        queue.push("block", 90)
    queue.close()
    assert len(queue) == 0
    assert queue.queued_bytes == 0
    assert open_files(tmp_path) == []
