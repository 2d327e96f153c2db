"""Waiting for launches: what is over is not held any longer."""

from __future__ import annotations

import threading
import weakref

from timelyml.ml.hosts.buffers import BufferStore
from timelyml.ml.hosts.waiting import Waiter
from timelyml.testing.leftovers import eventually


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
    assert has_run.wait(5.0)
    assert eventually(lambda: held() is None, 5.0)
    waiter.close()
