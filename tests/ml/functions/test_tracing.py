"""What a trace says of a function, without any device of its mesh."""

from __future__ import annotations

import functools
import pickle
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from tests.ml.functions import cases
from timelyml.errors import ConfigError, ShippingError, TraceError
from timelyml.ml.functions import (
    ArrayType,
    LogicalMesh,
    Options,
    Settings,
    applied,
    current_settings,
    logical_mesh,
    trace,
)
from timelyml.ml.functions.shipped import unship_function

MESH = LogicalMesh(("data", "model"), (4, 2))


def computation_of(fun, *args, mesh=MESH, settings=None, **options):
    settings = settings or current_settings()
    traced = trace(fun, args, mesh=mesh, settings=settings, options=Options(**options))
    return traced.computation


def rows(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_the_mesh_of_a_trace_needs_no_devices():
    huge = LogicalMesh(("data", "model"), (256, 8))
    traced = computation_of(jnp.dot, rows(512, 64), rows(64, 64), mesh=huge)
    assert jax.device_count() < huge.size
    assert traced.mesh == huge
    assert traced.out_types == (ArrayType((512, 64), "float32", 4),)


def test_size_and_cost_of_a_computation_do_not_grow_with_its_devices():
    def size(num_devices):
        mesh = LogicalMesh(("data",), (num_devices,))
        args = rows(4096, 64), rows(64, 64)
        found = computation_of(jnp.dot, *args, mesh=mesh, in_shardings=(P("data"), P()))
        return len(pickle.dumps(found))

    assert abs(size(2048) - size(2)) < 32
    assert size(2048) < 4000


def test_shardings_left_open_are_those_that_xla_would_choose():
    found = computation_of(
        lambda x, w: (x @ w, (x @ w).sum(0), x.sum()),
        rows(8, 16),
        rows(16, 6),
        in_shardings=(P("data"), P(None, "model")),
    )
    assert found.out_specs == (("data", "model"), ("model",), ())


def test_a_sharding_that_would_need_padding_is_not_chosen():
    found = computation_of(lambda x: x[:6], rows(8, 16), in_shardings=(P("data"),))
    assert found.out_types[0].shape == (6, 16)
    assert found.out_specs == ((),)


def test_arguments_keep_the_sharding_they_have_unless_told_otherwise():
    @dataclass(frozen=True)
    class Value:
        type: ArrayType
        spec: tuple

    value = Value(ArrayType((8, 4), "float32", 4), ("data",))
    kept = computation_of(lambda x: x * 2, value)
    told = computation_of(lambda x: x * 2, value, in_shardings=(P(None, "model"),))
    assert (kept.in_specs, kept.out_specs) == ((("data",),), (("data",),))
    assert told.in_specs == ((None, "model"),)


def test_one_sharding_stands_for_all_below_it():
    tree = {"a": rows(8, 2), "b": [rows(8), rows(16, 2)]}
    found = computation_of(
        lambda tree: tree,
        tree,
        in_shardings=P("data"),
        out_shardings={"a": P("model"), "b": None},
    )
    assert found.in_specs == (("data",),) * 3
    assert found.out_specs == (("model",), ("data",), ("data",))


NEED_NO_MESH = set(cases.CASES) - {
    "guarded",
    "summed",
    "constrained",
    "precise",
    "explicit",
}


def test_none_in_arguments_and_results_is_part_of_the_tree_and_has_no_sharding():
    def shift(given):
        return {"absent": given["absent"], "shifted": given["x"] + 1, "whole": ()}

    whole = P()
    traced = computation_of(
        shift,
        {"absent": None, "x": rows(8)},
        in_shardings=({"absent": None, "x": P("data")},),
        out_shardings={"absent": whole, "shifted": whole, "whole": whole},
    )
    assert (traced.in_specs, traced.out_specs) == ((("data",),), ((),))


@pytest.mark.parametrize("name", sorted(NEED_NO_MESH))
def test_types_and_trees_are_those_of_plain_jax(name):
    case = cases.CASES[name]
    traced = trace(
        case.fun,
        case.args(),
        mesh=LogicalMesh(("data", "model"), (1, 1)),
        settings=case.settings,
        options=case.options,
    )
    static = case.options.static_argnums or (1,) * bool(case.options.static_argnames)
    with applied(case.settings):
        expected = jax.jit(case.fun, static_argnums=static).eval_shape(*case.args())
    assert traced.out_tree == jax.tree.structure(expected)
    leaves = jax.tree.leaves(expected)
    for mine, theirs in zip(traced.computation.out_types, leaves, strict=True):
        assert (mine.shape, mine.is_weak) == (theirs.shape, theirs.weak_type)
        assert str(theirs.dtype) in (mine.dtype, "key<fry>", "key<rbg>")


def test_types_that_numpy_does_not_know_have_names():
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = computation_of(
        lambda key, x: (x, jax.random.split(key)), key, rows(3, dtype=jnp.float8_e4m3fn)
    )
    assert [str(each) for each in found.in_types] == [
        "key<threefry2x32>[]",
        "float8_e4m3fn[3]",
    ]
    assert found.in_types[0].size_bytes == 8
    assert found.in_types[0].physical == ArrayType((2,), "uint32", 4)
    assert found.out_types[1].physical.shape == (2, 2)


def test_a_computation_pickles_as_plain_values():
    found = computation_of(jnp.dot, rows(8, 8), rows(8, 8))
    blob = pickle.dumps(found)
    assert pickle.loads(blob) == found
    assert b"jax" not in blob.replace(found.stablehlo, b"")


def test_the_same_function_has_the_same_identity_wherever_it_stands():
    def body(x):
        return jnp.sin(x) * 2

    def other(x):
        return jnp.sin(x) * 2

    same = computation_of(body, rows(8)), computation_of(other, rows(8))
    assert same[0].identity == same[1].identity
    assert same[0].name != same[1].name


@pytest.mark.parametrize(
    "change",
    [
        {"mesh": LogicalMesh(("data", "model"), (2, 4))},
        {"mesh": LogicalMesh(("rows", "model"), (4, 2))},
        {"settings": Settings(matmul_precision="highest")},
        {"in_shardings": (P("model"),)},
        {"out_shardings": P("data")},
        {"donate_argnums": (0,)},
    ],
)
def test_what_changes_the_meaning_changes_the_identity(change):
    def plain(**change):
        return computation_of(lambda x: x * 2, rows(8), **change).identity

    assert plain(**change) != plain()


def test_donated_and_unused_arguments_are_told():
    found = computation_of(
        lambda a, b, c: a + c["x"],
        rows(4),
        rows(4),
        {"x": rows(4), "y": rows(4)},
        donate_argnums=(2,),
    )
    assert [len(found.in_types), found.donated] == [2, (1,)]


def test_an_explicit_mesh_keeps_its_shardings_in_types():
    mesh = logical_mesh(AbstractMesh((4,), ("data",), axis_types=(AxisType.Explicit,)))
    found = computation_of(
        lambda x: (jnp.sin(x), jax.typeof(x).sharding.spec[0] == "data" and x.sum()),
        rows(8, 2),
        mesh=mesh,
        in_shardings=(P("data"),),
    )
    assert found.out_specs == (("data",), ())


def test_settings_of_the_client_hold_while_it_traces():
    def wide(x):
        return x * np.float64(2), jax.random.key(0)

    arguments = (np.arange(3.0),)
    found = computation_of(wide, *arguments, settings=Settings(True, None, "rbg"))
    narrow = computation_of(wide, *arguments, settings=Settings(False))
    assert [each.dtype for each in found.out_types] == ["float64", "key<rbg>"]
    assert [each.dtype for each in narrow.out_types] == ["float32", "key<threefry2x32>"]


def test_branching_on_a_value_is_refused_with_the_users_line():
    def branches(x):
        if x.sum() > 0:  # here
            return x
        return -x

    with pytest.raises(
        TraceError, match=r"'branches' cannot be traced.*if x\.sum"
    ) as e:
        computation_of(branches, rows(4))
    assert "test_tracing.py" in e.value.where
    assert isinstance(e.value.__cause__, jax.errors.TracerBoolConversionError)


def test_shapes_that_do_not_fit_are_refused_with_the_users_line():
    with pytest.raises(TraceError, match=r"jnp\.dot\(x, x\)") as e:
        computation_of(lambda x: jnp.dot(x, x), rows(4, 3))
    assert isinstance(e.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"in_shardings": (P("nowhere"),)}, "'f': argument 0 .*axes data, model"),
        ({"in_shardings": (P(None, "data"),)}, "3 in dimension 1.*multiple of 4"),
        ({"in_shardings": (P("data", None, "model"),)}, "at most 2 entries"),
        ({"out_shardings": (P(), P())}, "results do not match the tree"),
        ({"in_shardings": (3,)}, "not a sharding; got 3"),
        ({"in_shardings": (P(P.UNCONSTRAINED),)}, "dimension open"),
    ],
)
def test_a_sharding_that_does_not_fit_is_refused(options, complaint):
    def f(x):
        return x

    with pytest.raises(ConfigError, match=complaint):
        computation_of(f, rows(8, 3), **options)


