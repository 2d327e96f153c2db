"""`@ml.program`: what becomes of a block of calls, and what a block may not do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from tests.ml.functions.fakes import Client, Slice, Value
from timelyml.errors import ConfigError, HandleError, ProgramError, TraceError
from timelyml.ml.functions import ArrayType, jit
from timelyml.ml.programs import Arg, Call, Constant, program

PAIR = AbstractMesh((2,), ("data",))
VECTOR = ArrayType((2,), "float32", 4)


FIGURE_2 = """\
program f
  slice a: data=2 on cpu
  slice b: data=2 on cpu
  slice c: data=2 on cpu
  %0 = arg v: float32[2] from the client
  %1 = call double(%0): float32[2] over ('data',) on a
  %2 = call increment(%1): float32[2] over ('data',) on b
  %3 = call halve(%1): float32[2] over ('data',) on c
  %4 = call double(%3): float32[2] over ('data',) on a
  result %2, %4"""


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def slices(client):
    return [Slice(client, name, PAIR) for name in "abc"]


@pytest.fixture
def figure_2(slices):
    """The functions of the paper's Figure 2, each on a slice of two devices."""
    a, b, c = slices

    def double(x):
        return x * 2

    def increment(x):
        return x + 1

    def halve(x):
        return x / 2

    shardings = {"in_shardings": P("data"), "out_shardings": P("data")}
    return [
        jit(double, slice=a, **shardings),
        jit(increment, slice=b, **shardings),
        jit(halve, slice=c, **shardings),
    ]


def handle(slice_, spec=("data",)):
    return Value(slice_, VECTOR, spec)


def kinds(found):
    return [type(node).__name__ for node in found.nodes]


def test_figure_2_is_one_node_a_call(figure_2):
    a, b, c = figure_2

    @program
    def f(v):
        x = a(v)
        y = b(x)
        z = a(c(x))
        return (y, z)

    found = f.program(np.array([1, 2], np.float32))
    assert found.ir() == FIGURE_2


def test_a_program_draws_its_slices_around_its_calls(figure_2):
    a, b, _ = figure_2
    drawn = program(lambda v: b(a(v))).program(np.ones(2, np.float32)).mermaid()
    assert drawn.startswith("flowchart LR\n")
    assert 'subgraph slice0["a<br/>data=2 on cpu"]' in drawn
    assert 'n0 -->|"float32[2]"| n1' in drawn
    assert """n1 -->|"float32[2] over ('data',)"| n2""" in drawn
    assert "| result" in drawn


def test_a_call_is_one_message_with_the_tree_of_the_block(figure_2, client, slices):
    a, b, _ = figure_2

    @program
    def f(tree):
        return {"first": a(tree["v"]), "rest": [b(tree["v"]), tree["v"]]}

    result = f({"v": handle(slices[0])})
    (call,) = client.calls
    assert [each.position for each in call.program.nodes if isinstance(each, Arg)] == [
        0
    ]
    assert result["first"].slice.name == "a"
    assert result["rest"][0].slice.name == "b"
    assert result["rest"][1].slice.name == "a"
    assert call.program.nodes[0].label == "tree['v']"


def test_the_block_runs_once_for_equal_arguments(figure_2, client, slices):
    a = figure_2[0]
    num_runs = []

    @program(static_argnames="times")
    def f(v, times=1):
        num_runs.append(1)
        for _ in range(times):
            v = a(v)
        return v

    f(handle(slices[0]))
    f(handle(slices[0]))
    assert len(num_runs) == 1
    f(handle(slices[1]))  # on another slice, so it has to be moved
    f(handle(slices[0]), times=3)
    f(np.ones(2, np.float32))
    assert len(num_runs) == 4
    assert [len(call.program.nodes) for call in client.calls] == [2, 2, 2, 4, 2]


def test_tracing_a_call_records_types_and_runs_nothing(figure_2, client):
    a = figure_2[0]
    seen = []

    @program
    def f(v):
        x = a(v)
        seen.append((x.shape, x.dtype, x.ndim, x.size, len(x), x.spec, x.slice.name))
        return x

    f.program(np.ones(2, np.float32))
    assert seen == [((2,), np.float32, 1, 2, 2, ("data",), "a")]
    assert client.calls == []


