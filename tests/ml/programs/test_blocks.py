"""Blocks: what of a program is ordered as one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from timelyml.ml.programs.blocks import BLOCK_NS, MAX_BLOCK_LAUNCHES, cut
from timelyml.ml.scheduling import PlacedGang


@st.composite
def programs(draw):
    """Gangs on three slices of two islands, those that leave, and a bound."""
    gangs = []
    for index in range(draw(st.integers(1, 40))):
        slice_ = draw(st.sampled_from(["a", "b", "c"]))
        needs = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else ()
        estimate_ns = draw(st.integers(1, BLOCK_NS // 2))
        island = "west" if slice_ == "c" else "east"
        gangs.append(
            PlacedGang(
                island, "f", slice_, tuple(sorted(needs)), estimate_ns=estimate_ns
            )
        )
    leaving = {
        need
        for gang in gangs
        for need in gang.needs
        if gangs[need].placement != gang.placement
    }
    return gangs, leaving, draw(st.integers(1, MAX_BLOCK_LAUNCHES))


@given(programs())
def test_blocks_hold_every_gang_once_in_order_and_need_only_earlier_blocks(program):
    gangs, leaving, most = program
    blocks = cut(gangs, leaving, most)
    held = [gang for block in blocks for gang in block.gangs]
    assert sorted(held) == list(range(len(gangs)))
    block_of = {gang: i for i, block in enumerate(blocks) for gang in block.gangs}
    for number, block in enumerate(blocks):
        assert block.gangs == sorted(block.gangs)
        assert {gangs[each].placement for each in block.gangs} == {block.slice}
        assert all(needed < number for needed in block.needs)
        needs = {block_of[need] for each in block.gangs for need in gangs[each].needs}
        assert block.needs == needs - {number}


@given(programs())
def test_blocks_are_short_and_hold_up_nothing_that_could_go_or_leave(program):
    gangs, leaving, most = program
    for block in cut(gangs, leaving, most):
        assert len(block.gangs) <= most
        assert sum(gangs[each].estimate_ns for each in block.gangs) <= BLOCK_NS
        assert not leaving & set(block.gangs[:-1])
        first, *rest = block.gangs

        def arriving(gang):
            mine = gangs[gang].placement
            return {x for x in gangs[gang].needs if gangs[x].placement != mine}

        if not arriving(first):
            assert not any(map(arriving, rest))


def test_a_chain_on_one_slice_is_cut_into_as_few_blocks_as_may_be():
    gangs = [
        PlacedGang("east", "f", "a", (index - 1,) if index else (), estimate_ns=1000)
        for index in range(40)
    ]
    assert [len(each.gangs) for each in cut(gangs, ())] == [16, 16, 8]
    assert [each.needs for each in cut(gangs, ())] == [set(), {0}, {1}]
    assert [len(x.gangs) for x in cut(gangs, (), 128, max_ns=25_000)] == [25, 15]
