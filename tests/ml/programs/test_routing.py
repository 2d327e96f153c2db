"""Routing without a cluster: who sends what, what a program says of it, what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from timelyml import ml
from timelyml.errors import ConfigError, HandleError, TraceError
from timelyml.ml.controller.flow_scatters import matrix_of
from timelyml.ml.functions import LogicalMesh
from timelyml.ml.programs import Layout, Place, packing, split
from timelyml.ml.programs.flows import Scatter
from timelyml.ml.programs.lowering import run_passes
from timelyml.ml.programs.nodes import Constant, Exchange
from timelyml.ml.programs.sparse import SparseMove

client = ml.OfflineClient()
a = client.slice({"x": 2}, name="a")
b = client.slice({"y": 2, "z": 2}, name="b")
double = ml.jit(lambda x: x * 2, slice=b)
ROWS = np.ones((6, 3), np.float32)
TO = np.zeros(6, np.int32)


def placed(num_shards, num_rows, hosts):
    """An array of rows on shards of hosts, as an end of a move."""
    mesh = LogicalMesh(("shard",), (num_shards,))
    names = tuple(f"d{i}" for i in range(num_shards))
    return Layout(mesh, ("shard",), (num_shards * num_rows,)), Place("", names, hosts)


@st.composite
def matrices(draw):
    num_sources, num_targets = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    counts = st.lists(st.integers(0, 3), min_size=num_targets, max_size=num_targets)
    return np.array([draw(counts) for _ in range(num_sources)])


@settings(max_examples=50, deadline=None)
@given(matrices(), st.data())
def test_rows_arrive_in_the_order_of_shards_and_rows_and_come_back(matrix, data):
    def on_hosts(count):
        names = st.lists(st.sampled_from("01"), min_size=count, max_size=count)
        return tuple(data.draw(names))

    room, most = int(matrix.sum(1).max()) + 1, int(matrix.sum(0).max()) + 1
    source = placed(matrix.shape[0], room, on_hosts(matrix.shape[0]))
    target = placed(matrix.shape[1], most, on_hosts(matrix.shape[1]))
    packed = np.arange(matrix.shape[0] * room)
    there, back = np.full(matrix.shape[1] * most, -1), np.full(packed.shape, -1)

    for whence, whither, move in (
        (packed, there, SparseMove(*source, *target, is_back=False)),
        (there, back, SparseMove(*target, *source, is_back=True)),
    ):
        for host in "01":
            sent = move.sends(host, matrix)
            assert all(sent.values())  # nobody is sent nothing
            for rows in [each for found in sent.values() for each in found]:
                cut = slice(rows.start, rows.start + rows.num_rows)
                whither[rows.target_start : rows.target_start + rows.num_rows] = whence[
                    cut
                ]
        received = sum(move.num_received(host, matrix) for host in "01")
        assert received == matrix.sum()

    for target_shard, count in enumerate(matrix.sum(0)):
        expected = [
            i * room + matrix[i, :target_shard].sum() + k
            for i in range(matrix.shape[0])
            for k in range(matrix[i, target_shard])
        ]
        found = there[target_shard * most :][:most]
        assert found.tolist() == expected + [-1] * (most - count)
    for i, count in enumerate(matrix.sum(1)):
        found = back[i * room :][:room]
        assert found.tolist() == [
            *range(i * room, i * room + count),
            *[-1] * (room - count),
        ]


def test_a_matrix_of_many_shards_comes_in_pieces_that_ride_along():
    num_targets = 2500
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("x",), auto, devices=jax.devices()[:1])
    to = np.array([7, -1, 2499, 7], np.int32)
    with jax.set_mesh(mesh):
        pack = jax.jit(packing.packed(1, num_targets, P("x")))
        order, pieces, (rows,) = pack(jnp.array([3]), to, jnp.arange(4.0))
        counts = packing.arrived(1, num_targets)(*pieces)

    # the fourth row is padding
    assert rows.tolist()[:2] == [0.0, 2.0]
    assert order.tolist()[:2] == [0, 2]
    assert all(each.nbytes <= 4096 for each in pieces)
    value = ml.programs.Value(ml.functions.type_of(rows), ("x",), "there")
    step = Scatter(
        tuple(range(len(pieces))), None, (1, num_targets), 1, (value,), "here"
    )
    matrix = matrix_of(step, pieces, "")
    assert {i: n for i, n in enumerate(matrix[0].tolist()) if n} == {7: 1, 2499: 1}
    np.testing.assert_array_equal(counts, matrix[0])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, np.uint32])
def test_destinations_of_any_integer_type_count_alike(dtype):
    num_targets = 300  # more than the smallest types can tell
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("x",), auto, devices=jax.devices()[:1])
    to = np.array([7, 0, 120, 7], dtype)
    with jax.set_mesh(mesh):
        pack = jax.jit(packing.packed(1, num_targets, P("x")))
        order, (told,), _ = pack(jnp.array([3]), to, jnp.arange(4.0))
    assert order.tolist()[:3] == [1, 0, 2]
    *counts, largest = told.tolist()
    assert {i: n for i, n in enumerate(counts) if n} == {0: 1, 7: 1, 120: 1}
    assert largest == 120


def test_destinations_that_a_program_captures_may_be_unsigned():
    x, to = jax.ShapeDtypeStruct((3,), jnp.float32), np.array([1, 0, 3], np.uint8)
    ml.program(lambda x: ml.route(x, to, b)).program(x)
    with pytest.raises(TraceError, match=r"destination 4; expected below 4"):
        ml.program(lambda x: ml.route(x, to + 1, b)).program(x)


def test_destinations_may_be_a_list_and_counts_whatever_is_an_integer():
    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    room = np.int64(2)
    listed = ml.program(lambda x: ml.route(x, [1, 0, 3], b, max_rows=room)).program(x)
    array = np.array([1, 0, 3])
    given = ml.program(lambda x: ml.route(x, array, b, max_rows=2)).program(x)
    assert listed.identity == given.identity
    (sent,) = (node for node in listed.nodes if isinstance(node, Exchange))
    assert sent.max_rows == 2


def test_destinations_below_what_hosts_can_hold_still_drop_their_rows():
    x, to = jax.ShapeDtypeStruct((3,), jnp.float32), np.array([1, -(2**32), 3])
    program = ml.program(lambda x: ml.route(x, to, b)).program(x)
    (kept,) = (node for node in program.nodes if isinstance(node, Constant))
    assert np.frombuffer(kept.data, np.int32).tolist() == [1, -1, 3]


def test_a_program_says_where_rows_go_and_is_cut_there():
    @ml.program
    def routed(x, to):
        return ml.unroute(double(ml.route(x, to, b, max_rows=4)))

    x = jax.ShapeDtypeStruct((6, 3), jnp.float32)
    program = routed.program(x, TO)
    lines = program.ir().splitlines()
    text = "\n".join(lines)
    assert "route %2.2 by %2.1: (float32[16,3] over (('y', 'z'),) on b)" in text
    assert "unroute %5 by %2.1: (float32[8,3] over (('y', 'z'),) on b)" in text
    assert '{"route"}' in program.mermaid()
    places = {"b": Place("island", tuple("1234"), tuple("1122"))}
    flow = split(run_passes(program, places).program).flow
    kinds = [type(each).__name__ for each in flow.steps]
    assert kinds == ["Part", "Scatter", "Part", "Scatter", "Part"]


def test_the_graph_does_not_depend_on_shards():
    def length(num_shards):
        there = client.slice({"y": num_shards}, name="there")

        @ml.program
        def routed(x, to):
            return ml.unroute(ml.route(x, to, there))

        return len(routed.program(ROWS, TO).nodes)

    assert length(2) == length(256)


@pytest.mark.parametrize(
    ("values", "to", "expected"),
    [
        (
            ROWS,
            TO.astype(np.float32),
            "got destinations float32.6.; expected one integ",
        ),
        (ROWS, TO[:5], "got 5 destinations for 6 rows; expected as many"),
        (ROWS, TO[:, None], "got destinations int32.6,1."),
        (ROWS, TO + 4, "got destination 4; expected below 4"),
        ((ROWS, ROWS[:4]), TO, r"got \[4, 6\]; expected arrays of as many rows"),
        ((), TO, "got no arrays"),
        (np.float32(3), TO, "what has no rows; got float32"),
        ("rows", TO, "no array; got a str"),
        (jax.random.split(jax.random.key(0), 6), TO, "no typed keys"),
    ],
)
def test_rows_that_cannot_be_routed_are_refused_at_the_call(values, to, expected):
    @ml.program
    def routed():
        return ml.route(values, to, b)

    with pytest.raises(TraceError, match=expected) as refused:
        routed.program()
    assert "test_routing.py" in str(refused.value)


def test_other_misuse_is_refused_at_the_call():
    theirs = ml.OfflineClient().slice({"x": 2}, name="theirs")
    total = ml.jit(lambda x: x.sum(0), slice=b)
    here = ml.jit(lambda x: x, slice=a)
    both = ml.jit(lambda x, y: x + y, slice=b)
    routed = lambda: ml.route(ROWS, TO, b)  # noqa: E731 - the arrangement of each case

    def refused(block, error, match):
        with pytest.raises(error, match=match):
            ml.program(block).program()

    refused(lambda: ml.route(ROWS, TO, "b"), ConfigError, "no slice to send rows to")
    for count in (0, True, 2.0, np.float32(2)):
        room = {"max_rows": count}
        refused(lambda: ml.route(ROWS, TO, b, **room), ConfigError, "'max_rows'")  # noqa: B023 - called at once
    mixed = [0, 1.5, 0, 0, 0, 0]
    refused(lambda: ml.route(ROWS, mixed, b), TraceError, "no array; got a list")
    refused(lambda: ml.route(routed(), TO, theirs), TraceError, "of the same routing")
    refused(
        lambda: ml.route(here(ROWS), TO, theirs), HandleError, "slice of another client"
    )
    refused(lambda: total(routed()), TraceError, r"none for each row; got \[3\]")
    refused(lambda: here(routed()), TraceError, "another slice than 'a'.*route them")
    refused(lambda: both(routed(), routed()), TraceError, "not routed together")
    refused(lambda: ml.unroute(double(ROWS)), TraceError, "got arrays; expected ragged")


def test_misuse_of_rows_in_loops_and_switches_is_refused_at_the_call():
    here = ml.jit(lambda x: x, slice=a)
    wide = ml.jit(lambda x: jnp.stack([x, x], 1), slice=a)
    is_less = ml.jit(lambda x: x < 1, slice=a)
    x = np.ones(6, np.float32)

    def refused(block, match):
        with pytest.raises(TraceError, match=match):
            ml.program(block).program()

    switch = lambda i, *f: ml.switch(i, f, x, per_example=True)  # noqa: E731 - short
    loop = lambda c, f: ml.while_loop(c, f, x, per_example=True)  # noqa: E731 - short
    refused(lambda: switch(x, here), "got indices float32.6.; expected one integer")
    refused(lambda: switch(TO[:2], here), "got 2 indices for 6 rows")
    refused(lambda: switch(TO, here, wide), "branch 1 .*other rows than branch 0")
    refused(lambda: switch(TO, lambda rows: rows), "cannot tell where to run")
    choose = lambda p, *f: ml.cond(p, *f, x, per_example=True)  # noqa: E731 - short
    refused(lambda: choose(True, here, here), r"conditions bool\[\]; .*one boolean or")
    refused(lambda: choose(TO[:2], here, here), "got 2 conditions for 6 rows")
    refused(lambda: choose(x, here, wide), "branch true .*rows than branch false")
    refused(
        lambda: switch(here(TO), lambda rows: x), "branch 0 .*does not go with its rows"
    )
    refused(lambda: loop(here, here), "condition .*one boolean for each row")
    refused(lambda: loop(is_less, wide), "body .*does not go with its rows")
    refused(lambda: ml.unroute(loop(is_less, here)), "got arrays; expected ragged")


def test_a_loop_may_tell_by_what_it_carries_whether_it_goes_on():
    step = ml.jit(lambda i: (i < 3, i + 1), slice=a)

    @ml.program
    def count(i):
        return ml.while_loop(lambda c: c[0], lambda c: step(c[1]), step(i))

    places = {"a": Place("island", tuple("12"), tuple("11"))}
    assert split(run_passes(count.program(0), places).program).flow.steps