def test_a_function_with_callbacks_travels_as_code():
    found = computation_of(
        cases.asks_host, rows(8, 8), 3, static_argnums=(1,), in_shardings=(P("data"),)
    )
    assert found.has_callbacks
    shipped = unship_function(found.pickled_code)
    result = jax.jit(shipped)(np.ones((8, 8), np.float32))
    expected = np.sin(np.ones((8, 8), np.float32)) * 3 * 2
    np.testing.assert_array_equal(result.weights["rows"], expected)


def test_what_only_a_callback_uses_is_used():
    def prints(x, y):
        jax.debug.print("{}", y)
        return x

    assert len(computation_of(prints, rows(4), rows(2)).in_types) == 2


def test_a_function_with_callbacks_may_scatter():
    def prints(x):
        jax.debug.print("{}", x)
        return jax.lax.cond(x[0] > 0, lambda x: x.at[:2].set(0.0), jnp.sin, x)

    assert computation_of(prints, rows(4)).has_callbacks


def test_callbacks_inside_loops_and_branches_are_found():
    def nested(x):
        def body(_, x):
            return jax.lax.cond(
                x[0] > 0, lambda x: (jax.debug.print("{}", x), x)[1], jnp.sin, x
            )

        return jax.lax.fori_loop(0, 3, body, x)

    assert computation_of(nested, rows(4)).has_callbacks
    assert not computation_of(jnp.sin, rows(4)).has_callbacks


