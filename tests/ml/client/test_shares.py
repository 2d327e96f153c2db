"""Device time of real workers goes by weight: Figure 9 in small, from the trace."""

from __future__ import annotations

import numpy as np
import pytest

from timelyml import ml

TIMES_S = {"a": 1.3e-3, "b": 4e-3, "c": 9.6e-3, "d": 2.4e-3}
SECONDS_S = 2.0  # of device time, all together
AT_LEAST_S = 1.5  # of it, in which everybody has something to run
TOLERANCE = 0.05  # as a part of the share
MEASUREMENTS = 3  # at most: others may take the cores, and calls are late to be ready


def named(name):
    number = ord(name)  # functions that compute the same are one

    def step(x):
        return x + number

    step.__name__ = name
    return step


def in_turn(client, name, num_calls):
    """Call a function again and again, each time with what it returned."""
    slice_ = client.slice({"x": 1})
    step = ml.jit(named(name), slice=slice_)
    x = step(client.put(np.float32(0), slice_.sharding())).block_until_ready()

    def call():
        nonlocal x
        for _ in range(num_calls):
            x = step(x)
            client.usage()  # hears what was said before: no two calls travel as one
        return x

    return call


def used_s(spans, began_s, ended_s):
    inside = (min(x.ended_s, ended_s) - max(x.began_s, began_s) for x in spans)
    return sum(max(0.0, each) for each in inside)


@pytest.fixture(scope="module")
def client():
    with ml.local(paced_s=TIMES_S, policy="share") as client:
        yield client


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 4, 8)])
def test_device_time_follows_weights_whatever_the_lengths(client, weights):
    shares = np.array(weights) / sum(weights)
    for _ in range(MEASUREMENTS):
        used = measured(client, weights)
        is_long = used.sum() >= AT_LEAST_S
        if is_long and np.allclose(used / used.sum(), shares, rtol=TOLERANCE, atol=0):
            break
    assert is_long
    np.testing.assert_allclose(used / used.sum(), shares, rtol=TOLERANCE)


def measured(client, weights):
    """Return the device time of clients of these weights while all of them have calls.

    All calls wait until the device is given back, so no client falls behind.
    """
    others = [client.another(weight=each) for each in weights]
    shares = [each / sum(weights) for each in weights]
    calls = [
        in_turn(other, name, round(SECONDS_S * share / length_s))
        for other, share, (name, length_s) in zip(
            others, shares, TIMES_S.items(), strict=True
        )
    ]
    (device,) = client.resources.devices()
    with client.resources.trace() as trace:
        client.resources.withdraw([device.name], force=True)
        results = [call() for call in calls]
        client.resources.restore([device.name])
        for x in results:
            x.block_until_ready()
    for other in others:
        other.close()

    mine = [
        [each for each in trace.launches if each.client == x.buffer >> 40]
        for x in results
    ]
    began_s = max(min(each.began_s for each in spans) for spans in mine)
    ended_s = min(max(each.ended_s for each in spans) for spans in mine)
    return np.array([used_s(spans, began_s, ended_s) for spans in mine])
