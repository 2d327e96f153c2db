"""Programs in the controller's core: whatever fails or is late, calls end, and rightly."""

from __future__ import annotations

import pickle

import pytest

from tests.ml.controller.test_core import num_over, output_errors
from tests.ml.controller.world import FLOAT, World, computation, failure, text_of
from timelyml.errors import PeerError
from timelyml.ml.controller import CallProgram, Fetch, Register, RegisterProgram
from timelyml.ml.controller.messages import CancelCalls
from timelyml.ml.controller.outbox import Upkeep
from timelyml.ml.functions import LogicalMesh
from timelyml.ml.hosts import LoadProgram, Orders
from timelyml.ml.programs import Arg, Call, Place, Program, Ref, SliceNode, Value
from timelyml.ml.programs.lowering import run_passes
from timelyml.ml.programs.shipped import inputs_of, outputs_of


class Traced:
    """A random program, and what each of its outputs depends on by definition."""

    def __init__(self, world, name, slices, *, num_args=2, num_calls=12):
        self.world, self.name, self.slices, self.rng = world, name, slices, world.rng
        rng = world.rng
        self.nodes = []
        self.ancestors = []  # of each node: computations, and -1 - position of args
        for position in range(num_args):
            slice_ = rng.choice(slices)
            value = Value(FLOAT, ("x",), slice_.slice)
            self.nodes.append(Arg(position, f"x{position}", value))
            self.ancestors.append({-1 - position})
        for number in range(num_calls):
            self.add_call(number)
        calls = range(num_args, len(self.nodes))
        chosen = rng.sample(calls, min(3, len(calls)))
        self.results = tuple(map(Ref, chosen))
        nodes = tuple(SliceNode(each.slice, mesh_of(each), "cpu") for each in slices)
        traced = Program(name, nodes, tuple(self.nodes), self.results, num_args)
        places = {each.slice: place_of(each) for each in slices}
        self.program = run_passes(traced, places).program
        self.inputs, self.outputs = inputs_of(self.program), outputs_of(self.program)

    def add_call(self, number):
        slice_ = self.rng.choice(self.slices)
        size = self.rng.randint(1, 2)
        operands = tuple(Ref(self.rng.randrange(len(self.nodes))) for _ in range(size))
        made = computation(f"{self.name}.{number}", size, 1, mesh_of(slice_))
        self.nodes.append(Call(made, slice_.slice, operands))
        found = set().union(*(self.ancestors[ref.node] for ref in operands))
        self.ancestors.append(found | {made.identity})

    def register(
        self, client, number, *, is_sequential=False, given=(), is_collected=False
    ):
        for _, call in self.program.calls():
            pickled = pickle.dumps(call.computation)
            message = Register(call.computation.identity, call.slice, pickled)
            self.world.computations[call.computation.identity] = call.computation
            self.world.say(client, message)
        pickled = pickle.dumps(self.program)
        message = RegisterProgram(number, pickled, given, is_sequential, is_collected)
        self.world.say(client, message)

    def call(self, client, number, inputs):
        outs = tuple(self.world.buffer(client) for _ in self.outputs)
        self.world.say(client, CallProgram(number, tuple(inputs), outs))
        return outs

    def causes(self, errors_of_args):
        """What may be told of each output: the texts of all errors it depends on."""
        found = []
        for ref in dict.fromkeys(self.results):
            texts = set()
            for each in self.ancestors[ref.node]:
                if isinstance(each, int):
                    texts |= errors_of_args[-1 - each]
                elif each in self.world.failures:
                    texts.add(f"{each.split()[0]} failed")
            found.append(texts)
        return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("is_collected", [False, True])