def test_a_dataclass_that_workers_cannot_import_is_registered_with_them():
    @functools.partial(
        jax.tree_util.register_dataclass, data_fields=["a"], meta_fields=["b"]
    )
    @dataclass(frozen=True)
    class Local:
        a: object
        b: str

    def local(x):
        return Local(jax.pure_callback(np.sin, rows(2), x.a), x.b)

    found = computation_of(local, Local(rows(2), "name"))
    shipped = unship_function(found.pickled_code)
    ((cls, fields),) = shipped.classes
    assert (cls.__name__, fields) == ("Local", ("a",))


def test_what_a_callback_captures_has_to_pickle():
    import threading

    lock = threading.Lock()

    def locked(x):
        def on_host(x):
            with lock:
                return x

        return jax.pure_callback(on_host, rows(2), x)

    with pytest.raises(ShippingError, match=r"'locked' cannot be shipped.*lock"):
        computation_of(locked, rows(2))


def test_checks_become_outputs_with_the_users_line():
    found = computation_of(cases.guarded, rows(8), 3.0)
    ((message),) = found.checks.messages.values()
    assert found.num_results == 1
    assert "cases.py" in message.where
    assert "checkify.check" in message.where
    outputs = [None] * len(found.out_types)
    (group,) = found.checks.groups
    (code,) = found.checks.messages
    outputs[group.failed], outputs[group.code] = True, code
    for position, value in zip(group.values, (1.5, 9.0), strict=True):
        outputs[position] = value
    text, _ = found.checks.first_failure(outputs)
    assert text == "9.0 is too large, 1.5"
    outputs[group.failed] = False
    assert found.checks.first_failure(outputs) is None
