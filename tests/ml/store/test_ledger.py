"""Who gets device memory when, and what is spilled for whom."""

from __future__ import annotations

import pytest

from timelyml.errors import InvariantError
from timelyml.ml.store import (
    Admit,
    Buffer,
    Claim,
    Handle,
    Ledger,
    Refuse,
    Spill,
    Vacant,
)


def buffer(number, size_bytes, placement="all"):
    return Buffer(Handle("me", number), placement, size_bytes, f"x{number}")


def ledger_of(capacity=100, **placements):
    ledger = Ledger()
    ledger.add_devices(["d0", "d1"], capacity)
    ledger.place("all", ["d0", "d1"])
    for name, devices in placements.items():
        ledger.place(name, devices)
    return ledger


def claim(program, *, reads=(), makes=(), scratch=0, donated=(), placement="all"):
    return Claim(
        "me",
        program,
        tuple(each.handle for each in reads),
        tuple(each.handle for each in donated),
        tuple(makes),
        {placement: scratch} if scratch else {},
    )


def put(ledger, each):
    """Let a value be there that nobody is using."""
    ledger.request(claim("put", makes=[each]))
    ledger.finished("put")


def test_a_program_is_admitted_by_its_peak_and_leaves_its_outputs():
    ledger = ledger_of()
    assert ledger.request(claim("p", makes=[buffer(1, 30)], scratch=70)) == [
        Admit("me", "p")
    ]
    assert ledger.used_bytes() == {"d0": 100, "d1": 100}
    ledger.finished("p")
    assert ledger.used_bytes() == {"d0": 30, "d1": 30}


def test_programs_wait_for_those_that_run_in_the_order_they_came():
    ledger = ledger_of()
    ledger.request(claim("first", scratch=60))
    assert ledger.request(claim("large", scratch=50)) == []
    assert ledger.request(claim("small", scratch=10)) == []  # would fit, but is later
    assert ledger.waiting() == {"large": "memory on all", "small": "memory on all"}
    assert ledger.finished("first") == [Admit("me", "large"), Admit("me", "small")]


def test_programs_on_other_devices_do_not_wait():
    ledger = ledger_of(left=["d0"], right=["d1"])
    ledger.request(claim("first", scratch=60, placement="left"))
    ledger.request(claim("second", scratch=60, placement="left"))
    (admitted,) = ledger.request(claim("third", scratch=60, placement="right"))
    assert admitted == Admit("me", "third")


def test_idle_buffers_are_spilled_least_recently_used_first_and_no_more_than_needed():
    ledger = ledger_of()
    for number in range(4):
        put(ledger, buffer(number, 25))
    ledger.request(claim("use 0", reads=[buffer(0, 25)]))
    ledger.finished("use 0")
    effects = ledger.request(claim("p", scratch=40))
    assert effects == [
        Spill(Handle("me", 1), "all"),
        Spill(Handle("me", 2), "all"),
    ]
    assert ledger.spilled(Handle("me", 1)) == []
    assert ledger.spilled(Handle("me", 2)) == [Admit("me", "p")]


def test_a_spilled_buffer_comes_back_when_it_is_read():
    ledger = ledger_of()
    put(ledger, buffer(1, 60))
    ledger.request(claim("p", scratch=60))
    ledger.spilled(Handle("me", 1))
    assert ledger.request(claim("q", reads=[buffer(1, 60)])) == []
    assert ledger.finished("p") == [Admit("me", "q", (Handle("me", 1),))]
    assert ledger.used_bytes() == {"d0": 60, "d1": 60}


def test_a_buffer_on_its_way_to_the_host_is_not_used_before_it_is_there():
    ledger = ledger_of()
    put(ledger, buffer(1, 60))
    (spill,) = ledger.request(claim("p", scratch=60))
    ledger.withdraw("p")
    assert ledger.request(claim("q", reads=[buffer(1, 60)])) == []
    assert ledger.spilled(spill.handle) == [Admit("me", "q", (spill.handle,))]


def test_what_an_admitted_program_reads_is_not_spilled():
    ledger = ledger_of()
    put(ledger, buffer(1, 60))
    ledger.request(claim("p", reads=[buffer(1, 60)]))
    assert ledger.request(claim("q", scratch=60)) == []
    assert ledger.finished("p") == [Spill(Handle("me", 1), "all")]


def test_a_program_may_read_what_a_waiting_one_will_make():
    ledger = ledger_of()
    ledger.request(claim("running", scratch=90))
    made = buffer(1, 20)
    ledger.request(claim("maker", makes=[made]))
    ledger.request(claim("reader", reads=[made], scratch=10))
    assert ledger.finished("running") == [Admit("me", "maker"), Admit("me", "reader")]