def test_arguments_used_twice_and_constants_are_single_nodes(figure_2, slices):
    add = jit(lambda x, y: x + y, slice=slices[0])
    found = program(lambda v: (add(v, v), add(v, 3.0))).program(np.ones(2, np.float32))
    assert kinds(found) == ["Arg", "Call", "Constant", "Call"]
    assert found.nodes[1].operands == ((0, 0), (0, 0))
    constant = found.nodes[2]
    assert np.frombuffer(constant.data, np.float32) == 3.0
    assert constant.value.type.is_weak


def test_equal_constants_are_one_as_they_are_when_used(slices):
    add = jit(lambda x, y: x + y, slice=slices[0])
    array = np.ones(2, np.float32)

    @program
    def f(v):
        v = add(add(v, array), array)
        array[0] = 5
        return add(v, array)

    found = f.program(np.ones(2, np.float32))
    constants = [node.data for node in found.nodes if isinstance(node, Constant)]
    assert [np.frombuffer(each, np.float32).tolist() for each in constants] == [
        [1, 1],
        [5, 1],
    ]


def test_host_values_can_be_donated_often_as_they_are_copied(client, slices):
    take = jit(lambda x, y: x * y, slice=slices[0], donate_argnums=(0,))

    @program
    def f(v):
        return take(v, v), take(v, 2.0), v

    found = f.program(np.ones(2, np.float32))
    assert found.donated_args == set()
    array = np.ones(2, np.float32)
    take(array, array)
    assert len(client.calls) == 1


def test_keys_can_be_constants(slices):
    draw = jit(lambda key: jax.random.normal(key, (2,)), slice=slices[0])
    key = jax.random.key(3)
    found = program(lambda: draw(key)).program()
    assert isinstance(found.nodes[0], Constant)
    words = np.frombuffer(found.nodes[0].data, np.uint32)
    np.testing.assert_array_equal(words, jax.random.key_data(key))


def test_captured_handles_come_after_the_arguments(figure_2, client, slices):
    add = jit(lambda x, y: x + y, slice=slices[0])
    weights = handle(slices[1])

    @program
    def f(v):
        return add(add(v, weights), weights)

    v = handle(slices[0])
    f(v)
    (call,) = client.calls
    assert call.operands == (v, weights)
    assert call.program.num_args == 2
    assert call.program.nodes[1].label == "captured 0"


def test_a_program_within_a_program_becomes_part_of_it(figure_2):
    a, b, _ = figure_2
    inner = program(lambda x: (a(x), b(x)))

    @program
    def outer(v):
        first, second = inner(v)
        return inner(second), first

    found = outer.program(np.ones(2, np.float32))
    assert kinds(found) == ["Arg", *["Call"] * 4]
    assert found.nodes[3].operands == ((2, 0),)


def test_results_may_be_arguments_constants_and_repeated(figure_2):
    a = figure_2[0]
    found = program(lambda v: (v, a(v), v, 7)).program(np.ones(2, np.float32))
    assert found.results == ((0, 0), (1, 0), (0, 0), (2, 0))


def test_donated_arguments_are_told(figure_2, slices):
    add = jit(lambda x, y: x + y, slice=slices[0], donate_argnums=(1,))
    found = program(add).program(handle(slices[0]), handle(slices[0]))
    assert found.donated_args == {1}
    assert "call <lambda>(%0, %1!)" in found.ir()


def test_equal_programs_have_one_identity(figure_2):
    a, b, _ = figure_2

    def identity(block, value=1.0):
        return program(block).program(np.full(2, value, np.float32)).identity

    def f(v):
        return a(v)

    assert identity(f) == identity(f, 2.0)
    different = [b, lambda v: (a(v), v), lambda v: a(a(v))]
    assert len({identity(f), *map(identity, different)}) == 4


def asks_bool(x):
    return bool(x)


def asks_float(x):
    return float(x)


def asks_elements(x):
    return list(x)


def asks_array(x):
    return np.asarray(x)


@pytest.mark.parametrize("ask", [asks_bool, asks_float, asks_elements, asks_array])
def test_asking_for_a_value_is_refused_with_the_users_line(figure_2, ask):
    a = figure_2[0]
    with pytest.raises(
        TraceError, match=r"cannot ask for a value at .*test_tracing"
    ) as e:
        program(lambda v: ask(a(v))).program(np.ones(2, np.float32))
    assert f"in {ask.__name__}" in e.value.where


