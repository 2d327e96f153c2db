"""A core with hosts that only pretend to compute, and links that a seed delays.

A host keeps its word as real ones do: it launches in the order of its gate, once all
inputs of a gang are there or promised, and reports later. Values are numbers.
"""

from __future__ import annotations

import math
import pickle
import random
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from tests.ml.controller.running import FakeRun, Running
from timelyml.errors import BufferLostError, ComputationError
from timelyml.exchange import CONTROLLER, Lane
from timelyml.ml.controller import (
    AskSlice,
    Call,
    Core,
    Put,
    Register,
    Release,
    SliceGiven,
)
from timelyml.ml.controller.outbox import Dismiss, StartHosts, ToHost, Upkeep
from timelyml.ml.controller.resource_messages import Moved
from timelyml.ml.functions import (
    ArrayType,
    Computation,
    LogicalMesh,
    MemoryNeeds,
    Settings,
)
from timelyml.ml.hosts import (
    AbandonSlices,
    Arrived,
    AskHoldings,
    CarriedOut,
    CleanUp,
    Compiled,
    Done,
    ForgetFunctions,
    Formed,
    Gone,
    Holdings,
    Leave,
    Left,
    Load,
    LoadProgram,
    Orders,
    Piece,
    Pieces,
    Present,
    RemapSlice,
    Reports,
    SliceMade,
    Spilled,
    boxes_by_device,
)
from timelyml.ml.hosts.boxes import size_of
from timelyml.ml.hosts.lost_peers import LostPeers
from timelyml.ml.hosts.plans import plan_for
from timelyml.ml.scheduling import LaunchGate
from timelyml.runtime.failure import pack_error, unpack_error

DEVICE_NS = 1_000_000  # of every launch
FLOAT = ArrayType((8,), "float16", 2)
DEVICES = 2  # of a host
TEMPORARY_BYTES = 4  # of a launch, on each device


def share_of(array_type, spec, num_devices):
    return array_type.size_bytes // (num_devices if spec else 1)


def computation(name, num_args, num_outs, mesh, *, spec=("x",), donated=()):
    return Computation(
        name=name,
        identity=f"{name} {num_args} {spec} {donated} {mesh}",
        mesh=mesh,
        settings=Settings(),
        platform="cpu",
        stablehlo=b"",
        calling_convention=0,
        in_types=(FLOAT,) * num_args,
        in_specs=(spec,) * num_args,
        out_types=(FLOAT,) * num_outs,
        out_specs=(spec,) * num_outs,
        donated=donated,
    )


