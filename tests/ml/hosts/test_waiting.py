"""Waiting for launches: what is over is not held any longer."""

from __future__ import annotations

import threading
import time
import weakref

import jax
import numpy as np

from timelyml.ml.functions import ArrayType
from timelyml.ml.hosts import Export
from timelyml.ml.hosts.buffers import Buffer, BufferStore
from timelyml.ml.hosts.waiting import Launched, Started, Waiter
from timelyml.testing.leftovers import eventually

TIMEOUT_S = 30.0


class Job:
    """Says that it ran; in its place stand arrays that a job holds."""

    def __init__(self):
        self.has_run = threading.Event()

    def __call__(self):
        self.has_run.set()


def test_what_the_last_job_held_goes_with_it():
    waiter = Waiter("s", lambda said: None, BufferStore(), lambda: None)
    job = Job()
    held, has_run = weakref.ref(job), job.has_run
    waiter._copy(job)
    del job
    assert has_run.wait(TIMEOUT_S)
    assert eventually(lambda: held() is None, TIMEOUT_S)
    waiter.close()


def test_small_pieces_that_are_there_are_sent_without_another_thread():
    said = []
    waiter = Waiter("s", said.append, BufferStore(), lambda: None)
    array = jax.numpy.arange(4.0, dtype="float32").block_until_ready()
    of = ArrayType((4,), "float32", 4)
    waiter.export(Buffer("s", array), Export(1, of, 7, 2, (((1, 3),),)))
    ((peer, pieces),) = said
    assert (peer, pieces.target) == (7, 2)
    np.testing.assert_array_equal(pieces.pieces[0].array, [1.0, 2.0])
    waiter.close()


class Ready:
    """An array that is computed."""

    def is_deleted(self):
        return False

    def is_ready(self):
        return True

    def block_until_ready(self):
        return self


class Given:
    """An array that a later launch took."""

    def is_deleted(self):
        return True

    def block_until_ready(self):
        raise RuntimeError("deleted")


class Code:
    """What launched it; it has no checks, and no results that ride along."""

    class computation:  # noqa: N801 - stands for an attribute
        out_types = ()

    def check(self, outputs):
        del outputs


def test_time_of_a_device_counts_once_whatever_slices_it_is_in():
    said, free_ns = [], {}
    waiters = [
        Waiter(
            name, said.append, BufferStore(), lambda: None, devices=own, free_ns=free_ns
        )
        for name, own in {"a": ("d0", "d1"), "b": ("d1",), "c": ("d2",)}.items()
    ]
    started_ns = time.monotonic_ns() - 1_000_000_000
    for sequence, waiter in enumerate(waiters):
        started = Started(0, Code(), [Ready()], [0], None)
        waiter.launched(Launched(sequence, (started,), (), started_ns))
        assert waiter.over() == sequence
        waiter.settle()
        assert waiter.over() is None
    both, inner, other = [each.done.device_ns for each in said]
    for each in waiters:
        each.close()
    assert both >= 1_000_000_000
    assert other >= 1_000_000_000
    assert inner < 1_000_000_000  # what was left of d1


def test_what_another_slice_on_the_same_devices_took_is_over_with_that():
    """No launch of its own slice follows, which could tell."""
    said, lines = [], {}
    mine, other, elsewhere = [
        Waiter(
            name,
            said.append,
            BufferStore(),
            lambda: None,
            devices=devices,
            lines=lines,
        )
        for name, devices in {"a": ("0",), "b": ("0",), "c": ("1",)}.items()
    ]
    arrays = [(mine, Given()), (elsewhere, Ready()), (other, Ready())]
    for sequence, (waiter, array) in enumerate(arrays):
        started = Started(0, Code(), [array], [0], None)
        waiter.launched(Launched(sequence, (started,), (), time.monotonic_ns()))
    for waiter, _ in arrays:
        waiter.settle()
    for waiter, _ in arrays:
        waiter.close()
    assert [each.done.sequence for each in said] == [1, 0, 2]


def test_what_was_abandoned_is_not_told_by_another_slice():
    said, lines = [], {}
    mine, other = [
        Waiter(
            name, said.append, BufferStore(), lambda: None, devices=("0",), lines=lines
        )
        for name in "ab"
    ]
    for sequence, (waiter, array) in enumerate([(mine, Given()), (other, Ready())]):
        started = Started(0, Code(), [array], [0], None)
        waiter.launched(Launched(sequence, (started,), (), time.monotonic_ns()))
    mine.settle()
    mine.close()
    other.settle()
    other.close()
    assert [each.done.sequence for each in said] == [1]


class Endless(Given):
    """An array that waits for a process which is gone."""

    def is_deleted(self):
        return False

    def is_ready(self):
        return False


def test_what_was_given_up_is_over_in_its_order_and_so_is_what_follows():
    said, lines, store = [], {}, BufferStore()

    def waiter():
        return Waiter(
            "a", said.append, store, lambda: None, devices=("0",), lines=lines
        )

    before = waiter()
    for sequence, array in enumerate([Given(), Endless(), Endless()]):
        started = Started(7, Code(), [array], [0], None)
        launch = Launched(sequence, (started,), (), time.monotonic_ns())
        if sequence < 2:
            before.launched(launch)
    before.settle()  # the first was taken, so it is over when a later one is
    assert (said, before.over()) == ([], None)

    after = waiter()
    after.give_up(before, b"lost")
    after.launched(launch)
    while after.is_due():
        after.settle()
    after.close()
    assert [each.done.sequence for each in said] == [0, 1, 2]
    assert {each.done.errors for each in said} == {((7, b"lost"),)}
    assert not lines