def test_of_calls_that_travel_together_only_what_is_meant_is_cancelled(
    seed, is_collected
):
    world = World(seed)
    slice_ = world.slice(1, 2, "b")
    traced = Traced(world, "f", [slice_], num_calls=6)
    traced.register(1, 1, is_collected=is_collected)
    inputs = [world.put(slice_) for _ in traced.inputs]
    outs = traced.call(1, 1, inputs)  # hosts have compiled nothing yet
    (later,), _ = world.call("g", slice_, [outs[0]])
    world.say(1, CancelCalls((outs[0],)))
    world.settle()

    results = list(dict.fromkeys(traced.results))
    maker = traced.nodes[results[0].node].computation.identity
    for out, ref in zip(outs, results, strict=True):
        is_meant = maker in traced.ancestors[ref.node] or not is_collected
        assert ("a call was cancelled" in str(output_errors(world)[out])) is is_meant
        assert is_meant or output_errors(world)[out] is None
    assert "a call was cancelled" in output_errors(world)[later]
    world.release((*inputs, *outs, later))
    world.settle()
    check_nothing_is_left(world)


def mesh_of(given):
    return LogicalMesh(("x",), (len(given.devices),))


def place_of(given):
    devices = tuple(f"{host}:{index}" for host, index in given.devices)
    return Place(given.island, devices, tuple(str(host) for host, _ in given.devices))


def some_slices(world, client=1):
    return [
        world.slice(client, 4, "a"),
        world.slice(client, 2, "a"),
        world.slice(client, 2, "b"),
    ]


def entries_of(world):
    return list(world.core.buffers.directory._entries.values())


def check_nothing_is_left(world):
    assert len(world.core.buffers.directory) == 0
    assert len(world.core.dispatch) == 0
    for host in world.hosts.values():
        if host.index in world.dead:
            continue
        left = host.buffers, host.expected, host.runs, host.exports, host.early
        assert left == ({}, {}, {}, [], {})
        assert not host.prepares
        assert not host.promised


@pytest.mark.parametrize("seed", range(30))
def test_errors_reach_exactly_the_results_that_depend_on_them(seed):
    world = World(seed)
    rng = world.rng
    slices = some_slices(world)
    programs = [Traced(world, f"p{i}", slices) for i in range(3)]
    for number, each in enumerate(programs):
        each.register(1, number, is_sequential=rng.random() < 0.3)
        for _, call in each.program.calls():
            if rng.random() < 0.05:
                identity = call.computation.identity
                world.failures[identity] = failure(call.computation.name)
    live = {each.slice: [world.put(each)] for each in slices}
    errors = {buffer: set() for (buffer,) in live.values()}
    expected = {}
    for _ in range(20):
        number = rng.randrange(3)
        each = programs[number]
        inputs = [rng.choice(live[x.value.slice]) for x in each.inputs]
        outs = each.call(1, number, inputs)
        causes = each.causes([errors[buffer] for buffer in inputs])
        for out, ref, texts in zip(outs, each.outputs, causes, strict=True):
            errors[out] = expected[out] = texts
            live[each.program.value(ref).slice].append(out)
        if rng.random() < 0.3:
            slice_ = rng.choice(slices)
            (out,), _ = world.call(
                "single", slice_, [rng.choice(live[slice_.slice])],
                size=len(slice_.devices),
            )  # fmt: skip
            expected[out] = errors[out] = None
            world.release([out])
        for _ in range(rng.randint(0, 30)):
            world.act()
    world.settle()

    assert num_over(world) == 20 + sum(texts is None for texts in expected.values())
    found = output_errors(world)
    for out, texts in expected.items():
        if texts is not None:
            assert found[out] in (texts or {None})
    shared = [host.launched for host in world.hosts.values()]
    common = [each for each in shared[0] if each in shared[1]]
    assert common == [each for each in shared[1] if each in shared[0]]
    world.release([buffer for buffers in live.values() for buffer in buffers])
    world.settle()
    check_nothing_is_left(world)