@pytest.mark.parametrize(
    "compute",
    [lambda x: x + 1, lambda x: 1 - x, lambda x: x[0], lambda x: -x, lambda x: x == 1,
     lambda x: x @ x, lambda x: x < 2],
)  # fmt: skip
def test_computing_outside_of_a_function_is_refused(figure_2, compute):
    a = figure_2[0]
    with pytest.raises(
        TraceError, match="cannot compute outside of a compiled function"
    ):
        program(lambda v: compute(a(v))).program(np.ones(2, np.float32))


def test_jax_outside_of_a_function_is_refused(figure_2):
    a = figure_2[0]
    with pytest.raises(TraceError, match=r"Placeholder.*expected calls of functions"):
        program(lambda v: jnp.sin(a(v))).program(np.ones(2, np.float32))


def test_an_error_of_the_block_is_told_with_its_line(figure_2):
    def broken(v):
        return {}["no such key"]

    with pytest.raises(
        TraceError, match=r"program 'broken' cannot be traced at .*no such"
    ):
        program(broken).program(np.ones(2, np.float32))


def test_use_after_donation_is_refused_naming_both_lines(slices):
    take = jit(lambda x: x * 2, slice=slices[0], donate_argnums=(0,))

    @program
    def f(v):
        x = take(v)
        return x, take(v)  # again

    with pytest.raises(HandleError, match=r"take\(v\)  # again.*donated at .*x = take"):
        f.program(handle(slices[0]))


def test_a_donated_value_is_no_result(slices):
    take = jit(lambda x: x * 2, slice=slices[0], donate_argnums=(0,))
    with pytest.raises(HandleError, match=r"after it was donated; .* in the result"):
        program(lambda v: (take(v), v)).program(handle(slices[0]))


def test_donating_a_value_twice_in_a_call_is_refused(client, slices):
    add = jit(lambda x, y: x + y, slice=slices[0], donate_argnums=(0,))
    v = handle(slices[0])

    def f(x, y):
        return add(x, y)

    with pytest.raises(HandleError, match=r"destroy and another time; got .* 2 times"):
        add(v, v)
    with pytest.raises(HandleError, match="destroy and another time"):
        program(lambda v: add(v, v)).program(v)
    with pytest.raises(HandleError, match="'f' is given a value that it may destroy"):
        program(f)(v, v)


def test_a_captured_value_cannot_be_donated(slices):
    take = jit(lambda x: x * 2, slice=slices[0], donate_argnums=(0,))
    weights = handle(slices[0])
    with pytest.raises(HandleError, match="donates a value that it captured"):
        program(lambda v: take(weights)).program(handle(slices[0]))


def test_values_do_not_outlive_their_program(figure_2):
    a = figure_2[0]
    kept = []
    program(lambda v: kept.append(a(v)) or kept[0]).program(np.ones(2, np.float32))
    with pytest.raises(TraceError, match=r"used after the program at .*test_tracing"):
        a(kept[0])
    with pytest.raises(TraceError, match="used after the program"):
        program(lambda: a(kept[0])).program()


def test_clients_do_not_mix(figure_2):
    a = figure_2[0]
    other = Slice(Client(), "other", PAIR)
    b = jit(lambda x: x, slice=other)
    with pytest.raises(HandleError, match="another client"):
        program(lambda v: b(a(v))).program(np.ones(2, np.float32))
    with pytest.raises(HandleError, match="slices of two clients"):
        program(lambda v: (a(v), b(1.0))).program(np.ones(2, np.float32))
    with pytest.raises(HandleError, match="another client"):
        program(a).program(handle(other))


def test_a_block_without_calls_is_refused():
    with pytest.raises(ProgramError, match="computes nothing"):
        program(lambda v: v).program(np.ones(2, np.float32))


def test_what_is_no_array_is_refused_on_both_sides(figure_2):
    a = figure_2[0]
    with pytest.raises(TraceError, match="called with what is no array; got a str"):
        program(a).program("text")
    with pytest.raises(TraceError, match="returns what is no array; got a str"):
        program(lambda v: (a(v), "text")).program(np.ones(2, np.float32))


def test_only_functions_are_programs():
    with pytest.raises(ConfigError, match="program: not a function; got 3"):
        program(3)


def test_a_call_on_another_slice_is_no_transfer_yet(figure_2, slices):
    a, b, _ = figure_2
    found = program(lambda v: b(a(v))).program(handle(slices[2]))
    assert [node.slice for node in found.nodes if isinstance(node, Call)] == ["a", "b"]
    assert kinds(found) == ["Arg", "Call", "Call"]