@dataclass
class FakeHost:
    """One host; `launched` is what it launched, in order, by the call's first result."""

    index: int
    world: World
    launched: list = field(default_factory=list)
    buffers: dict = field(default_factory=dict)  # number -> error or None
    promised: set = field(default_factory=set)
    expected: dict = field(default_factory=dict)  # number -> elements left, error
    early: dict = field(default_factory=dict)
    prepares: dict = field(default_factory=dict)
    exports: list = field(default_factory=list)
    running: deque = field(default_factory=deque)
    slices: dict = field(default_factory=dict)
    dropped: set = field(default_factory=set)
    copied: list = field(default_factory=list)  # positions, of all launches
    spills: set = field(default_factory=set)
    copies: dict = field(default_factory=dict)
    sizes: dict = field(default_factory=dict)  # number -> slice, bytes on a device
    abandoned: set = field(default_factory=set)  # slices
    senders: dict = field(default_factory=dict)
    lost: set = field(default_factory=set)
    on_host: set = field(default_factory=set)  # expected, to be copies
    taken: set = field(default_factory=set)  # given to a launch, not released yet
    plans: dict = field(default_factory=dict)
    runs: dict = field(default_factory=dict)  # calls of programs, by name
    lost_peers: LostPeers = field(default_factory=lambda: LostPeers(math.inf))
    forgotten: set = field(default_factory=set)  # computations
    gone: dict = field(default_factory=dict)  # hosts that were lost, and why

    def __post_init__(self):
        self.gate = LaunchGate(str(self.index), generation=0)

    def take(self, body):
        if isinstance(body, Upkeep):
            for order in body.orders:
                self.obey(order, body.epoch)
            self.tell(CarriedOut(body.epoch + 1))
        else:
            self.take_one(body)

    def obey(self, order, epoch):
        match order:
            case AskHoldings():
                held = len(self.slices), 0, len(self.plans), len(self.buffers), 0
                self.tell(Holdings(epoch, 1, *held))
            case ForgetFunctions():
                self.forgotten.update(order.identities)
            case _:
                self.take_one(order)

    def take_one(self, body):
        match body:
            case SliceMade():
                self.slices[body.name] = body
            case Load():
                assert body.slice in self.slices
                needs = self.world.needs_of(body.identity)
                self.tell(Compiled(body.identity, body.slice, needs))
            case LoadProgram():
                program = pickle.loads(body.pickled)
                self.plans[body.program] = plan_for(program, self.index)
            case Pieces():
                self.add(body)
            case Leave():
                self.leave(body)
            case AbandonSlices():
                self.abandon(body.slices)
            case Gone():
                self.lost_peers.explain(body)
            case Formed():
                self.tell(Present("cpu", "cpu", DEVICES))
            case RemapSlice():
                self.remap(body)
            case Orders():
                self.take_orders(body)
            case CleanUp():
                nothing = ((),) * 8
                self.take_orders(Orders(*nothing, body.releases, (), body.dropped))
        self.advance()

    def tell(self, body):
        self.world.send(self.index, CONTROLLER, body, Lane.CONTROL)

    def take_orders(self, orders):
        for number in orders.returns:
            self.on_host.discard(number)
            if number in self.copies:
                self.buffers[number] = self.copies.pop(number)
        for expect in orders.expects:
            self.expect(expect)
        for prepare in orders.prepares:
            assert prepare.slice in self.slices
            self.prepares[prepare.key] = prepare
            self.promised.update(prepare.outs)
        for run in orders.runs:
            self.runs[run.name] = FakeRun(self, run, self.plans[run.program])
        self.exports += orders.exports
        for cancel in orders.cancels:
            if cancel.name in self.runs:
                self.runs.pop(cancel.name).cancel(cancel.ordered)
        for key in orders.forgets:
            self.promised -= set(self.prepares.pop(key).outs)
            self.gate.forget(key)
        self.spills.update(orders.spills)
        for buffer in orders.releases:
            assert (
                buffer in self.buffers
                or buffer in self.expected
                or (buffer not in self.promised)
            )
            if buffer in self.expected:
                self.dropped.add(buffer)
            self.buffers.pop(buffer, None)
            self.copies.pop(buffer, None)
            self.taken.discard(buffer)
            self.spills.discard(buffer)
            self.exports = [e for e in self.exports if e.buffer != buffer]
        self.launch(self.gate.admit(orders.tickets))
        for name in orders.dropped:
            del self.slices[name]

    def expect(self, expect):
        made = self.slices[expect.slice]
        mesh = LogicalMesh(made.axis_names, made.axis_sizes)
        rank = self.world.core.places.island_of(self.index).hosts.index(self.index)
        boxes = boxes_by_device(mesh, expect.spec, expect.type.shape)
        own = {
            box for box, (of, _) in zip(boxes, made.devices, strict=True) if of == rank
        }
        size = share_of(expect.type, expect.spec, len(boxes))
        self.sizes[expect.buffer] = expect.slice, size
        self.expected[expect.buffer] = [sum(map(size_of, own)), None]
        self.senders[expect.buffer] = expect.senders
        if expect.is_copy:
            self.on_host.add(expect.buffer)
        for pieces in self.early.pop(expect.buffer, []):
            self.add(pieces)

    def abandon(self, slices):
        """Take what runs there for over: it may wait for a host that is dead."""
        self.abandoned.update(slices)
        error = pack_error(BufferLostError("lost as its slice was given up"))
        for each in [x for x in self.running if x.scratch and x.scratch[0] in slices]:
            each.errors = ((0, error),)
            each.output_errors = dict.fromkeys(each.outs, error)
            self.running.remove(each)
            self.running.appendleft(each)
            self.finish()

    def leave(self, leave):
        """Send copies of what moves; nothing else of it is left, unless it is cut off."""
        is_abandoned = leave.slice in self.abandoned
        there = self.copies | (self.buffers if is_abandoned else {})
        if is_abandoned:  # what was put may be on its way
            late = {x.buffer for x in leave.exports if x.buffer in self.expected}
            there |= {x: pack_error(BufferLostError("lost on its way")) for x in late}
        for export in leave.exports:
            self.export(export, there[export.buffer])
        for export in [e for e in self.exports if e.buffer in leave.buffers]:
            if export.buffer in self.expected:
                self.export(export, pack_error(BufferLostError("lost on its way")))
        for number in leave.buffers:
            self.copies.pop(number, None)
            self.buffers.pop(number, None)
            self.spills.discard(number)
            self.lost.discard(number)
            self.exports = [e for e in self.exports if e.buffer != number]
        self.tell(Left(leave.slice))

    def give_up(self):
        """Go on without copies that hosts would have sent which are gone."""
        for gone in self.lost_peers.lost(0.0):
            error = BufferLostError(f"lost with island {gone.island!r}; {gone.reason}")
            self.gone[gone.host] = pack_error(error)
        for peer, error in self.gone.items():
            for number in [n for n, who in self.senders.items() if peer in who]:
                del self.senders[number]
                if number in self.expected:
                    self.expected[number] = [0, error]
                    self.lost.add(number)
                    self.add(Pieces(number, (), error))

    def remap(self, remap):
        made = self.slices.pop(remap.target)
        self.slices[remap.slice] = replace(made, name=remap.slice)
        for expect in remap.expects:
            self.expect(expect)

    def export(self, export, error):
        pieces = tuple(
            Piece(tuple(a for a, _ in box), np.zeros([b - a for a, b in box]))
            for box in export.boxes
        )
        sent = Pieces(export.target, pieces, error)
        self.world.send(self.index, export.peer, sent, Lane.BULK)

    def add(self, pieces):
        if pieces.target in self.lost and pieces.pieces:
            return
        if pieces.target not in self.expected:
            self.early.setdefault(pieces.target, []).append(pieces)
            return
        entry = self.expected[pieces.target]
        entry[1] = entry[1] or pieces.error
        entry[0] -= sum(piece.array.size for piece in pieces.pieces)
        if entry[0] <= 0:
            del self.expected[pieces.target]
            if pieces.target in self.dropped:
                self.dropped.discard(pieces.target)
                self.on_host.discard(pieces.target)
            elif pieces.target in self.on_host:
                self.on_host.discard(pieces.target)
                self.copies[pieces.target] = entry[1]
                self.tell(Spilled((pieces.target,)))
            else:
                self.buffers[pieces.target] = entry[1]

    def advance(self):
        self.give_up()
        for key, prepare in list(self.prepares.items()):
            at_hand = all(a in self.buffers or a in self.promised for a in prepare.args)
            if at_hand:
                self.launch(self.gate.prepare(key))
        for run in list(self.runs.values()):
            for key in run.ready():
                self.launch(self.gate.prepare(key))
        for number in sorted(self.spills & self.buffers.keys()):
            assert not self.is_running(number)
            self.spills.discard(number)
            self.copies[number] = self.buffers.pop(number)
            self.tell(Spilled((number,)))
        there = self.buffers | self.copies
        for export in list(self.exports):
            if export.buffer in there and not self.is_running(export.buffer):
                self.exports.remove(export)
                self.export(export, there[export.buffer])

    def used_bytes(self):
        """What is taken of each device: by what is there or coming, and by launches."""
        used = dict.fromkeys(range(DEVICES), 0)
        there = self.buffers.keys() | self.expected.keys() - self.on_host
        for slice_, size in [self.sizes[n] for n in there - self.taken] + [
            each.scratch for each in self.running if each.scratch
        ]:
            for host, index in self.world.devices[slice_]:
                if host == self.index:
                    used[index] += size
        return max(used.values())

    def is_running(self, buffer):
        return any(buffer in each.outs for each in self.running)

    def launch(self, tickets):
        for ticket in tickets:
            if ticket.key.program in self.runs:
                run = self.runs[ticket.key.program]
                self.running.append(run.launch(ticket))
                continue
            prepare = self.prepares.pop(ticket.key)
            self.launched.append(prepare.outs)
            errors = [self.buffers[arg] for arg in prepare.args]
            error = next((each for each in errors if each), None)
            donated = self.world.donated(prepare)
            for position in donated - set(prepare.copied):
                arg = prepare.args[position]
                assert not any(e.buffer == arg for e in self.exports), "taken too soon"
                self.taken.add(arg)
            made = self.world.computations[prepare.computation]
            for out, of, spec in zip(
                prepare.outs, made.out_types, made.out_specs, strict=True
            ):
                self.promised.discard(out)
                self.buffers[out] = error
                size = share_of(of, spec, made.mesh.size)
                self.sizes[out] = prepare.slice, size
            self.copied += prepare.copied
            copied = [self.sizes[prepare.args[each]][1] for each in prepare.copied]
            scratch = prepare.slice, TEMPORARY_BYTES + sum(copied)
            error = error or self.world.failures.get(prepare.computation)
            errors = ((0, error),) if error else ()
            output_errors = dict.fromkeys(prepare.outs, error)
            self.running.append(
                Running(ticket.sequence, prepare.outs, errors, output_errors, scratch)
            )

    def finish(self):
        running = self.running.popleft()
        for out, error in running.output_errors.items():
            if out in self.buffers:
                self.buffers[out] = error
        self.launch(self.gate.finish(running.sequence))
        done = Done(running.sequence, DEVICE_NS, running.errors, ())
        self.tell(Reports((done,)))
        self.advance()