@pytest.mark.parametrize("seed", range(20))
def test_a_client_that_leaves_in_the_middle_of_programs_harms_no_other(seed):
    world = World(seed, num_clients=2)
    rng = world.rng
    both = {client: some_slices(world, client) for client in (1, 2)}
    programs = {c: Traced(world, f"p{c}", both[c]) for c in both}
    outs = []
    for client, each in programs.items():
        each.register(client, 7)
        put = {x.slice: world.put(x, client) for x in both[client]}
        for _ in range(6):
            made = each.call(client, 7, [put[x.value.slice] for x in each.inputs])
            outs += made if client == 2 else ()
            for _ in range(rng.randint(0, 20)):
                world.act()
    for _ in range(rng.randint(0, 60)):
        world.act()
    world.core.leave(1)
    world.settle()

    assert {output_errors(world, 2)[out] for out in outs} == {None}
    assert num_over(world, 2) == 6
    assert not any(e.client == 1 for e in entries_of(world))
    world.core.leave(2)
    world.settle()
    check_nothing_is_left(world)
    assert world.core.slices == []


@pytest.mark.parametrize("seed", range(30))
def test_the_loss_of_an_island_leaves_what_does_not_depend_on_it(seed):
    world = World(seed)
    rng = world.rng
    slices = some_slices(world)
    program = Traced(world, "p", slices)
    program.register(1, 0)
    put = {each.slice: world.put(each) for each in slices}
    first = program.call(1, 0, [put[x.value.slice] for x in program.inputs])
    world.settle()  # a call whose memory is not known yet would not begin at all
    outs = [
        program.call(1, 0, [put[x.value.slice] for x in program.inputs])
        for _ in range(3)
    ]
    for _ in range(rng.randint(0, 120)):
        world.act()
    world.lose(2, PeerError("worker 2 was killed"))
    world.settle()

    on_lost = {slices[2].slice}
    identities = {
        call.computation.identity
        for _, call in program.program.calls()
        if call.slice in on_lost
    }
    lost_args = {-1 - x.position for x in program.inputs if x.value.slice in on_lost}
    found = output_errors(world)
    assert num_over(world) == 4
    for call in outs:
        for out, ref in zip(call, dict.fromkeys(program.results), strict=True):
            needs = program.ancestors[ref.node]
            if not needs & (identities | lost_args):
                assert found[out] is None
            elif found[out] is not None:
                assert "'b'" in found[out] or "worker 2" in found[out]
            if program.nodes[ref.node].slice in on_lost:
                world.say(1, Fetch(out))
                assert "'b'" in text_of(world.heard[1][-1].error)
    world.release([*put.values(), *first, *(out for call in outs for out in call)])
    world.settle()
    check_nothing_is_left(world)


def chain(world, slices, length=8):
    """A program whose calls go round the slices."""
    program = Traced.__new__(Traced)
    program.world = world
    value = Value(FLOAT, ("x",), slices[0].slice)
    nodes = [Arg(0, "x", value)]
    for number in range(length):
        slice_ = slices[number % len(slices)]
        made = computation(f"c{number}", 1, 1, mesh_of(slice_))
        nodes.append(Call(made, slice_.slice, (Ref(number),)))
    parts = tuple(SliceNode(each.slice, mesh_of(each), "cpu") for each in slices)
    traced = Program("chain", parts, tuple(nodes), (Ref(length),), 1)
    places = {each.slice: place_of(each) for each in slices}
    program.program = run_passes(traced, places).program
    program.inputs = inputs_of(program.program)
    program.outputs = outputs_of(program.program)
    program.results, program.ancestors = traced.results, []
    return program


def messages_of_a_call(hosts, num_devices):
    """Bytes and number of messages that the second call of a program costs."""
    world = World(islands={"a": list(range(hosts))})
    slice_ = world.slice(1, num_devices)
    x = world.put(slice_)
    program = chain(world, [slice_])
    program.register(1, 0)
    program.call(1, 0, [x])
    world.settle()
    sent = []
    world.send = lambda _, receiver, body, lane: sent.append((receiver, body))
    program.call(1, 0, [x])
    return sent


