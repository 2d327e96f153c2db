from __future__ import annotations

import pytest

from timelyml.runtime.environment import worker_environment


def test_a_worker_gets_one_blas_thread_and_the_cpu_whatever_the_driver_has():
    environment = worker_environment({"OMP_NUM_THREADS": "8", "HOME": "/home/me"})
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    assert [environment[name] for name in names] == ["1", "1", "1"]
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["HOME"] == "/home/me"


def test_a_platform_that_is_set_stays():
    assert worker_environment({"JAX_PLATFORMS": "cuda"})["JAX_PLATFORMS"] == "cuda"


@pytest.mark.parametrize(
    ("present", "expected"), [({}, "0"), ({"PYTHONHASHSEED": "random"}, "0")]
)
def test_workers_hash_alike(present, expected):
    assert worker_environment(present)["PYTHONHASHSEED"] == expected


def test_a_seed_of_hashes_that_is_set_stays():
    assert worker_environment({"PYTHONHASHSEED": "7"})["PYTHONHASHSEED"] == "7"


@pytest.mark.parametrize(
    ("present", "num_devices", "expected"),
    [("", 1, "8"), ("2", 1, "8"), ("64", 1, "64"), ("", 12, "24"), ("x", 1, "8")],
)
def test_xla_has_threads_enough_for_its_collectives(present, num_devices, expected):
    environment = worker_environment({"NPROC": present}, num_devices=num_devices)
    assert environment["NPROC"] == expected


def test_xla_flags_are_added_to_those_that_are_set():
    flags = worker_environment({"XLA_FLAGS": "--a=1"}, num_devices=2)["XLA_FLAGS"]
    assert flags.split() == [
        "--a=1",
        "--xla_cpu_multi_thread_eigen=false",
        "--xla_force_host_platform_device_count=2",
    ]


def test_a_flag_that_the_user_set_is_not_set_again():
    flags = "--xla_cpu_multi_thread_eigen=true"
    assert worker_environment({"XLA_FLAGS": flags})["XLA_FLAGS"] == flags


def test_overrides_win_and_the_base_is_not_changed():
    base = {"A": "1"}
    environment = worker_environment(base, overrides={"OMP_NUM_THREADS": "4"})
    assert environment["OMP_NUM_THREADS"] == "4"
    assert base == {"A": "1"}
