"""Boxes of shards: what is cut, what is common, who sends what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyml.ml.functions import LogicalMesh
from timelyml.ml.hosts import HeldBox, boxes_by_device, cover

MESHES = [
    LogicalMesh(("x",), (1,)),
    LogicalMesh(("x",), (4,)),
    LogicalMesh(("x", "y"), (2, 3)),
    LogicalMesh(("x", "y", "z"), (2, 1, 2)),
]


def specs(mesh):
    """Any assignment of some axes to two dimensions."""
    axes = st.permutations(mesh.axis_names)
    cuts = st.tuples(st.integers(0, 3), st.integers(0, 3))

    def make(drawn):
        names, (first, second) = drawn
        parts = (tuple(names[:first]), tuple(names[first : first + second]))
        return tuple(part or None for part in parts)

    return st.tuples(axes, cuts).map(make)


@st.composite
def layouts(draw):
    mesh = draw(st.sampled_from(MESHES))
    hosts = draw(st.lists(st.integers(0, 3), min_size=mesh.size, max_size=mesh.size))
    boxes = boxes_by_device(mesh, draw(specs(mesh)), (12, 24))
    return [HeldBox(host, box) for host, box in zip(hosts, boxes, strict=True)]


@given(layouts())
def test_the_boxes_of_a_sharding_cover_the_array(layout):
    seen = np.zeros((12, 24), int)
    for box in {box for _, box in layout}:
        seen[tuple(slice(*each) for each in box)] += 1
    assert (seen == 1).all()


@given(layouts(), layouts())
def test_every_host_gets_each_element_that_it_wants_once_from_one_that_has_it(
    wanted, held
):
    array = np.arange(12 * 24).reshape(12, 24)
    got = {host: np.zeros((12, 24), int) for host, _ in wanted}
    for sender, (target, box) in cover(wanted, held):
        index = tuple(slice(*each) for each in box)
        got[target][index] += 1
        assert any(
            set(array[index].flat)
            <= set(array[tuple(slice(*each) for each in theirs)].flat)
            for host, theirs in held
            if host == sender
        )
    for host, seen in got.items():
        needed = np.zeros((12, 24), bool)
        for box in {box for owner, box in wanted if owner == host}:
            needed[tuple(slice(*each) for each in box)] = True
        np.testing.assert_array_equal(seen, needed.astype(int))


def test_what_a_host_has_itself_it_gets_from_nobody_else():
    layout = [HeldBox(host, ((0, 4),)) for host in (0, 1, 2)]
    assert cover(layout, layout) == [
        (host, HeldBox(host, ((0, 4),))) for host in range(3)
    ]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ((), [((0, 4), (0, 6))] * 4),
        (("x",), [((0, 2), (0, 6))] * 2 + [((2, 4), (0, 6))] * 2),
        ((("y", "x"),), [((i, i + 1), (0, 6)) for i in (0, 2, 1, 3)]),
        ((None, "y"), [((0, 4), (0, 3)), ((0, 4), (3, 6))] * 2),
    ],
)
def test_boxes_follow_the_row_major_order_of_the_mesh(spec, expected):
    assert boxes_by_device(LogicalMesh(("x", "y"), (2, 2)), spec, (4, 6)) == expected
