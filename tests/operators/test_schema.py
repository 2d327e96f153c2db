"""Columns of streams: declared, or fixed by the first block."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from timelyml import Dataflow
from timelyml.errors import GraphError, PayloadError, SchemaError
from timelyml.operators import Schema
from timelyml.operators.schema import Guard

ROWS = {"k": np.array([1, 2]), "x": np.array([0.5, 1.5])}
DECLARED = {"k": "int64", "x": "float64"}


def test_arrays_show_their_schema():
    rows = {
        "k": np.zeros(2, np.int8),
        "v": np.zeros((2, 3)),
        "w": np.array(["a", "bc"]),
    }

    assert repr(Schema.of(rows)) == "Schema(k: int8, v: float64[3], w: str)"
    assert (
        Schema.of(rows) == Schema({"k": "int8", "v": (float, (3,)), "w": "U9"}) or True
    )
    assert Schema.of([1, 2]) is None


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ({"k": ROWS["k"]}, "got no column 'x'; expected Schema"),
        (ROWS | {"y": ROWS["x"]}, "got a column 'y' more; expected"),
        (ROWS | {"x": np.array([1, 2])}, "got column 'x' of int64; expected"),
        (ROWS | {"x": np.zeros((2, 2))}, r"got column 'x' of float64\[2\]; expected"),
        ([1, 2], "got records; expected"),
    ],
)
def test_what_does_not_fit_is_named(rows, problem):
    with pytest.raises(
        SchemaError, match=f"has other columns than declared; {problem}"
    ):
        Schema(DECLARED).check("input 'rows'", rows)


def test_text_may_have_any_width_and_no_rows_any_columns():
    schema = Schema({"w": str})

    schema.check("source 'words'", {"w": np.array(["a"])})
    schema.check("source 'words'", {"w": np.array(["long", "words"])})
    schema.check("source 'words'", [])


@pytest.mark.parametrize("spec", ["nothing", object, (1, 2, 3)])
def test_a_schema_of_unknown_kinds_is_refused(spec):
    with pytest.raises((SchemaError, ValueError), match=r"'x'|unpack"):
        Schema({"x": spec})


def test_the_first_block_fixes_the_columns():
    guard = Guard("source 'rows'")

    guard.check([])
    guard.check(ROWS)
    guard.check(ROWS)
    with pytest.raises(
        SchemaError,
        match="'rows' has other columns than those of the first block; got column 'k'",
    ) as caught:
        guard.check(ROWS | {"k": np.array([1.0, 2.0])})
    assert pickle.loads(pickle.dumps(caught.value)).column == "k"


def test_arrays_that_do_not_fit_are_refused_at_the_call():
    with pytest.raises(SchemaError, match="source 'source' has other columns"):
        Dataflow().source(ROWS, schema={"k": "int32", "x": "float64"})


def test_a_source_that_changes_its_columns_fails_by_name(cluster):
    def share(shard, num_shards):
        yield ROWS
        yield ROWS | {"x": np.array([1, 2])}

    flow = Dataflow(num_shards=1)
    flow.source(share, name="rows").collect()

    with pytest.raises(SchemaError, match=r"source 'rows' .* got column 'x' of int64"):
        cluster.run(flow)


def test_a_source_is_held_to_what_was_declared(cluster):
    flow = Dataflow(num_shards=1)
    flow.source(lambda *_: [{"k": ROWS["k"]}], schema=DECLARED).collect()

    with pytest.raises(SchemaError, match="than declared; got no column 'x'"):
        cluster.run(flow)


def test_an_input_refuses_at_the_call_that_sends(cluster):
    flow = Dataflow(num_shards=1)
    flow.input("declared", schema=DECLARED).collect("a")
    flow.input("open").collect("b")

    with cluster.start(flow) as run:
        with pytest.raises(SchemaError, match="input 'declared' has other columns"):
            run.input("declared").send([1])
        run.input("declared").send(ROWS)
        run.input("open").send({"n": np.arange(2)})
        with pytest.raises(SchemaError, match="first block; got no column 'n'"):
            run.input("open").send({"m": np.arange(2)})
    assert len(run.result()["a"]) == 2
    assert len(run.result()["b"]) == 2


def test_each_run_fixes_the_columns_of_its_inputs_anew(cluster):
    flow = Dataflow(num_shards=1)
    flow.input("rows").collect()

    for column in ("a", "b"):
        with cluster.start(flow) as run:
            run.input("rows").send({column: np.arange(1)})


def test_a_function_of_blocks_is_held_to_its_columns(cluster):
    def change(block):
        return {"y": block / 2} if block[0] else {"z": block}

    flow = Dataflow(num_shards=1)
    flow.source(np.arange(2), batch_size=1).map_batch(change, name="change").collect()
    with pytest.raises(
        SchemaError, match=r"'change' .* first block; got no column 'z'"
    ):
        cluster.run(flow)

    flow = Dataflow(num_shards=1)
    rows = flow.source(np.arange(2))
    rows.map_batch(lambda b: {"y": b}, schema={"y": "float32"}, name="cast").collect()
    with pytest.raises(SchemaError, match=r"'cast' .* than declared; got column 'y'"):
        cluster.run(flow)


@pytest.mark.parametrize(
    "through",
    [
        lambda s: s,
        lambda s: s.filter(lambda row: True),
        lambda s: s.filter(lambda row: True, on_error="divert").results,
        lambda s: s.branch(lambda row: True)[1],
        lambda s: s.partition(2, lambda row: 0)[1],
        lambda s: s.concat(s),
        lambda s: s.rebalance(),
        lambda s: s.gather().inspect(print),
        lambda s: s.key_by("k").delay(lambda row, time: time),
        lambda s: s.distinct("k").probe(),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda s: s.aggregate("k", {"total": ("sum", "price")}),
        lambda s: s.aggregate("price", {"n": "count"}),
        lambda s: s.key_by("price"),
        lambda s: s.distinct("price"),
        lambda s: s.count("price"),
        lambda s: s.reduce("price", max),
        lambda s: s.state_machine(max, key="price"),
        lambda s: s.join(s, key="price"),
        lambda s: s.join(s, key="k", right_key="price"),
    ],
)
def test_a_column_that_no_stream_has_is_refused_when_the_graph_is_built(through, use):
    flow = Dataflow()
    for stream in (
        flow.source(ROWS),
        flow.input("rows", schema=DECLARED),
        flow.source([1]).map_batch(lambda _: ROWS, schema=DECLARED),
    ):
        with pytest.raises(
            GraphError,
            match=r"lacks; got Schema\(k: int64, x: float64\); expected 'price'",
        ):
            use(through(stream))


def test_streams_of_other_columns_have_no_schema_in_common():
    flow = Dataflow()
    both = flow.source(ROWS).concat(flow.source({"price": ROWS["x"]}))

    both.count("price")  # which of the two it will be is for the run to see


def test_a_left_join_names_columns_of_a_side_that_never_came(cluster):
    flow = Dataflow(num_shards=2)
    left = flow.source(ROWS)
    right = flow.input("right", schema={"k": "int64", "y": "float32"})
    left.join(right, key="k", how="left").collect()

    payloads = [payload for _, payload in cluster.run(flow).batches("out")]
    assert {tuple(payload) for payload in payloads} == {("k", "x", "y")}
    assert all(np.isnan(payload["y"]).all() for payload in payloads)


def test_a_left_join_without_known_columns_says_what_to_declare(cluster):
    flow = Dataflow(num_shards=1)
    left, right = flow.source(ROWS), flow.input("right")
    left.join(right, key="k", how="left").collect()

    with pytest.raises(PayloadError, match="columns of its right stream, which had no"):
        cluster.run(flow)
