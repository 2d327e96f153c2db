"""Loops and branches as they are traced, passed and cut, without a cluster."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from timelyml import ml
from timelyml.errors import ConfigError, HandleError, ProgramError, TraceError
from timelyml.ml.programs import Place, lower, split
from timelyml.ml.programs.flows import Choice, Part, Repeat
from timelyml.ml.programs.lowering import run_passes

HERE = "test_control.py"


def sliced(size=2):
    client = ml.OfflineClient()
    a, b = (client.slice({"x": size}, name=name) for name in "ab")
    places = {
        "a": Place("east", tuple(f"d{i}" for i in range(size)), ("h0",) * size),
        "b": Place("west", tuple(f"e{i}" for i in range(size)), ("h1",) * size),
    }
    return client, a, b, places


class Calls:
    """Compiled functions on two slices."""

    def __init__(self, size=2):
        self.client, self.a, self.b, self.places = sliced(size)
        self.less = ml.jit(lambda i: i < 5, slice=self.a)
        self.step = ml.jit(lambda i: i + 1, slice=self.a)
        self.taking = ml.jit(lambda x: x * 2, slice=self.a, donate_argnums=0)
        self.norm = ml.jit(lambda x: (x * x).sum(), slice=self.b)
        self.wide = ml.jit(lambda x: jnp.stack([x, x]), slice=self.b)
        self.half = ml.jit(lambda x: x.astype("bfloat16"), slice=self.b)


@pytest.fixture(scope="module")
def calls():
    return Calls()


def passed(function, calls, *args):
    return run_passes(ml.program(function).program(*args), calls.places).program


def loop_of(calls, before=lambda x: x):
    """A loop with a regular part before and one after it."""

    def f(x):
        i, y = ml.while_loop(
            lambda c: calls.less(c[0]),
            lambda c: (calls.step(c[0]), calls.norm(c[1])),
            (0, before(x)),
        )
        return calls.norm(y), i

    return f


def test_regular_parts_are_as_large_as_may_be_and_do_not_grow_with_devices():
    sizes = []
    for size in (2, 16):
        calls = Calls(size)
        program = passed(loop_of(calls, before=calls.norm), calls, np.float32(1))
        whole = split(program)
        assert [type(each) for each in whole.flow.steps] == [Part, Repeat, Part]
        repeat = whole.flow.steps[1]
        assert [type(each) for each in repeat.flow.steps] == [Part]
        assert len([*whole.programs()]) == 4  # the final part is the last
        sizes.append([len(each.nodes) for each in whole.programs()])
    assert sizes[0] == sizes[1]


def test_what_no_branch_decides_is_in_the_first_part(calls):
    def f(flag, x):
        y = ml.cond(flag, calls.norm, calls.norm, x)
        z = calls.norm(calls.step(x))
        return y, z

    whole = split(passed(f, calls, True, np.float32(1)))
    assert [type(each) for each in whole.flow.steps] == [Part, Choice]
    names = [call.computation.name for _, call in whole.flow.steps[0].program.calls()]
    assert len(names) == 3  # and what reads the flag
    assert "read" in names


def test_a_loop_is_rotated_so_that_a_run_of_it_is_one_part(calls):
    stages = dict(
        run_passes(
            ml.program(loop_of(calls)).program(np.float32(1)), calls.places
        ).stages
    )
    assert "while:" in stages["trace"]
    assert "do:" in stages["insert transfers"]
    assert "step:" in stages["rotate loops"]
    assert "while:" not in stages["rotate loops"]


def test_a_diagram_draws_regions_in_boxes_of_their_own(calls):
    drawn = ml.program(loop_of(calls)).program(np.float32(1)).mermaid()
    assert 'n2r0ns["while_loop: while"]' in drawn
    assert 'n2r1ns["while_loop: do"]' in drawn
    lines = [each.strip() for each in drawn.splitlines()]
    assert sum(each.startswith("subgraph") for each in lines) == lines.count("end")


def test_programs_differ_by_what_is_in_their_regions(calls):
    def f(step):
        return ml.program(lambda i: ml.while_loop(calls.less, step, i))

    one, same = (f(calls.step).program(np.int32(0)) for _ in range(2))
    other = f(lambda i: calls.step(calls.step(i))).program(np.int32(0))
    assert one.identity == same.identity != other.identity


def test_a_run_of_a_loop_is_fused_with_its_condition(calls):
    def body(i):
        return calls.step(calls.step(calls.step(i)))

    fused = ml.program(lambda i: ml.while_loop(calls.less, body, i), fuse=True)
    program = run_passes(fused.program(np.int32(0)), calls.places).program
    whole = split(program)
    (part,) = whole.flow.steps[-1].flow.steps
    assert len([*part.program.calls()]) == 1  # three steps, and whether to go on


def test_a_program_with_loops_is_lowered_by_its_parts(calls):
    program = ml.program(loop_of(calls)).program(np.float32(1))
    with pytest.raises(ProgramError, match="got branches or loops by values"):
        lower(program, calls.places)
    whole = split(run_passes(program, calls.places).program)
    for part in whole.programs():
        assert lower(part, calls.places).instructions


def taking_captured(calls, x):
    y = calls.step(x)
    return ml.while_loop(calls.less, lambda _: calls.taking(y), calls.step(x))


def keeping(calls, x):
    kept = []

    def body(x):
        kept.append(x)
        return calls.step(x)

    ml.while_loop(calls.less, body, x)
    return calls.step(kept[0])


REFUSED = {
    "shapes of branches": (
        lambda c, x: ml.cond(c.less(x), c.norm, c.wide, x),
        TraceError,
        r"branch true.*another type than branch false.*float32\[\].*float32\[2\]",
    ),
    "trees of branches": (
        lambda c, x: ml.switch(0, [c.norm, lambda x: (c.norm(x),)], x),
        TraceError,
        "branch 1 .* another tree than branch 0",
    ),
    "type of the body": (
        lambda c, x: ml.while_loop(c.less, c.half, x),
        TraceError,
        r"body .* returns another type; got bfloat16\[\]; expected float32",
    ),
    "tree of the body": (
        lambda c, x: ml.while_loop(c.less, lambda x: (x, x), x),
        TraceError,
        "returns another tree",
    ),
    "no condition": (
        lambda c, x: ml.while_loop(c.norm, c.step, x),
        TraceError,
        r"condition .* returns no boolean; got \[float32",
    ),
    "a condition that donates": (
        lambda c, x: ml.while_loop(lambda x: c.less(c.taking(x)), c.step, x),
        HandleError,
        "donates what is carried",
    ),
    "a body that donates what it captured": (
        taking_captured,
        HandleError,
        "donates a value that it captured",
    ),
    "no number": (
        lambda c, x: ml.switch(c.norm(x), [c.step], x),
        TraceError,
        r"switch at .* cannot choose; got float32\[\]; expected int32",
    ),
    "no array": (
        lambda c, x: ml.cond(c.less(x), c.step, c.step, "x"),
        TraceError,
        "cond at .* is given what is no array; got a str",
    ),
    "no function": (
        lambda c, x: ml.cond(c.less(x), None, c.step, x),
        ConfigError,
        "branch true is no function",
    ),
    "no branches": (lambda c, x: ml.switch(0, [], x), ConfigError, "no branches"),
    "no bound": (
        lambda c, x: ml.while_loop(c.less, c.step, x, max_steps=-1),
        ConfigError,
        "'max_steps' cannot work; got -1",
    ),
    "no flag": (
        lambda c, x: ml.while_loop(c.less, c.step, x, checkpoint="all"),
        ConfigError,
        "'checkpoint' cannot work; got 'all'",
    ),
    "a value of a body, later": (
        keeping,
        TraceError,
        "a value of the body 'body' of the while_loop at .* is used after it",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_at_the_call(calls, what):
    function, kind, match = REFUSED[what]
    with pytest.raises(kind, match=match) as raised:
        ml.program(lambda x: function(calls, x)).program(np.float32(1))
    assert HERE in str(raised.value) or kind is ConfigError
