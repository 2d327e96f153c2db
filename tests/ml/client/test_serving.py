"""Clients of other programs: they come and go, and harm nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.ml.client.test_failures import SOON_S, TIMEOUT_S
from timelyml import ml
from timelyml.errors import ConfigError, PeerError
from timelyml.ml.store import NOBODY
from timelyml.testing.leftovers import Leftovers, eventually

CLIENT = """
import os, signal, sys
import numpy as np
from jax.sharding import PartitionSpec as P
from timelyml import ml

client = ml.connect(sys.argv[1], key=(sys.argv[2:] or [None])[0])
s = client.slice({"x": 2})
x = client.put(np.arange(50_000, dtype=np.float32), s.sharding(P("x")))
f = ml.jit(lambda x: (x + 1, x.sum()), slice=s)
for _ in range(20):
    x, total = f(x)
print(int(np.asarray(x)[0]), flush=True)
sys.stdin.readline()
END
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    before = Leftovers.now()
    path = tmp_path_factory.mktemp("server") / "address"
    with ml.serve(path, devices_per_island=2) as server:
        yield server
    before.check_gone(sockets=False)


def start(server, end="client.close()", *, is_remote=False, num_devices=2):
    code = CLIENT.replace("END", end).replace('"x": 2', f'"x": {num_devices}')
    where = [server.path] if not is_remote else [server.address, server.key_path]
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, where)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def core_of(server):
    return server._gates[0]._service._core


@pytest.mark.parametrize(
    "end", ["client.close()", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_what_a_client_had_goes_with_it_however_it_ends(server, end):
    with ml.connect(server.path) as mine:
        slice_ = mine.slice({"x": 2})
        x = mine.put(np.ones(4, np.float32), slice_.sharding(P("x")))
        theirs = start(server, end)
        assert theirs.stdout.readline() == "20\n"
        core = core_of(server)
        entries = core.buffers.directory.entries()
        (other,) = {entry.client for entry in entries} - {mine._number, NOBODY}
        assert core.buffers.directory.of_client(other)

        theirs.communicate("\n", timeout=TIMEOUT_S)
        assert theirs.returncode == (-signal.SIGKILL if "KILL" in end else 0)
        assert eventually(lambda: not core.buffers.directory.of_client(other), SOON_S)
        assert eventually(lambda: core.slices == [slice_.name], SOON_S)
        step = ml.jit(lambda x: x * 2, slice=slice_)
        np.testing.assert_array_equal(step(x), np.full(4, 2.0))
    assert eventually(lambda: server.num_clients == 0, SOON_S)


def test_many_clients_at_once_get_their_own_numbers(server):
    clients = [ml.connect(server.path) for _ in range(6)]
    handles = []
    for number, client in enumerate(clients):
        slice_ = client.slice({"x": 2})
        step = ml.jit(lambda x, n: x + n.sum() / 2, slice=slice_)
        x = n = client.put(
            np.full(2, float(number), np.float32), slice_.sharding(P("x"))
        )
        for _ in range(30):
            x = step(x, n)
        handles.append(x)
    for number, x in enumerate(handles):
        np.testing.assert_array_equal(x, np.full(2, number * 31.0))
    for client in clients:
        client.close()
    with pytest.raises(PeerError, match="the client was closed"):
        clients[0].slice({"x": 1})


def test_the_file_of_a_server_is_for_its_user_only(server):
    assert server.path.stat().st_mode & 0o777 == 0o600


def test_clients_hear_of_the_end_of_their_server(tmp_path):
    server = ml.serve(tmp_path / "address")
    client = ml.connect(server.path)
    slice_ = client.slice({"x": 1})
    server.close()

    with pytest.raises(Exception, match=r"closed|gone"):
        np.asarray(ml.jit(lambda x: x, slice=slice_)(np.ones(1)))
    client.close()
    with pytest.raises(ConfigError, match="cannot connect; got"):
        ml.connect(server.path)


def test_the_command_serves_until_it_is_told_to_end(tmp_path):
    path = tmp_path / "address"
    command = [sys.executable, "-m", "timelyml", "serve", str(path)]
    served = subprocess.Popen(
        [*command, "--devices-per-island", "2"], stderr=subprocess.PIPE, text=True
    )
    assert served.stderr.readline() == f"serving at {path}\n"
    with ml.connect(path) as client:
        slice_ = client.slice({"x": 2})
        f = ml.jit(lambda x: x + 1, slice=slice_)
        np.testing.assert_array_equal(f(np.ones(2, np.float32)), [2.0, 2.0])
        served.send_signal(signal.SIGTERM)
        served.communicate(timeout=TIMEOUT_S)
        assert served.returncode == 0
        with pytest.raises(Exception, match=r"closed|gone"):
            client.slice({"x": 2})
    assert not path.exists()
