"""Paced devices: held for stated times, one computation after the other."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from timelyml import ml
from timelyml.errors import ConfigError
from timelyml.ml.hosts.paced import PacedExecutables


def loaded(name, times_s):
    def function(x):
        return x + 1

    function.__name__ = name
    slice_ = ml.OfflineClient().slice({"x": 1})
    call = ml.jit(function, slice=slice_).trace_call(np.zeros(3, np.float32))
    return PacedExecutables(times_s).load(call.computation, jax.devices()[:1])


def test_computations_hold_a_device_one_after_the_other():
    run = loaded("f", {"f": 10.0})
    (first,) = run(np.zeros(3, np.float32))
    (second,) = run(np.zeros(3, np.float32))
    assert not first.is_ready()
    assert second.ready_ns - first.ready_ns == 10_000_000_000


def test_a_computation_begins_once_its_argument_is_there():
    times_s = {"f": 10.0}
    (made,) = loaded("f", times_s)(np.zeros(3, np.float32))
    (taken,) = loaded("f", times_s)(made)  # on devices of its own, which are free
    assert taken.ready_ns - made.ready_ns == 10_000_000_000


def test_what_comes_is_zeros_of_the_right_type_in_its_time():
    (made,) = loaded("f", {"f": 0.01})(np.ones(3, np.float32))
    value = np.asarray(made)
    assert made.is_ready()
    np.testing.assert_array_equal(value, np.zeros(3, np.float32))


def test_a_function_without_a_time_is_refused():
    with pytest.raises(ConfigError, match="cannot run function 'g'; got times for"):
        loaded("g", {"f": 0.01})