def test_a_call_of_a_program_costs_one_message_for_each_host():
    sent = messages_of_a_call(4, 8)
    assert sorted(receiver for receiver, _ in sent) == [0, 1, 2, 3]
    for _, orders in sent:
        assert isinstance(orders, Orders)
        assert len(orders.runs) == len(orders.tickets) == 1  # a chain of 8 is one block


def test_what_a_call_sends_does_not_grow_with_devices():
    sizes = [
        max(len(pickle.dumps(body)) for _, body in messages_of_a_call(2, devices))
        for devices in (2, 4)
    ]
    assert sizes[0] <= sizes[1] <= sizes[0] + 32  # names of the host's own devices


def test_a_sequential_program_is_told_computation_by_computation():
    world = World(islands={"a": [0], "b": [1]})
    slices = [world.slice(1, 2, "a"), world.slice(1, 2, "b")]
    program = chain(world, slices, 4)
    x = world.put(slices[0])
    program.register(1, 0, is_sequential=True)
    program.register(1, 1)
    world.settle()
    told = []
    send = world.send

    def watch(sender, receiver, body, lane):
        if isinstance(body, Orders) and body.runs:
            told.append((receiver, len(world.hosts[0].launched)))
        send(sender, receiver, body, lane)

    world.send = watch
    program.call(1, 0, [x])
    world.settle()
    assert told == [(0, 0), (1, 1)]
    told.clear()
    program.call(1, 1, [x])
    world.settle()
    assert told == [(0, 2), (1, 2)]


@pytest.mark.parametrize(("length", "is_sequential"), [(3, True), (40, False)])
def test_what_follows_on_a_slice_is_ordered_after_all_of_a_program(
    length, is_sequential
):
    world = World(islands={"a": [0]})
    slice_ = world.slice()
    x = world.put(slice_)
    blocks, after = chain(world, [slice_], length), chain(world, [slice_], 1)
    blocks.register(1, 0, is_sequential=is_sequential)
    after.register(1, 1)
    world.settle()

    (y,) = blocks.call(1, 0, [x])
    after.call(1, 1, [y])
    world.settle()

    names = [name for name, _ in world.hosts[0].launched]
    assert names == ["p1", "p1", "p1", "p2"]


def test_a_program_is_shipped_once_and_again_only_when_it_is_cut_otherwise():
    world = World(islands={"a": [0]})
    slice_ = world.slice()
    x = world.put(slice_)
    program = chain(world, [slice_], 16)
    program.register(1, 0)
    shipped = []
    send = world.send

    def watch(sender, receiver, body, lane):
        orders = body.orders if isinstance(body, Upkeep) else ()
        loads = [each for each in orders if isinstance(each, LoadProgram)]
        shipped.extend(len(pickle.loads(each.pickled).blocks) for each in loads)
        send(sender, receiver, body, lane)

    world.send = watch
    for _ in range(10):  # a block of the world takes a millisecond
        program.call(1, 0, [x])
        world.settle()
    assert shipped == [1]


def test_unknown_programs_and_wrong_inputs_fail_only_the_call():
    world = World(num_clients=2)
    slices = some_slices(world)
    program = chain(world, slices[:1])
    program.register(1, 0)
    x, wrong = world.put(slices[0]), world.put(slices[1])
    bad = [*program.call(1, 5, [x]), *program.call(1, 0, [wrong])]
    bad += program.call(1, 0, [12345])
    bad += program.call(2, 0, [x])
    (good,) = program.call(1, 0, [x])
    world.say(1, Fetch(bad[1]))
    world.settle()

    found = {**output_errors(world), **output_errors(world, 2)}
    assert found[good] is None
    assert "is not registered" in found[bad[0]]
    assert "lies otherwise" in found[bad[1]]
    assert "a buffer is not client 1's" in found[bad[2]]
    assert "is not registered" in found[bad[3]]
