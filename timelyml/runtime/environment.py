"""The environment variables of a worker process, decided before numpy loads.

Pure: a mapping in, a mapping out. The launcher passes the result to the fresh
interpreter, since most of these are read once, when a library is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
# XLA's CPU client deadlocks on a collective with hardly more threads than devices. Twice
# as many and 8 never did, with 32 launches under way. Threads beyond take time from each
# other: with 16 for 4 devices on 2 cores, stages of a pipeline took 1.2 times as long.
MIN_XLA_THREADS = 8
SINGLE_CORE_FLAG = "--xla_cpu_multi_thread_eigen=false"
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
HASH_SEED = "0"


def worker_environment(
    base: Mapping[str, str],
    *,
    num_devices: int = 1,
    overrides: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment of a worker process, given the driver's own.

    One BLAS thread per process, JAX on the CPU unless another platform is set, a
    thread pool large enough for the collectives of `num_devices` virtual devices,
    and one core per XLA computation. All workers get the same seed for hashes, or
    `hash` of a string, as a key, would send equal records to different shards.
    `overrides` come last and win.

    >>> worker_environment({"XLA_FLAGS": "--a"})["XLA_FLAGS"]
    '--a --xla_cpu_multi_thread_eigen=false'
    """
    environment = dict(base)
    environment.update(dict.fromkeys(BLAS_THREADS, "1"))
    environment.setdefault("JAX_PLATFORMS", "cpu")
    if base.get("PYTHONHASHSEED", "random") in ("", "random"):
        environment["PYTHONHASHSEED"] = HASH_SEED
    environment["NPROC"] = str(_num_threads(base.get("NPROC", ""), num_devices))
    environment["XLA_FLAGS"] = _xla_flags(base.get("XLA_FLAGS", ""), num_devices)
    environment.update(overrides or {})
    return environment


def _num_threads(present: str, num_devices: int) -> int:
    wanted = max(MIN_XLA_THREADS, 2 * num_devices)
    return max(wanted, int(present)) if present.isdecimal() else wanted


def _xla_flags(present: str, num_devices: int) -> str:
    flags = present.split()
    if not any(flag.startswith("--xla_cpu_multi_thread_eigen=") for flag in flags):
        flags.append(SINGLE_CORE_FLAG)
    if num_devices > 1:
        flags = [flag for flag in flags if not flag.startswith(DEVICE_COUNT_FLAG)]
        flags.append(f"{DEVICE_COUNT_FLAG}={num_devices}")
    return " ".join(flags)