class World:
    """Islands of hosts with two devices each, and clients that hear of everything."""

    def __init__(
        self,
        seed=0,
        islands=None,
        num_clients=1,
        weights=(),
        policy=None,
        **memory,
    ):
        self.rng = random.Random(seed)
        self.islands = islands or {"a": [0, 1], "b": [2]}
        self.core = Core(self.islands, policy=policy, **memory)
        self.hosts = {
            host: FakeHost(host, self)
            for hosts in self.islands.values()
            for host in hosts
        }
        self.links = {}
        self.upkeep = []  # what hosts were ordered by it
        self.dead = set()
        self.lost = set()  # of the dead, those that the controller knows of
        self.dismissed = set()
        self.has_more_hosts = True
        self.failures = {}
        self.heard = {client: [] for client in range(1, num_clients + 1)}
        self.computations = {}
        for client in self.heard:
            weight = weights[client - 1] if weights else 1
            self.core.join(client, weight=weight)
        for host in self.hosts:
            self.core.heard(host, Present("cpu", "cpu", DEVICES), 0.0)
        self.next_buffer = 0
        self.memory_bytes = memory.get("memory_bytes", 4 << 30)
        self.devices = {}  # of each slice
        self.num_spilled = 0
        self.num_fetches = 0
        self.declared = []  # slice, order and results of calls
        self.settle()

    def needs_of(self, identity):
        made = self.computations[identity]
        shares = [
            share_of(of, spec, made.mesh.size)
            for of, spec in zip(made.out_types, made.out_specs, strict=True)
        ]
        return MemoryNeeds(0, sum(shares), 0, TEMPORARY_BYTES)

    def donated(self, prepare):
        return set(self.computations[prepare.computation].donated)

    def send(self, sender, receiver, body, lane):
        self.links.setdefault((sender, receiver, lane), deque()).append(body)

    def say(self, client, message):
        self.core.handle(client, message, 0.0)
        self.flush()

    def flush(self):
        for effect in self.core.flush():
            if isinstance(effect, Dismiss):
                self.dismissed.add(effect.host)
            elif isinstance(effect, StartHosts):
                self.start_hosts(effect)
            elif isinstance(effect, Upkeep):
                assert effect.host not in self.lost
                self.upkeep.append(effect)
                self.send(CONTROLLER, effect.host, effect, Lane.CONTROL)
            elif isinstance(effect, ToHost):
                if isinstance(effect.body, Orders):
                    self.num_spilled += len(effect.body.spills)
                assert effect.host not in self.lost
                self.send(CONTROLLER, effect.host, effect.body, effect.lane)
            elif isinstance(effect, Dismiss):
                self.dismissed.append(effect.host)
            else:
                if isinstance(effect.body, SliceGiven | Moved):
                    self.devices[effect.body.slice] = effect.body.devices
                self.heard[effect.client].append(effect.body)

    def act(self):
        """Deliver a message or finish a launch; False if nothing can be done."""
        links = [key for key, queue in self.links.items() if queue]
        running = [
            h
            for h in self.hosts.values()
            if h.running and h.index not in self.dead | self.dismissed
        ]
        if not links and not running:
            return False
        if links and (not running or self.rng.random() < 0.6):
            key = self.rng.choice(links)
            body = self.links[key].popleft()
            sender, receiver, _ = key
            if receiver in self.dead | self.dismissed or sender in self.dead:
                return True
            if receiver == CONTROLLER:
                self.core.heard(sender, body, 0.0)
                self.flush()
            else:
                self.hosts[receiver].take(body)
        else:
            self.rng.choice(running).finish()
        for host in self.hosts.values():
            assert host.used_bytes() <= self.memory_bytes
        return True

    def drain(self):
        self.flush()
        while self.act():
            pass

    def settle(self):
        self.drain()
        if self.dead <= self.lost:  # or the core waits to hear of it
            assert not self.core.num_open_epochs

    def lose(self, host, error):
        self.die(host)
        self.lost.add(host)
        self.core.lose(host, error, 0.0)
        self.flush()

    def die(self, host):
        """Let all other hosts notice that nothing comes from one any more."""
        self.dead.add(host)
        for each in self.hosts.values():
            if each.index != host:
                each.lost_peers.broke(host, "the link broke", 0.0)
                each.advance()

    def start_hosts(self, wanted):
        """Let new hosts come, unless there are none to be had."""
        first = max(self.hosts) + 1
        hosts = range(first, first + wanted.num_hosts) if self.has_more_hosts else ()
        self.hosts |= {host: FakeHost(host, self) for host in hosts}
        self.core.hosts_started(wanted.order, tuple(hosts), 0.0)
        for host in hosts:
            self.hosts[host].tell(Arrived("", wanted.num_hosts, DEVICES))
        self.flush()

    def slice(self, client=1, size=2, island=None, memory_bytes=0):
        request = len(self.heard[client]) + 1000
        self.say(client, AskSlice(request, ("x",), (size,), None, island, memory_bytes))
        return self.heard[client][-1]

    def buffer(self, client=1):
        self.next_buffer += 1
        return (client << 40) + self.next_buffer

    def put(self, slice_, client=1, spec=("x",)):
        buffer = self.buffer(client)
        array = np.zeros(8, np.float16)
        self.say(client, Put(buffer, slice_.slice, FLOAT, spec, array))
        return buffer

    def call(
        self, name, slice_, args, *, client=1, num_outs=1, size=2, order=0, **options
    ):
        made = computation(
            name, len(args), num_outs, LogicalMesh(("x",), (size,)), **options
        )
        self.computations[made.identity] = made
        self.say(client, Register(made.identity, slice_.slice, pickle.dumps(made)))
        outs = tuple(self.buffer(client) for _ in range(num_outs))
        self.say(client, Call(made.identity, slice_.slice, tuple(args), outs, order))
        return outs, made.identity

    def release(self, buffers, client=1):
        self.say(client, Release(tuple(buffers)))


def failure(name):
    return pack_error(ComputationError(f"{name} failed"))


def text_of(packed):
    return str(unpack_error(packed))
