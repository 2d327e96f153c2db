"""Clients share values by names, and see what there is; nothing is left of the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

from tests.ml.client.test_failures import SOON_S, TIMEOUT_S
from tests.ml.client.test_local import gated
from tests.ml.client.test_memory import MIB, ledger_of, live_bytes_on_worker
from timelyml import ml
from timelyml.cli import app
from timelyml.errors import DeadlineError
from timelyml.testing.leftovers import Leftovers, eventually

ROOT = str(Path(__file__).parents[3])


class Weights(NamedTuple):
    kernel: Any
    bias: Any


CLIENT = """
import os, signal, sys
import numpy as np
from jax.sharding import PartitionSpec as P
from timelyml import ml

client = ml.connect(sys.argv[1])
s = client.slice({"x": 2})
put = lambda value: client.put(np.full(1 << 20, value, np.float32), s.sharding(P("x")))
own = [put(value) for value in range(3)]
shown = ml.jit(lambda x: x + 1, slice=s, out_shardings=P("x"))(own[2])
client.publish("shown", {"x": shown})
for each in own:
    each.block_until_ready()
np.asarray(shown)
print(client._number, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    before = Leftovers.now()
    path = tmp_path_factory.mktemp("server") / "address"
    room = 6 * MIB + (1 << 16)  # for three values of 4 MiB, and for what counts them
    with ml.serve(path, devices_per_island=2, memory_bytes_per_device=room) as server:
        yield server
    before.check_gone(sockets=False)


@pytest.fixture
def clients(server):
    with ml.connect(server.path) as one, ml.connect(server.path) as other:
        yield one, other


def made_by(number, client):
    """What a client sees of all that another made."""
    return [each for each in client.objects() if each.name.startswith(f"{number}/")]


def test_all_of_a_killed_client_is_gone_but_what_it_published(server):
    with ml.connect(server.path) as mine:
        before = live_bytes_on_worker(mine)
        killed = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(server.path)],
            env={**os.environ, "PYTHONPATH": ROOT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        theirs = int(killed.stdout.readline())
        # Four values of 2 MiB on each device, which has room for three.
        states = made_by(theirs, mine)
        assert sum(each.host_bytes for each in states) == 4 * MIB
        assert sum(each.device_bytes for each in states) == 12 * MIB
        assert live_bytes_on_worker(mine) - before >= 12 * MIB

        killed.communicate("\n", timeout=TIMEOUT_S)
        assert killed.returncode == -signal.SIGKILL
        assert eventually(lambda: len(made_by(theirs, mine)) == 1, SOON_S)
        (left,) = made_by(theirs, mine)
        assert (left.owner, left.names, left.num_references) == (None, ("shown",), 1)
        used = ledger_of(server).used_bytes()
        assert set(used.values()) == {2 * MIB}
        assert set(ledger_of(server).host_bytes().values()) == {0}
        assert eventually(lambda: live_bytes_on_worker(mine) - before < 5 * MIB, SOON_S)
        opened = mine.open("shown")
        np.testing.assert_array_equal(opened["x"], np.full(1 << 20, 3, np.float32))
        mine.unpublish("shown")
        del opened
        assert mine.objects() == ()


def test_what_one_client_publishes_another_computes_with(clients):
    one, other = clients
    s, t = one.slice({"x": 2}), other.slice({"x": 2})
    kernel = one.put(np.arange(8, dtype=np.float32), s.sharding(P("x")))
    bias = ml.jit(lambda x: x.sum(), slice=s)(kernel)
    one.publish("model", [Weights(kernel, bias), {"again": kernel}])

    (weights, rest) = other.open("model")
    assert isinstance(weights, Weights)
    assert rest["again"] is weights.kernel
    assert weights.kernel.sharding.spec == P("x")
    total = ml.jit(lambda w, b: w.sum() + b, slice=t)(weights.kernel, weights.bias)
    assert float(total) == 56.0
    del kernel, bias
    one.unpublish("model")
    assert eventually(
        lambda: {each.owner for each in other.objects()} == {other._number}, SOON_S
    )
    np.testing.assert_array_equal(weights.kernel, np.arange(8))
    del weights, rest, total
    assert eventually(lambda: other.objects() == (), SOON_S)


def test_who_opens_a_value_hears_when_it_is_there_or_why_it_never_will_be(
    clients, tmp_path
):
    one, other = clients
    s = one.slice({"x": 1})
    slow = ml.jit(gated(tmp_path / "go"), slice=s)(np.float32(4))
    failed = ml.jit(lambda x: jnp.tile(x, 3), slice=s)(np.ones(MIB, np.float32))
    one.publish("later", (slow, failed))
    opened, never = other.open("later")
    assert not opened.is_ready()
    (tmp_path / "go").touch()

    with pytest.raises(ml.MemoryLimitError, match="can never fit"):
        never.block_until_ready()
    opened.block_until_ready()
    assert float(opened) == 4.0
    one.unpublish("later")


def test_a_client_waits_for_a_name_as_long_as_it_likes(clients):
    one, other = clients
    s = one.slice({"x": 1})
    x = one.put(np.float32(7), s.sharding())
    with pytest.raises(ml.HandleError, match="'soon' is not published"):
        other.open("soon")
    with pytest.raises(
        DeadlineError, match=r"'soon' was not published in time.*0\.05 s"
    ):
        other.open("soon", timeout_s=0.05)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(other.open("soon", timeout_s=None))
    )
    thread.start()
    one.publish("soon", x)
    thread.join(TIMEOUT_S)
    assert float(found[0]) == 7.0

    with pytest.raises(ml.HandleError, match="'soon' is published already"):
        other.publish("soon", found[0])
    one.unpublish("soon")
    with pytest.raises(ml.HandleError, match="'soon' is not published"):
        one.unpublish("soon")
    with pytest.raises(ml.HandleError, match="a tree cannot be published; got array"):
        one.publish("array", {"x": np.ones(2)})
    with pytest.raises(ml.HandleError, match="expected handles of this client only"):
        one.publish("theirs", found)


