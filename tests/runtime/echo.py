"""A small service: a question goes round all workers and comes back with who saw it."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from timelyml.exchange import CONTROLLER, Lane
from timelyml.runtime.service import ServiceSpec

DELAY_S = 0.01  # a worker keeps a question so long


@dataclass(frozen=True, slots=True)
class Question:
    """Goes from worker to worker, and from the last one home."""

    number: int
    seen: tuple[str, ...]
    payload: Any


MESSAGES = (Question,)
LANES = {"control": Lane.CONTROL, "bulk": Lane.BULK}


class EchoWorker:
    def __init__(self, site):
        self._site = site
        self._due = deque()
        self.lost_peers = []
        self.is_joined = False
        self.is_closed = False

    def joined(self):
        self.is_joined = True

    def handle(self, peer, body):
        assert self.is_joined
        order = body.payload if isinstance(body.payload, str) else ""
        if order == "die":
            os._exit(7)
        if order == "raise":
            raise ValueError("a bug of the service")
        self._due.append((self._site.clock() + DELAY_S, body))

    def step(self):
        now = self._site.clock()
        worked = False
        while self._due and self._due[0][0] <= now:
            _, body = self._due.popleft()
            index, size = self._site.index, self._site.options["size"]
            seen = (*body.seen, f"worker {index}")
            target = index + 1 if index + 1 < size else CONTROLLER
            question = Question(body.number, seen, body.payload)
            self._site.send(target, question, LANES[self._site.options["lane"]])
            worked = True
        return worked

    def has_work(self):
        return False

    def next_deadline(self):
        return self._due[0][0] if self._due else None

    def lost(self, peer, error):
        self.lost_peers.append((peer, error))

    def close(self, error):
        assert not self.is_closed
        self.is_closed = True


class EchoController:
    def __init__(self, site):
        self._site = site
        self._questions = deque()
        self._is_joined = False
        self.answers = {}
        self.lost_workers = []
        self.is_closed = False
        self.changed = threading.Condition()

    def ask(self, number, payload):
        """May be called from any thread."""
        self._questions.append(Question(number, (), payload))
        self._site.wake()

    def wait_for(self, condition, timeout_s=30.0):
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s)

    def joined(self):
        self._is_joined = True

    def handle(self, peer, body):
        with self.changed:
            self.answers[body.number] = body
            self.changed.notify_all()

    def step(self):
        worked = False
        while self.has_work():
            self._site.send(0, self._questions.popleft(), Lane.CONTROL)
            worked = True
        return worked

    def has_work(self):
        return self._is_joined and bool(self._questions)

    def next_deadline(self):
        return None

    def lost(self, peer, error):
        with self.changed:
            self.lost_workers.append((peer, error))
            self.changed.notify_all()

    def close(self, error):
        assert not self.is_closed
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


def echo(size, lane="control"):
    here = "tests.runtime.echo"
    return ServiceSpec(
        "echo",
        f"{here}:EchoWorker",
        f"{here}:EchoController",
        f"{here}:MESSAGES",
        {"size": size, "lane": lane},
    )
