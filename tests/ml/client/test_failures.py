"""What is left of clients and calls when workers or programs die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.runtime.test_processes import is_alive
from timelyml.errors import BufferLostError, RunStoppedError
from timelyml.ml.client import local
from timelyml.ml.functions import jit
from timelyml.ml.programs import program
from timelyml.testing.leftovers import Leftovers, eventually

TIMEOUT_S = 60.0
SILENCE_S = 60.0  # in which a worker that is gone would be noticed at the latest
SOON_S = 20.0  # long before that


def process_of(client, worker):
    controller = client._link._cluster._session.controller
    return controller.membership.members[worker].process_id


def started_gate(directory):
    """A function that says that it runs, and ends when a file is there."""

    def wait(x):
        (directory / "started").touch()
        while not (directory / "go").exists():
            threading.Event().wait(0.002)
        return np.asarray(x)

    def f(x):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return f


def test_a_killed_worker_takes_its_island_with_it_and_no_other(tmp_path):
    options = {"islands": 2, "devices_per_island": 2}
    with local(**options, heartbeat_timeout_s=SILENCE_S) as client:
        here = client.slice({"data": 2}, island="island-0")
        there = client.slice({"data": 2}, island="island-1")
        x = client.put(np.ones(4, np.float32), here.sharding(P("data")))
        slow = jit(started_gate(tmp_path), slice=here)(x)
        moved = jit(lambda x: x + 1, slice=there)(slow)
        double = jit(lambda x: x * 2, slice=there)
        y = double(np.ones(4, np.float32))
        assert eventually((tmp_path / "started").exists, TIMEOUT_S)

        os.kill(process_of(client, 0), signal.SIGKILL)
        killed = time.monotonic()
        for lost in (slow, x):
            with pytest.raises(BufferLostError, match=r"float32\[4\].*'island-0'") as e:
                lost.result(timeout_s=TIMEOUT_S)
            assert "was killed by SIGKILL" in str(e.value)
        # Who waits for the rows may notice first that their sender is gone.
        with pytest.raises(
            BufferLostError, match=r"float32\[4\].*'island-0'.* worker 0 .* SIGKILL"
        ):
            moved.result(timeout_s=TIMEOUT_S)
        assert time.monotonic() - killed < SOON_S

        np.testing.assert_array_equal(double(y), np.full(4, 4.0))
        again = jit(lambda x: x - x.mean(), slice=here)(np.arange(2, dtype=np.float32))
        np.testing.assert_array_equal(again.result(TIMEOUT_S), [-0.5, 0.5])
        assert {host for host, _ in here.devices} == {2}
        assert client.slice({"data": 2}, island="island-0").island == "island-0"


def test_a_program_goes_on_where_it_can_when_an_island_dies_under_it(tmp_path):
    with local(islands=2, devices_per_island=1) as client:
        here = client.slice({"data": 1}, island="island-0")
        there = client.slice({"data": 1}, island="island-1")
        slow = jit(started_gate(tmp_path), slice=here)
        add, double = (
            jit(lambda x: x + 1, slice=here),
            jit(lambda x: x * 2, slice=there),
        )

        @program
        def f(x, y):
            waited = slow(x)
            moved = double(y)
            return add(waited), add(moved), double(waited), double(moved)

        x = np.ones(2, np.float32)
        alone, needs_it, on_it, on_it_too = f(x, x)
        assert eventually((tmp_path / "started").exists, TIMEOUT_S)
        os.kill(process_of(client, 1), signal.SIGKILL)
        for each in (on_it, on_it_too):
            with pytest.raises(BufferLostError, match="'island-1'"):
                each.result(timeout_s=TIMEOUT_S)
        (tmp_path / "go").touch()

        np.testing.assert_array_equal(alone.result(TIMEOUT_S), [2.0, 2.0])
        try:  # what was moved in time is there
            np.testing.assert_array_equal(needs_it.result(TIMEOUT_S), [3.0, 3.0])
        except BufferLostError as error:
            assert "island-1" in str(error) or "worker 1" in str(error)  # noqa: PT017
        for each, expected in zip(f(x, x), (2.0, 3.0, 2.0, 4.0), strict=True):
            np.testing.assert_array_equal(each.result(TIMEOUT_S), [expected] * 2)


def test_nothing_is_left_after_the_end_of_a_client():
    before = Leftovers.now()
    with local(islands=2, devices_per_island=1) as client:
        slice_ = client.slice({"data": 1})
        x = jit(lambda x: x + 1, slice=slice_)(np.float32(1))
        assert float(x) == 2.0
        workers = [process_of(client, worker) for worker in range(2)]
    before.check_gone()

    assert not any(map(is_alive, workers))
    with pytest.raises(RunStoppedError, match="closed"):
        np.asarray(jit(lambda x: x, slice=slice_)(x))


PROGRAM = """
import os, signal, sys
import numpy as np
from timelyml.ml.client import local
from timelyml.ml.functions import jit

if __name__ == "__main__":
    client = local(islands=1, devices_per_island=2)
    slice_ = client.slice({"data": 2})
    x = jit(lambda x: x + 1, slice=slice_)(np.ones(2, np.float32))
    assert x.result()[0] == 2.0
    members = client._link._cluster._session.controller.membership.members
    print(members[0].process_id, flush=True)
    END
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_a_program_that_ends_without_closing_leaves_no_process(tmp_path, end, code):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("END", end))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    found = subprocess.run(
        [sys.executable, str(path)],
        check=False,
        env=environment,
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
    )
    worker = int(found.stdout)

    assert found.returncode == code
    assert eventually(lambda: not is_alive(worker), SOON_S)


@pytest.mark.parametrize("num_devices", [3, 16])
def test_collectives_neither_hang_nor_abort_however_many_are_under_way(num_devices):
    with local(devices_per_island=num_devices) as client:
        slice_ = client.slice({"data": num_devices})
        share = jit(lambda x: x - x.mean(), slice=slice_, out_shardings=P("data"))
        x = client.put(
            np.arange(2.0 * num_devices, dtype=np.float32), slice_.sharding(P("data"))
        )
        independent = [share(x) for _ in range(100)]
        chained = x
        for _ in range(100):
            chained = share(chained)
        expected = np.arange(2.0 * num_devices) - (2 * num_devices - 1) / 2

        for each in (*independent, chained):
            np.testing.assert_allclose(each, expected, rtol=1e-6)
