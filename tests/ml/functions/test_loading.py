"""Computations that were traced elsewhere run on devices as plain JAX does."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ml.functions import cases
from timelyml.errors import ComputationError, PlacementError, ShippingError, TraceError
from timelyml.ml.functions import (
    Executables,
    LogicalMesh,
    Options,
    Settings,
    load,
    put,
    run_failure,
    to_host,
    trace,
)
from timelyml.runtime.environment import worker_environment

ROOT = Path(__file__).parents[3]
ONE = LogicalMesh(("data",), (1,))
ON = {
    1: ["train", "wide"],
    2: ["train", "open", "noise", "static", "asks host"],
    4: ["summed", "constrained", "explicit", "narrow", "other generator", "guarded"],
    8: ["train", "open", "scanned", "precise"],
}


def computation_of(fun, *args, settings=None, **options):
    return trace(
        fun,
        args,
        mesh=ONE,
        settings=settings or Settings(),
        options=Options(**options),
    ).computation


def run(computation, *values):
    executable = load(computation, jax.devices()[:1])
    arrays = [
        put(value, array_type, sharding)
        for value, array_type, sharding in zip(
            values, computation.in_types, executable.in_shardings, strict=True
        )
    ]
    return executable, arrays, executable(*arrays)


@pytest.mark.parametrize("num_devices", ON)
def test_shipped_functions_give_the_bits_of_plain_jax(tmp_path, num_devices):
    traced = [
        (
            name,
            trace(
                case.fun,
                case.args(),
                mesh=case.mesh(num_devices),
                settings=case.settings,
                options=case.options,
            ).computation,
        )
        for name, case in cases.CASES.items()
        if name in ON[num_devices]
    ]
    path = tmp_path / "computations.pickle"
    path.write_bytes(pickle.dumps(traced))

    done = subprocess.run(
        [sys.executable, "-m", "tests.ml.functions.on_devices", path, str(num_devices)],
        env=worker_environment(os.environ, num_devices=num_devices),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "devices": num_devices,
        "differing": {},
        "renamed": [],
    }


def test_every_case_runs_on_some_number_of_devices():
    assert {name for names in ON.values() for name in names} == set(cases.CASES)


def test_donated_arguments_are_gone_and_their_memory_is_used():
    computation = computation_of(
        lambda x, y: (x + y, y.sum()), np.ones(64), np.ones(64), donate_argnums=(0,)
    )
    executable, (x, y), outputs = run(computation, np.ones(64), np.ones(64))
    assert executable.memory.aliased_bytes == 256
    assert executable.memory.argument_bytes == 512
    jax.block_until_ready(outputs)
    assert x.is_deleted()
    assert not y.is_deleted()


def test_functions_of_other_settings_share_a_process():
    def wide(x):
        return x / 3, jax.random.normal(jax.random.key(0), (3,), "float64")

    values = np.arange(3.0)
    settings = Settings(x64=True, prng_impl="rbg")
    computation = computation_of(wide, values, settings=settings)
    assert not jax.config.jax_enable_x64
    _, _, (third, drawn) = run(computation, values)
    with jax.enable_x64(True), jax.default_prng_impl("rbg"):
        expected = jax.jit(wide)(values)
    np.testing.assert_array_equal(to_host(third), to_host(expected[0]))
    np.testing.assert_array_equal(to_host(drawn), to_host(expected[1]))
    assert third.dtype == np.float64


def test_keys_come_and_go_as_their_words():
    key = jax.random.key(5)
    words = np.asarray(jax.random.key_data(key))
    _, _, (split,) = run(computation_of(jax.random.split, key), words)
    expected = jax.random.key_data(jax.random.split(key))
    np.testing.assert_array_equal(to_host(split), np.asarray(expected))


def test_a_failed_check_says_what_and_where():
    computation = computation_of(cases.guarded, np.ones(4, np.float32), 3.0)
    executable, _, outputs = run(computation, np.array([1.5, 9, 2, 0]), 3.0)
    failure = executable.check(outputs)
    assert isinstance(failure, ComputationError)
    assert "9.0 is too large, 1.5" in str(failure)
    assert "cases.py" in failure.where
    assert executable.check(run(computation, np.ones(4), 3.0)[2]) is None


def test_checks_of_functions_with_callbacks_are_numbered_where_they_run():
    def both(x):
        return jax.pure_callback(np.sin, x, cases.guarded(x, 3.0))

    computation = computation_of(both, np.ones(4, np.float32))
    # Other traces in between make the numbers of this process differ.
    computation_of(cases.guarded, np.ones(5, np.float32), 3.0)
    executable, _, outputs = run(computation, np.full(4, 9.0))
    assert "9.0 is too large" in str(executable.check(outputs))


def test_an_error_of_a_callback_keeps_the_users_line():
    computation = computation_of(cases.raises_on_host, np.ones(4, np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such row") as raised:
        jax.block_until_ready(run(computation, np.ones(4))[2])
    failure = run_failure(computation.name, raised.value)
    assert "'raises_on_host' failed while it ran" in str(failure)
    assert "LookupError: no such row" in str(failure)
    assert "the user's line" in failure.where


def test_other_errors_of_a_run_are_told_as_they_are():
    failure = run_failure("f", RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore"))
    assert "RESOURCE_EXHAUSTED: out of memory" in str(failure)
    assert failure.where == ""


def test_threads_that_ask_for_one_executable_compile_it_once():
    num_traced = []

    def counted(x):
        return jax.pure_callback(np.sin, x, x)

    computation = computation_of(counted, np.ones(4, np.float32))
    executables = Executables()
    devices = jax.devices()[:1]
    assert executables.find(computation, devices) is None
    barrier = threading.Barrier(4)

    def ask(_):
        barrier.wait()
        num_traced.append(1)
        return executables.load(computation, devices)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    assert len(set(map(id, found))) == 1
    assert executables.find(computation, devices) is found[0]
    executables.forget(computation.identity)
    assert executables.find(computation, devices) is None


def test_an_executable_that_failed_is_tried_again():
    computation = computation_of(jnp.sin, np.ones(4, np.float32))
    executables = Executables()
    for _ in range(2):
        with pytest.raises(PlacementError, match="got 0 devices; expected 1"):
            executables.load(computation, ())
    assert executables.find(computation, ()) is None


def test_code_that_needs_a_missing_module_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gone_tomorrow.py").write_text("def on_host(x):\n    return x\n")
    with monkeypatch.context() as today:
        today.syspath_prepend(tmp_path)
        module = importlib.import_module("gone_tomorrow")
        computation = computation_of(
            lambda x: jax.pure_callback(module.on_host, x, x), np.ones(4, np.float32)
        )
    monkeypatch.delitem(sys.modules, "gone_tomorrow")
    with pytest.raises(ShippingError, match="No module named 'gone_tomorrow'"):
        load(computation, jax.devices()[:1])


def test_linear_algebra_travels_too():
    square = np.diag([1.0, 2.0, 3.0]).astype(np.float32)
    _, _, outputs = run(computation_of(jnp.linalg.eig, square), square)
    assert set(to_host(outputs[0])) == {1, 2, 3}


def test_what_xla_refuses_is_told_with_the_name():
    def unknown(x):
        return jax.ffi.ffi_call("no_such_target", x)(x)

    computation = computation_of(unknown, np.ones(4, np.float32))
    with pytest.raises(TraceError, match="'unknown' cannot be compiled"):
        load(computation, jax.devices()[:1])
