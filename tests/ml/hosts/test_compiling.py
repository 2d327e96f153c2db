"""Compiling in the background stops for slices that are given up."""

from __future__ import annotations

import pickle
import threading

import jax

from timelyml.ml.hosts import Load, SliceMade
from timelyml.ml.hosts.compiling import Compiler
from timelyml.ml.hosts.slices import HostSlice

TIMEOUT_S = 60.0


class Slow:
    """A loader that waits with the first computation; they are fruits here."""

    def __init__(self):
        self.begun, self.forgotten = [], []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def load(self, computation, devices):
        del devices
        self.begun.append(computation)
        self.has_begun.set()
        self.may_go_on.wait(TIMEOUT_S)
        raise LookupError(computation)

    def forget(self, identity):
        self.forgotten.append(identity)


def test_nothing_more_is_compiled_for_a_slice_that_is_given_up():
    slow, told = Slow(), threading.Semaphore(0)
    compiler = Compiler("0", told.release, slow)
    gone, kept = (
        HostSlice(SliceMade(name, ("x",), (1,), ((0, 0),)), [jax.local_devices()])
        for name in ("gone", "kept")
    )
    fruits = ("apple", gone), ("banana", gone), ("cherry", kept)
    for epoch, (fruit, slice_) in enumerate(fruits):
        load = Load(fruit, slice_.name, pickle.dumps(fruit))
        compiler.load(load, slice_, epoch)
    assert slow.has_begun.wait(TIMEOUT_S)

    compiler.give_up(gone)
    ((news, slice_, made, epoch),) = compiler.finished()
    slow.may_go_on.set()
    for _ in fruits:
        assert told.acquire(timeout=TIMEOUT_S)

    assert (news.identity, slice_, made, epoch) == ("banana", gone, b"", 1)
    assert (slow.begun, slow.forgotten) == (["apple", "cherry"], [])
    compiler.close()
