"""Messages that are held back are due in time, also where nobody looks."""

from __future__ import annotations

import threading
import time

from timelyml.ml.hosts.delays import Delayed

TIMEOUT_S = 30.0


def test_who_sleeps_is_woken_for_what_is_due():
    woken = threading.Event()
    late = Delayed(1e-3, time.monotonic, woken.set)
    assert late.take("a")
    assert woken.wait(TIMEOUT_S)
    assert list(late.due()) == ["a"]
    late.close()