def test_a_value_that_others_hold_is_copied_when_it_is_donated(clients):
    one, other = clients
    s, t = one.slice({"x": 2}), other.slice({"x": 2})
    step = {
        each: ml.jit(lambda x: x + 1, slice=each, donate_argnums=0) for each in (s, t)
    }
    x = kept = one.put(np.zeros(8, np.float32), s.sharding(P("x")))
    one.publish("x", x)
    for _ in range(3):
        theirs = other.open("x")
        mine = step[t](theirs)
        assert theirs.is_deleted()
        np.testing.assert_array_equal(mine, np.ones(8))
    stepped = step[s](x)
    assert kept.is_deleted()
    np.testing.assert_array_equal(stepped, np.ones(8))
    np.testing.assert_array_equal(other.open("x"), np.zeros(8))
    other.unpublish("x")


def test_a_value_opened_twice_stays_until_it_is_let_go_of_as_often(clients):
    one, other = clients
    s = one.slice({"x": 1})
    one.publish("x", one.put(np.float32(5), s.sharding()))
    first, second = other.open("x"), other.open("x")
    assert first is second
    one.unpublish("x")
    del first
    assert eventually(
        lambda: [each.num_references for each in other.objects()] == [1], SOON_S
    )
    assert float(second) == 5.0


def test_values_are_what_they_were_at_the_call_whatever_becomes_of_the_arrays(clients):
    one, _ = clients
    s = one.slice({"x": 2})
    add = ml.jit(lambda x, y: x + y, slice=s)
    host = np.arange(1 << 18, dtype=np.float32)
    device = jnp.arange(1 << 18, dtype=jnp.float32)
    put = one.put(host, s.sharding(P("x")))
    sums = [add(host, put), add(device, put), add(host[::-1], put)]
    host[:] = -1
    jax.jit(lambda x: x * 0, donate_argnums=0)(device).block_until_ready()

    expected = np.arange(1 << 18, dtype=np.float32)
    np.testing.assert_array_equal(put, expected)
    np.testing.assert_array_equal(sums[0], 2 * expected)
    np.testing.assert_array_equal(sums[1], 2 * expected)
    np.testing.assert_array_equal(sums[2], np.full(1 << 18, (1 << 18) - 1, np.float32))


def test_the_commands_list_values_and_what_clients_take(server, clients):
    one, _ = clients
    s = one.slice({"x": 2})
    x = one.put(np.ones((2, MIB // 4), np.float32), s.sharding(P("x")))
    y = ml.jit(lambda x: x.sum(), slice=s)(x)
    assert float(y) == MIB // 2
    one.publish("table", x)

    def lines_of(command):
        done = CliRunner().invoke(app, [command, str(server.path)])
        assert done.exit_code == 0
        return done.stdout.splitlines()

    _, line, other = lines_of("objects")
    for part in (
        "-", "table", "put", "ready", f"float32[2,{MIB // 4}]", "x", "island-0", "2.1 MB"
    ):  # fmt: skip
        assert part in line.split() or part in line
    assert f"client {one._number}" in other
    assert "output 0 of <lambda>" in other
    rows = {line.split("  ")[0]: line for line in lines_of("top")[1:]}
    assert "2.1 MB" in rows["none"]
    mine = next(each for each in one.usage() if each.client == one._number)
    assert mine.num_launches >= 1
    assert mine.device_s > 0
    assert f" {mine.num_launches} " in rows[f"client {one._number}"]
    (line,) = lines_of("hosts")[1:]
    assert line.startswith("worker 0")
    assert "island-0" in line
    one.unpublish("table")
    del x, y
