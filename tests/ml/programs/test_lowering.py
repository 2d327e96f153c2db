"""Lowered programs: their cost against the number of devices, their gangs, their cache."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from tests.ml.functions.fakes import Client, Slice, Value
from timelyml.errors import InvariantError
from timelyml.ml.functions import ArrayType, jit
from timelyml.ml.programs import (
    Launch,
    Lowerings,
    Place,
    Put,
    Receive,
    Release,
    Send,
    lower,
    program,
)
from timelyml.ml.programs.lowering import _Lowering
from timelyml.ml.scheduling import Dispatch, GangKey, GangScheduler, Grant, Islands
from timelyml.runtime.environment import worker_environment

ROOT = Path(__file__).parents[3]
DEVICES_PER_HOST = 4


def place_of(island, num_devices, first=0):
    numbers = range(first, first + num_devices)
    return Place(
        island,
        tuple(f"{island}/{i}" for i in numbers),
        tuple(f"{island}/h{i // DEVICES_PER_HOST}" for i in numbers),
    )


def pipeline(num_devices, names="ab"):
    """A program over two islands, and its places."""
    mesh = AbstractMesh((num_devices,), ("data",))
    client = Client()
    a, b = (Slice(client, name, mesh) for name in names)

    def scale(x):
        return x * 2

    double = jit(scale, slice=a, in_shardings=P("data"))
    across = jit(scale, slice=b, in_shardings=P(None, "data"))

    @program
    def f(x, y):
        x = double(x)
        z = across(x)
        return double(z), across(y)

    rows = np.ones((2048, 2048), np.float32)
    on_b = Value(b, ArrayType((2048, 2048), "float32", 4), ("data",))
    islands = "east", "west"
    places = {
        name: place_of(island, num_devices)
        for name, island in zip(names, islands, strict=True)
    }
    return f.program(rows, on_b), places


def kinds(instructions):
    return [type(each).__name__ for each in instructions]


def test_each_host_is_told_what_concerns_it_in_program_order():
    lowered = lower(*pipeline(8))
    assert kinds(lowered.for_host("east/h0")) == [
        "Put", "Launch", "Release", "Send", "Release", "Receive", "Launch", "Release",
    ]  # fmt: skip
    assert kinds(lowered.for_host("west/h1")) == [
        "Receive", "Launch", "Release", "Send", "Release", "Launch", "Launch", "Release",
    ]  # fmt: skip
    assert lowered.for_host("nobody") == ()
    assert set(lowered.hosts) == {"east/h0", "east/h1", "west/h0", "west/h1"}


@pytest.mark.parametrize("dispatch", Dispatch)
def test_nodes_instructions_and_gangs_do_not_grow_with_devices(dispatch):
    small = lower(*pipeline(2), dispatch=dispatch)
    large = lower(*pipeline(2048), dispatch=dispatch)
    assert len(small.values) == len(large.values)
    assert kinds(small.instructions) == kinds(large.instructions)
    assert len(small.graph.places) == len(large.graph.places)
    assert len(large.hosts) == 1024
    for host in ("east/h0", "east/h511", "west/h100"):
        own = large.for_host(host)
        assert kinds(own) == kinds(small.for_host(host.split("/")[0] + "/h0"))
        assert own is large.for_host(host.split("/")[0] + "/h7")  # one list for all
    bare = [
        len(pickle.dumps(each.instructions)) + len(pickle.dumps(each.graph))
        for each in (small, large)
    ]
    assert abs(bare[0] - bare[1]) < 32


def test_a_program_is_shipped_as_plain_values():
    lowered = lower(*pipeline(4))
    copy = pickle.loads(pickle.dumps(lowered))
    assert copy.instructions == lowered.instructions
    assert copy.moves == lowered.moves
    assert copy.for_host("west/h0") == lowered.for_host("west/h0")


def test_stages_show_the_program_before_and_after_each_pass():
    lowered = lower(*pipeline(4))
    assert [name for name, _ in lowered.stages] == [
        "trace",
        "place",
        "drop dead calls",
        "insert transfers",
    ]
    assert "transfer between" not in lowered.stages[0][1]
    assert "transfer between" in lowered.stages[-1][1]


def test_gangs_need_those_whose_results_they_get_also_across_islands():
    lowered = lower(*pipeline(4))
    islands = Islands()
    for island in ("east", "west"):
        islands.add(island, GangScheduler())
        islands.schedulers[island].join("client")
    for name, place in lowered.places.items():
        devices = {
            host: [place.devices[i] for i in shards]
            for host, shards in place.shards_by_host.items()
        }
        islands.schedulers[place.island].place(name, devices)
    effects = islands.submit("client", "call", lowered.graph)
    granted = [each.key for _, each in effects if isinstance(each, Grant)]
    assert sorted(granted) == [GangKey("call", gang, 0) for gang in range(5)]
    launches = [each for each in lowered.instructions if isinstance(each, Launch)]
    assert [each.gang for each in launches] == list(range(5))
    order = [key.gang for key in granted]
    assert order.index(0) < order.index(1) < order.index(2)


def test_what_reads_a_value_is_ordered_before_what_destroys_it():
    client = Client()
    a = Slice(client, "a", AbstractMesh((2,), ("data",)))

    def scale(x):
        return x * 2

    read = jit(scale, slice=a)
    take = jit(scale, slice=a, donate_argnums=(0,))

    @program
    def f(x):
        return read(x), take(x)

    value = Value(a, ArrayType((4,), "float32", 4), ())
    lowered = lower(f.program(value), {"a": place_of("east", 2)})
    assert lowered.graph.graphs["east"].gangs[1].needs == (0,)
    assert lowered.donated_args == {0}
    last = [each for each in lowered.instructions if isinstance(each, Launch)][-1]
    assert last.donated == lowered.args


def test_calls_of_one_order_are_ordered_after_one_another_and_others_as_they_can():
    client = Client()
    a, b = (Slice(client, name, AbstractMesh((2,), ("data",))) for name in "ab")

    def scale(x):
        return x * 2

    here, there = jit(scale, slice=a), jit(scale, slice=b)

    @program
    def f(x):
        late = there(here.in_order(1, x))
        results = here.in_order(1, late), here.in_order(2, x), here(x)
        return results, here.in_order(1, x), there.in_order(1, late)

    value = Value(a, ArrayType((4,), "float32", 4), ())
    places = {"a": place_of("east", 2), "b": place_of("west", 2)}
    lowered = lower(f.program(value), places)
    needs = [gang.needs for gang in lowered.gangs]
    assert needs == [(), (0,), (0, 1), (), (), (2,), (1,)]


def test_every_value_is_released_once_or_lives_on():
    lowered = lower(*pipeline(4))
    released = [
        slot
        for each in lowered.instructions
        if isinstance(each, Release)
        for slot in each.slots
    ]
    made = {each.target for each in lowered.instructions if isinstance(each, Put)}
    made |= {move.target for move in lowered.moves}
    for each in lowered.instructions:
        if isinstance(each, Launch):
            made |= set(each.outputs)
    assert len(set(released)) == len(released)
    assert set(released) == made - set(lowered.results)


def test_sends_and_receives_of_a_move_are_both_there():
    lowered = lower(*pipeline(4))
    sends = [each.move for each in lowered.instructions if isinstance(each, Send)]
    takes = [each.move for each in lowered.instructions if isinstance(each, Receive)]
    assert sends == takes == list(range(len(lowered.moves)))


def test_a_program_is_lowered_again_only_where_its_slices_moved():
    traced, places = pipeline(4)
    lowerings = Lowerings()
    first = lowerings.lower(traced, places)
    unused = {"other": place_of("north", 2)}
    assert lowerings.lower(traced, {**places, **unused}) is first
    moved = {**places, "b": place_of("west", 4, first=4)}
    second = lowerings.lower(traced, moved)
    assert second.identity != first.identity
    assert lowerings.lower(traced, places) is first
    ours = [each.identity for each in first.computations]
    assert [each.identity for each in second.computations] == ours  # nothing new to XLA
    lowerings.forget("b")
    assert len(lowerings) == 0


def test_a_program_on_other_slices_of_the_same_meshes_is_what_lowering_it_gives():
    lowerings = Lowerings()
    traced, places = pipeline(4)
    lowerings.lower(traced, places)
    other, others = pipeline(4, ["b", "slice-1"])  # one takes a name of another
    moved = {**places, "b": place_of("west", 4, first=4)}
    for made, at in ((other, others), (traced, moved)):
        found, expected = lowerings.lower(made, at), lower(made, at)
        ours, theirs = (
            [each.identity for each in x.computations] for x in (found, expected)
        )
        assert ours == theirs
        assert found.graph.indices == expected.graph.indices
        shared = {"computations": found.computations, "graph": found.graph}
        assert found == dataclasses.replace(expected, stages=(), **shared)
    assert lowerings.num_lowered == 1
    lowerings.lower(*pipeline(8))
    assert lowerings.num_lowered == 2


def test_the_longest_unused_program_goes_first():
    lowerings = Lowerings(max_kept=2)
    programs = [pipeline(num_devices) for num_devices in (2, 4, 8)]
    kept = [lowerings.lower(*each) for each in programs[:2]]
    assert lowerings.lower(*programs[0]) is kept[0]
    lowerings.lower(*programs[2])
    assert lowerings.lower(*programs[0]) is kept[0]
    assert lowerings.lower(*programs[1]) is not kept[1]


def test_a_program_without_places_is_not_lowered():
    traced, _ = pipeline(2)
    lowering = _Lowering(traced)
    lowering.add(0)
    with pytest.raises(InvariantError, match="slice 'a' is lowered without a place"):
        [lowering.add(index) for index in range(1, len(traced.nodes))]


@pytest.fixture(scope="module")
def on_eight_devices():
    done = subprocess.run(
        [sys.executable, "-m", "tests.ml.programs.on_devices", "0", "40"],
        env=worker_environment(os.environ, num_devices=8),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_lowered_programs_compute_what_their_functions_do(on_eight_devices):
    assert on_eight_devices["wrong"] == {}


def test_keys_draw_the_same_numbers_on_another_island(on_eight_devices):
    assert on_eight_devices["keys"] is True


def test_figure_2_of_the_paper(on_eight_devices):
    assert on_eight_devices["figure 2"] == [[3, 5], [2, 4]]
