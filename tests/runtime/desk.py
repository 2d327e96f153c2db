"""A service that gives each worker its orders by a dataflow, in epochs."""

from __future__ import annotations

import os
import threading
from collections import deque

from timelyml.graph import GraphBuilder
from timelyml.operators.inputs import input as input_
from timelyml.operators.operator_builder import add_operator
from timelyml.operators.outputs import probe
from timelyml.runtime.effects import DriverMessage, Ended, FrontierMoved
from timelyml.runtime.operator import Logic
from timelyml.runtime.service import ServiceSpec
from timelyml.runtime.service_runs import passed


def carry_out(shard, delivery):
    done = [shard.service("desk").do(order) for order in delivery.payload]
    shard.output().send(delivery.time, done)


def report(shard, delivery):
    shard.emit("done", (delivery.time, delivery.payload))


def orders_flow():
    flow = GraphBuilder("orders")
    orders = input_(flow, name="orders")
    (done,) = add_operator("carry_out", [orders], Logic(on_batch=carry_out))
    add_operator("report", [done], Logic(on_batch=report), num_outputs=0)
    probe(done, name="carried out")
    return flow.build()


class Idle:
    """What a half of a service has to have."""

    def joined(self): ...
    def handle(self, peer, body): ...
    def step(self):
        return False

    def has_work(self):
        return False

    def next_deadline(self):
        return None

    def lost(self, peer, error): ...
    def close(self, error): ...


class DeskWorker(Idle):
    def __init__(self, site):
        self._index = site.index

    def do(self, order):
        if order == "die":
            os._exit(7)
        return f"worker {self._index} did {order}"


class Desk(Idle):
    """Orders are given from any thread; `done`, `frontiers` and `ended` by worker."""

    def __init__(self, site):
        self._site = site
        self._orders = deque()
        self._graph = orders_flow()
        self._runs = {}
        self.done, self.frontiers, self.ended = {}, {}, {}
        self.changed = threading.Condition()

    def joined(self):
        for worker in range(self._site.options["size"]):
            self.done[worker] = []
            self._runs[worker] = self._site.run(
                self._graph, [worker], lambda effect, at=worker: self._hear(at, effect)
            )

    def order(self, worker, epoch, *orders):
        self._orders.append((worker, epoch, list(orders)))
        self._site.wake()

    def step(self):
        while self.has_work():
            worker, epoch, orders = self._orders.popleft()
            self._runs[worker].send("orders", 0, epoch, orders)
            self._runs[worker].advance_to("orders", epoch + 1)
        return False

    def has_work(self):
        return bool(self._runs and self._orders)

    def wait_for(self, condition, timeout_s=60.0):
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s)

    def _hear(self, worker, effect):
        with self.changed:
            match effect:
                case DriverMessage(tag="done"):
                    self.done[worker].append(effect.body)
                case FrontierMoved():
                    self.frontiers[worker] = passed(effect.elements)
                case Ended():
                    self.ended[worker] = effect.error
            self.changed.notify_all()


def desk(size):
    here = "tests.runtime.desk"
    return ServiceSpec(
        "desk", f"{here}:DeskWorker", f"{here}:Desk", options={"size": size}
    )
