"""Pictures of timelines, as text, as data and as a file."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ml.pipeline.cases import schedules, unhurried
from timelyml.ml.pipeline import (
    Action,
    Costs,
    Span,
    Timeline,
    bars,
    draw,
    one_f_one_b,
    simulate,
    text_chart,
    zb_h1,
    zbv,
)


def test_a_chart_of_1f1b():
    assert text_chart(simulate(one_f_one_b(2, 3))) == (
        "rank 0 |F0 F1 ......B0--- F2 B1--- ...B2--- |\n"
        "rank 1 |...F0 B0--- F1 B1--- F2 B2--- ......|\n"
    )


def test_a_chart_names_stages_where_a_rank_holds_several():
    assert text_chart(simulate(zbv(2, 1))) == (
        "rank 0 |0F0 ........3F0 3I0 3W0 ........0I0 0W0 |\n"
        "rank 1 |....1F0 2F0 ........2I0 2W0 1I0 1W0 ....|\n"
    )


def test_in_a_narrow_chart_letters_stand_for_labels_that_do_not_fit():
    chart = text_chart(simulate(zb_h1(2, 2)), width=7)
    assert chart == "rank 0 |FF.IWIW|\nrank 1 |.FIFIWW|\n"
    wide = text_chart(simulate(zbv(2, 1)), width=20)
    assert wide.startswith("rank 0 |FF....FFIIWW....IIWW|\n")


def test_a_chart_starts_where_the_work_starts():
    spans = tuple(
        Span(0, Action.parse(name), 100.0 + start, 100.5 + start)
        for start, name in enumerate(["0F0", "0B0"])
    )
    assert text_chart(Timeline(1, spans)) == "rank 0 |F0 ...B0 |\n"


def test_a_chart_of_nothing_has_its_ranks():
    assert text_chart(Timeline(2, ())) == "rank 0 ||\nrank 1 ||\n"


@unhurried
@given(schedules(), st.integers(1, 120), st.integers(0, 3))
def test_every_line_of_a_chart_is_as_wide_as_asked(plan, width, weight):
    chart = text_chart(simulate(plan, Costs(weight=weight)), width=width)
    lines = chart.splitlines()
    assert len(lines) == plan.num_ranks
    assert {len(line.split("|")[1]) for line in lines} == {width}


def test_a_chart_is_never_wider_than_a_screen_can_scroll():
    spans = (
        Span(0, Action.parse("0F0"), 0, 1e-6),
        Span(0, Action.parse("0B0"), 1e-6, 10),
    )
    assert len(text_chart(Timeline(1, spans))) < 420


def test_bars_are_plain_data():
    timeline = simulate(one_f_one_b(2, 1))
    assert json.loads(json.dumps(bars(timeline)))[2] == {
        "rank": 1,
        "start": 1,
        "end": 2,
        "stage": 1,
        "op": "F",
        "microbatch": 0,
        "label": "F0",
    }
    assert len(bars(timeline)) == 4


def test_a_picture_is_saved(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "zbv.svg"
    draw(simulate(zbv(3, 5)), path, title="ZB-V")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<?xml")
    draw(Timeline(1, ()), tmp_path / "empty.png")
