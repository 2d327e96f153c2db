"""What each pass does to a program, as text; and what it leaves alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from tests.ml.functions.fakes import Client, Slice, Value
from timelyml.errors import PlacementError, ProgramError
from timelyml.ml.functions import ArrayType, LogicalMesh, Settings, jit
from timelyml.ml.programs import Call, Place, Program, Ref, Transfer, program
from timelyml.ml.programs.fusion import fuse
from timelyml.ml.programs.passes import drop_dead_calls, place
from timelyml.ml.programs.transfers import insert_transfers, resharding, same_cut

PAIR = AbstractMesh((2,), ("data",))
GRID = AbstractMesh((2, 2), ("data", "model"))
PLACES = {
    "a": Place("east", ("d0", "d1"), ("h0", "h1")),
    "b": Place("east", ("d2", "d3"), ("h1", "h1")),
    "c": Place("west", ("d4", "d5"), ("h2", "h2")),
}
ROWS = np.ones((8, 4), np.float32)


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def slices(client):
    return {name: Slice(client, name, PAIR) for name in "abc"}


def scale(x):
    return x * 2


def functions(slices, **options):
    options = {"in_shardings": P("data"), **options}
    return [jit(scale, slice=each, **options) for each in slices.values()]


def on(slice_, spec=("data",)):
    return Value(slice_, ArrayType((8, 4), "float32", 4), spec)


def body(found):
    return found.ir().splitlines()[1 + len(found.slices) :]


def test_placement_says_where_slices_stand(slices):
    a, _, c = functions(slices)
    found = place(program(lambda x: c(a(x))).program(ROWS), PLACES)
    lines = found.ir().splitlines()
    assert lines[1] == "  slice a: data=2 on cpu, east: h0 x1, h1 x1"
    assert lines[2] == "  slice c: data=2 on cpu, west: h2 x2"


@pytest.mark.parametrize("wrong", [{}, {"a": Place("east", ("d0",), ("h0",))}])
def test_a_slice_without_enough_devices_cannot_be_placed(slices, wrong):
    a, *_ = functions(slices)
    found = program(lambda x: (a(x),)).program(ROWS)
    with pytest.raises(PlacementError, match=r"slice 'a' has no place.*expected 2"):
        place(found, wrong)


def test_a_place_has_a_host_for_each_device():
    with pytest.raises(ProgramError, match="got 2 devices and 1 hosts"):
        Place("east", ("d0", "d1"), ("h0",))


def test_values_are_put_moved_within_and_between_islands_as_they_are_needed(slices):
    a, b, c = functions(slices)
    found = program(lambda x: c(b(a(x)))).program(ROWS)
    assert body(insert_transfers(place(found, PLACES))) == [
        "  %0 = arg x: float32[8,4] from the client",
        "  %1 = put %0: float32[8,4] over ('data',) on a",
        "  %2 = call scale(%1): float32[8,4] over ('data',) on a",
        "  %3 = transfer within %2: float32[8,4] over ('data',) on b",
        "  %4 = call scale(%3): float32[8,4] over ('data',) on b",
        "  %5 = transfer between %4: float32[8,4] over ('data',) on c",
        "  %6 = call scale(%5): float32[8,4] over ('data',) on c",
        "  result %6",
    ]


def test_on_its_own_devices_a_value_is_sharded_anew_by_a_computation(slices):
    a, *_ = functions(slices, in_shardings=P(None, "data"))
    found = program(lambda x: a(x)).program(on(slices["a"]))  # noqa: PLW0108 - a name
    assert body(insert_transfers(place(found, PLACES))) == [
        "  %0 = arg x: float32[8,4] over ('data',) on a",
        "  %1 = call reshard(%0): float32[8,4] over (None, 'data') on a",
        "  %2 = call scale(%1): float32[8,4] over (None, 'data') on a",
        "  result %2",
    ]


def test_users_of_the_same_share_a_transfer_unless_one_destroys_it(slices):
    a, b, _ = functions(slices)
    take = jit(scale, slice=slices["b"], in_shardings=P("data"), donate_argnums=(0,))

    @program
    def f(x):
        y = a(x)
        return b(y), b(y), take(y)

    found = insert_transfers(place(f.program(ROWS), PLACES))
    moved = [i for i, node in enumerate(found.nodes) if isinstance(node, Transfer)]
    users = [node.operands for _, node in found.calls()]
    assert len(moved) == 3  # of which one puts the argument
    assert users[1] == users[2] != users[3]


def test_a_host_value_is_put_anew_for_each_that_destroys_it(slices):
    a, *_ = functions(slices)
    take = jit(scale, slice=slices["a"], in_shardings=P("data"), donate_argnums=(0,))
    found = program(lambda x: (take(x), a(x), take(x), a(x))).program(ROWS)
    calls = insert_transfers(place(found, PLACES)).calls()
    first, second, third, fourth = (call.operands for _, call in calls)
    assert second == fourth
    assert len({first, second, third}) == 3


def test_what_lies_right_is_left_alone(slices):
    a, *_ = functions(slices)
    found = program(lambda x: a(a(x))).program(on(slices["a"]))
    assert insert_transfers(place(found, PLACES)).nodes == found.nodes


def test_axes_of_one_device_need_no_resharding():
    mesh = LogicalMesh(("data", "model"), (2, 1))
    assert same_cut(mesh, ("data",), ("data", "model"))
    assert same_cut(mesh, (("data", "model"),), ("data",))
    assert not same_cut(mesh, ("data",), (None, "data"))


def test_a_resharding_is_traced_once():
    arguments = (
        ArrayType((8, 4), "float32", 4),
        LogicalMesh(("data",), (2,)),
        ((), ("data",)),
        Settings(),
        "cpu",
    )
    found = resharding(*arguments)
    assert (found.in_specs, found.out_specs) == (((),), (("data",),))
    assert resharding(*arguments) is found


def test_dead_calls_go_with_all_that_only_they_need(slices):
    a, b, c = functions(slices)

    @program
    def f(x, unused):
        y = a(x)
        c(b(y))
        return y

    found = drop_dead_calls(f.program(ROWS, ROWS))
    assert [node.slice for _, node in found.calls()] == ["a"]
    assert found.num_args == 2


def test_calls_that_do_more_than_compute_are_kept(slices):
    def prints(x):
        jax.debug.print("{}", x)
        return x

    printing = jit(prints, slice=slices["b"], in_shardings=P("data"))
    a, *_ = functions(slices)

    @program
    def f(x):
        printing(a(x))
        return x

    assert len(list(drop_dead_calls(f.program(ROWS)).calls())) == 2


def fused(found, **options):
    return fuse(insert_transfers(place(found, PLACES)), **options)


def test_neighbours_on_a_slice_become_one_computation(slices):
    a, *_ = functions(slices)
    matmul = jit(jnp.dot, slice=slices["a"], in_shardings=(P("data"), P()))

    @program
    def f(x, w):
        y = a(a(x))
        return a(matmul(y, w)), y

    found = fused(f.program(ROWS, np.ones((4, 4), np.float32)))
    ((_, call),) = found.calls()
    assert call.computation.name == "scale+dot"
    assert call.computation.in_specs == (("data",), ())
    assert call.computation.out_specs == (("data",), ("data",))
    assert found.results == (Ref(4, 1), Ref(4, 0))


def test_a_block_ends_with_what_leaves_and_begins_with_what_arrives(slices):
    a, b, _ = functions(slices)

    @program
    def f(x):
        x = a(a(x))  # goes to the other slice, so nothing may be joined to it
        y = b(x)
        x = a(a(x))  # can run while the other slice does
        return a(y), x

    found = fused(f.program(ROWS))
    assert [node.slice for _, node in found.calls()] == ["a", "b", "a", "a"]


def test_a_block_takes_no_longer_than_its_bound(slices):
    a, *_ = functions(slices)

    @program
    def f(x):
        for _ in range(6):
            x = a(x)
        return x

    found = f.program(ROWS)
    assert len(list(fused(found).calls())) == 1
    assert len(list(fused(found, block_ns=160_000).calls())) == 2
    assert len(list(fused(found, block_ns=0).calls())) == 6


def test_calls_of_one_order_become_one_and_stay_in_order(slices):
    a, *_ = functions(slices)

    @program
    def f(x):
        return a.in_order(1, x), a.in_order(1, a.in_order(1, x)), a(x)

    found = f.program(ROWS)
    assert [node.order for _, node in fused(found).calls()] == [1, 0]
    assert [node.order for _, node in fused(found, block_ns=0).calls()] == [1, 1, 1, 0]


def test_donation_survives_fusion(slices):
    a, *_ = functions(slices)
    take = jit(scale, slice=slices["a"], in_shardings=P("data"), donate_argnums=(0,))

    @program
    def f(x):
        return a(x), take(take(x))

    ((_, call),) = fused(f.program(on(slices["a"]))).calls()
    assert call.computation.donated == (0,)


def test_what_is_destroyed_in_a_block_has_left_before(slices):
    a, b, _ = functions(slices)
    take = jit(scale, slice=slices["a"], in_shardings=P("data"), donate_argnums=(0,))

    @program
    def f(x, y):
        y = a(y)  # could be joined by what destroys x, and would then come first
        z = b(x)
        return y, z, take(x)

    value = on(slices["a"])
    found = fused(f.program(value, on(slices["a"])))
    (moved,) = (i for i, node in enumerate(found.nodes) if isinstance(node, Transfer))
    (taken,) = (i for i, call in found.calls() if call.donated)
    assert found.nodes[moved].operand in found.nodes[taken].donated
    assert moved < taken


def test_checks_callbacks_and_other_settings_are_not_fused(slices):
    a, *_ = functions(slices)

    def prints(x):
        jax.debug.print("{}", x)
        return x

    printing = jit(prints, slice=slices["a"], in_shardings=P("data"))

    @program
    def f(x):
        x = a(printing(a(x)))
        with jax.default_matmul_precision("highest"):
            return a(x)

    names = [node.computation.name for _, node in fused(f.program(ROWS)).calls()]
    assert names == ["scale", "prints", "scale", "scale"]


def test_equal_blocks_are_traced_once(slices):
    a, *_ = functions(slices)

    @program
    def f(x):
        return [a(a(x)), a(a(x))]

    found = fused(f.program(ROWS), block_ns=120_000)
    (_, one), (_, other) = found.calls()
    assert one.computation is other.computation


def test_a_program_out_of_order_cannot_be_made(slices):
    a, *_ = functions(slices)
    found = program(lambda x: a(x)).program(ROWS)  # noqa: PLW0108 - an argument's name
    call = found.nodes[1]
    assert isinstance(call, Call)
    with pytest.raises(ProgramError, match="out of order: node 0 uses"):
        Program("f", found.slices, found.nodes[::-1], (), 1)
    with pytest.raises(ProgramError, match="out of order: its result uses"):
        Program("f", found.slices, found.nodes, (Ref(1, 5),), 1)
    with pytest.raises(ProgramError, match="names a slice that it does not list"):
        Program("f", (), found.nodes, (), 1)
