"""Where devices of an island stand, of what their platform tells, and who gets which."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from timelyml.errors import SliceError
from timelyml.ml.controller import AskSlice, Core, Refused, SliceGiven
from timelyml.ml.hosts.presence import Present, present_of
from timelyml.ml.resources.meshes import mesh_of
from timelyml.runtime.failure import unpack_error


def tpu(coords, core=0):
    """What JAX tells of a TPU."""
    return SimpleNamespace(
        platform="tpu", device_kind="TPU v4", coords=list(coords), core_on_chip=core
    )


def test_what_is_told_becomes_places_from_0_without_axes_on_which_all_are_the_same():
    told = [(x, 7, z, 0) for x in (4, 5) for z in (2, 3)]
    assert mesh_of(told) == list(itertools.product(range(2), range(2)))
    cores = [(x, 0, 0, core) for x in range(4) for core in range(2)]
    assert mesh_of(cores) == list(itertools.product(range(4), range(2)))


@pytest.mark.parametrize(
    "told",
    [
        [(), (), ()],  # nothing
        [(0, 0), (), (1, 0)],  # not of all
        [(0, 0), (1, 0), (1, 0)],  # the same of two
        [(0, 0), (1,), (2, 0)],  # of meshes of several ranks
        list(itertools.product(range(2), repeat=4)),  # of more axes than slices have
        [(3, 1, 0)],  # one that all axes are the same of
    ],
)
def test_devices_of_which_no_mesh_is_told_are_a_line(told):
    assert mesh_of(told) == [(number,) for number in range(len(told))]


def test_a_host_tells_where_tpus_are_and_what_is_stated_of_others():
    found = present_of([tpu((x, y, 0)) for x, y in np.ndindex(2, 2)])
    assert found.coordinates == ((0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0))
    plain = [SimpleNamespace(platform="cpu", device_kind="cpu")] * 2
    assert present_of(plain).coordinates == ()
    stated = present_of(plain, rank=1, num_hosts=3, mesh=(2, 3))
    assert stated.coordinates == ((0, 2), (1, 0))
    assert present_of(plain, mesh=(2, 3)).coordinates == (), "it has other devices now"


def island_of_tpus(at, num_hosts):
    """A controller of one island, whose hosts have the chips at these places."""
    core = Core({"a": range(num_hosts)})
    core.join(1)
    for host, own in enumerate(np.split(np.array(at), num_hosts)):
        told = tuple((*map(int, place), 0) for place in own)
        core.heard(host, Present("tpu", "TPU v4", len(told), told), 0.0)
    core.flush()
    return core


def ask(core, sizes):
    """Ask for neighbours; return their devices in the shape of the slice."""
    names = tuple("abc"[: len(sizes)])
    core.handle(1, AskSlice(1, names, sizes, timeout_s=0, is_adjacent=True), 0.0)
    (answer,) = [
        body
        for body in (getattr(each, "body", None) for each in core.flush())
        if isinstance(body, SliceGiven | Refused)
    ]
    if isinstance(answer, Refused):
        raise unpack_error(answer.error)
    return answer.devices


@pytest.mark.parametrize("sizes", [(8,), (2, 2), (4, 2), (2, 2, 2), (2, 4, 2)])
def test_neighbours_in_a_slice_of_tpus_are_one_step_apart_though_hosts_have_squares(
    sizes,
):
    squares = [  # as of a v4: each host has four chips of one layer of 4 x 2 x 2
        (x + i, y, z)
        for x, y in ((0, 0), (2, 0), (0, 1), (2, 1))
        for i, z in np.ndindex(2, 2)
    ]
    core = island_of_tpus(squares, 4)
    devices = ask(core, sizes)
    place = {(host, i): squares[4 * host + i] for host in range(4) for i in range(4)}
    grid = np.array([place[each] for each in devices]).reshape(*sizes, 3)
    for axis in range(len(sizes)):
        steps = np.abs(np.diff(grid, axis=axis)).sum(axis=-1)
        assert (steps == 1).all()


def test_a_square_that_no_mesh_of_an_island_has_is_refused():
    core = island_of_tpus([(x, 0, 0) for x in range(4)], 2)
    with pytest.raises(SliceError, match="never be given"):
        ask(core, (2, 2))