def test_donated_memory_is_the_programs_own():
    ledger = ledger_of()
    put(ledger, buffer(1, 60))
    step = claim(
        "step", reads=[buffer(1, 60)], donated=[buffer(1, 60)], makes=[buffer(2, 60)]
    )
    assert ledger.request(step) == [Admit("me", "step")]
    assert ledger.used_bytes() == {"d0": 60, "d1": 60}
    ledger.finished("step")
    assert ledger.used_bytes() == {"d0": 60, "d1": 60}


@pytest.mark.parametrize("where", ["scratch", "outputs", "arguments"])
def test_what_can_never_fit_is_refused_at_once_naming_what_holds_memory(where):
    ledger = ledger_of()
    put(ledger, buffer(1, 60))
    too_large = {
        "scratch": claim("p", scratch=101),
        "outputs": claim("p", makes=[buffer(2, 101)]),
        "arguments": claim("p", reads=[buffer(1, 60)], scratch=41),
    }[where]
    (refused,) = ledger.request(too_large)
    assert isinstance(refused, Refuse)
    assert refused.error.limit_bytes == 100
    assert refused.error.needed_bytes == 101
    assert refused.error.holders == (["me/1 (x1)"] if where == "arguments" else [])
    assert ledger.waiting() == {}


def test_needs_on_overlapping_placements_add_up():
    ledger = ledger_of(one=["d1"])
    both = Claim("me", "p", scratch_bytes={"all": 60, "one": 60})
    (refused,) = ledger.request(both)
    assert refused.error.needed_bytes == 120


def test_a_buffer_that_nobody_wants_goes_when_its_last_program_ends():
    ledger = ledger_of()
    put(ledger, buffer(1, 60))
    ledger.request(claim("p", reads=[buffer(1, 60)]))
    ledger.free(Handle("me", 1))
    assert ledger.used_bytes()["d0"] == 60
    ledger.finished("p")
    assert ledger.used_bytes()["d0"] == 0


def test_a_buffer_that_a_waiting_program_will_read_is_not_let_go():
    ledger = ledger_of()
    put(ledger, buffer(1, 10))
    ledger.request(claim("running", scratch=80))
    ledger.request(claim("reader", reads=[buffer(1, 10)], scratch=50))
    ledger.free(Handle("me", 1))
    assert ledger.finished("running") == [Admit("me", "reader")]
    ledger.finished("reader")
    assert ledger.used_bytes()["d0"] == 0


def test_what_a_failed_program_should_have_made_takes_no_memory():
    ledger = ledger_of()
    ledger.request(claim("p", makes=[buffer(1, 60)]))
    ledger.finished("p", has_failed=True)
    assert ledger.used_bytes()["d0"] == 0


def test_a_placement_moves_once_nothing_is_left_there():
    ledger = ledger_of(home=["d0"])
    put(ledger, buffer(1, 10, "home"))
    ledger.request(claim("p", makes=[buffer(2, 10, "home")], placement="home"))
    assert ledger.hold("home") == [Spill(Handle("me", 1), "home")]
    assert ledger.request(claim("q", scratch=1, placement="home")) == []
    assert ledger.spilled(Handle("me", 1)) == []
    assert ledger.finished("p") == [Spill(Handle("me", 2), "home")]
    with pytest.raises(InvariantError, match="cannot move"):
        ledger.move("home", ["d1"])
    assert ledger.spilled(Handle("me", 2)) == [Vacant("home")]
    assert ledger.move("home", ["d1"]) == [Admit("me", "q")]
    ledger.request(claim("r", reads=[buffer(1, 10, "home")]))
    assert ledger.used_bytes() == {"d0": 0, "d1": 11}


def test_what_was_only_on_dead_devices_is_named():
    ledger = ledger_of(home=["d0"])
    put(ledger, buffer(1, 50, "home"))
    ledger.request(claim("p", scratch=60, placement="home"))
    ledger.spilled(Handle("me", 1))
    ledger.finished("p")
    put(ledger, buffer(2, 30, "home"))
    ledger.request(claim("read", reads=[buffer(1, 50, "home")]))
    assert ledger.lose("home") == [Handle("me", 2)]
    assert ledger.used_bytes()["d0"] == 0
    ledger.move("home", ["d1"])
    assert ledger.request(claim("again", reads=[buffer(1, 50, "home")])) == [
        Admit("me", "again", (Handle("me", 1),))
    ]


def test_a_placement_with_buffers_cannot_be_forgotten():
    ledger = ledger_of(home=["d0"])
    put(ledger, buffer(1, 10, "home"))
    with pytest.raises(InvariantError, match=r"got buffers \['me/1 \(x1\)'\]"):
        ledger.unplace("home")
    ledger.free(Handle("me", 1))
    ledger.unplace("home")


def test_a_slice_of_thousands_of_devices_costs_as_little_as_one():
    ledger = Ledger()
    devices = [f"d{index}" for index in range(4096)]
    ledger.add_devices(devices, 100)
    ledger.place("all", devices)
    ledger.place("half", devices[:2048])
    assert len(ledger._accounts) == 2
