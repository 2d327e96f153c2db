"""A client reads what devices did: launches and transfers of real workers, on one clock."""

from __future__ import annotations

import time

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from timelyml import ml
from timelyml.errors import ConfigError

PACE_S = 0.02
SOON_S = 10.0
"""A launch begins a moment before its devices do; longer if others take the core."""


@pytest.fixture(scope="module")
def client():
    with ml.local(
        islands=2,
        devices_per_island=2,
        hosts_per_island=2,
        paced_s={"make": PACE_S, "take": PACE_S / 2},
    ) as client:
        yield client


def functions(client):
    def make(x):
        return x + 1

    def take(x):
        return x * 2

    one, other = (client.slice({"x": 2}, island=f"island-{n}") for n in (0, 1))
    return (
        ml.jit(make, slice=one, in_shardings=P("x"), out_shardings=P("x")),
        ml.jit(take, slice=other, in_shardings=P("x"), out_shardings=P("x")),
        client.put(np.zeros((4, 512), np.float32), one.sharding(P("x"))),
    )


def test_launches_and_transfers_have_their_place_and_time(client):
    make, take, x = functions(client)
    take(make(x)).block_until_ready()
    before_s = time.monotonic()
    with client.resources.trace() as trace:
        y = make(x)
        z = take(y).block_until_ready()
    after_s = time.monotonic()

    made = [each for each in trace.launches if y.buffer in each.results]
    took = [each for each in trace.launches if z.buffer in each.results]
    assert [each.name for each in (*made, *took)] == ["make"] * 2 + ["take"] * 2
    assert {each.island for each in made} == {"island-0"}
    assert {each.island for each in took} == {"island-1"}
    assert len({each.host for each in trace.launches}) == 4, "a span for each process"
    for spans, pace_s in ((made, PACE_S), (took, PACE_S / 2)):
        for each in spans:
            assert pace_s <= each.ended_s - each.began_s < pace_s + SOON_S
    moves = [each for each in trace.transfers if each.island == "island-1"]
    assert sum(each.size_bytes for each in moves) == x.nbytes, "each element once"
    assert before_s <= min(each.began_s for each in made)
    assert max(each.ended_s for each in took) <= after_s
    for move in moves:
        (sender,) = [each for each in made if each.host == move.source]
        (receiver,) = [each for each in took if each.host == move.host]
        assert sender.ended_s <= move.began_s <= move.ended_s <= receiver.began_s
    assert (trace.num_left_out, trace.clock_error_s) == (0, 0)


def test_a_program_is_traced_by_its_blocks_and_the_results_they_make(client):
    make, take, x = functions(client)

    @ml.program
    def both(x):
        y = make(x)
        return y, take(make(y))

    with client.resources.trace() as trace:
        y, z = both(x)
        z.block_until_ready()
        y.block_until_ready()

    made = [each for each in trace.launches if y.buffer in each.results]
    took = [each for each in trace.launches if z.buffer in each.results]
    assert {each.name for each in made} == {"make"}
    assert {each.name for each in took} == {"take"}
    assert min(each.began_s for each in took) >= max(each.ended_s for each in made)


def test_what_fails_inside_is_what_is_raised(client):
    mine = pytest.raises(ZeroDivisionError, match="mine")
    with mine, client.resources.trace() as trace:
        raise ZeroDivisionError("mine")
    assert trace.launches == ()


def test_the_end_of_a_trace_that_was_not_begun_is_refused(client):
    trace = client.resources.trace()
    for _ in range(2):
        with pytest.raises(ConfigError, match="got the end of one that was not begun"):
            trace.__exit__(None, None, None)
        with trace:  # and one that is over
            pass


def test_other_clients_are_seen_too(client):
    with client.another() as other:
        make, _, x = functions(other)
        with client.resources.trace() as trace:
            y = make(x).block_until_ready()
        assert {each.client for each in trace.launches} == {y.buffer >> 40}
