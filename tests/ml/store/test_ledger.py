"""Who gets device memory when, and what is spilled for whom."""

from __future__ import annotations

import pytest

from timelyml.errors import InvariantError
from timelyml.ml.functions import ArrayType
from timelyml.ml.store import (
    CLIENT_BITS,
    Admit,
    Buffer,
    Claim,
    Gauge,
    Label,
    Ledger,
    Refuse,
    Spill,
    Vacant,
)

ME = 1


def buffer(count, size_bytes, placement="all"):
    of = ArrayType((size_bytes,), "int8", 1)
    number = (ME << CLIENT_BITS) + count
    return Buffer(number, placement, of, (), size_bytes, size_bytes, f"x{count}")


def number_of(count):
    return buffer(count, 1).number


def ledger_of(capacity=100, host_bytes=None, **placements):
    ledger = Ledger()
    ledger.add_devices(["d0", "d1"], capacity)
    ledger.add_hosts(["h"], host_bytes)
    ledger.place("all", ["d0", "d1"], ["h"])
    for name, devices in placements.items():
        ledger.place(name, devices, ["h"])
    return ledger


def claim(program, *, reads=(), makes=(), scratch=0, donated=(), placement="all"):
    return Claim(
        ME,
        program,
        tuple(each.number for each in reads),
        tuple(each.number for each in donated),
        tuple(makes),
        {placement: scratch} if scratch else {},
    )


def put(ledger, each):
    """Let a value be there that nobody is using."""
    ledger.request(claim("put", makes=[each]))
    ledger.finished("put")


def test_a_program_is_admitted_by_its_peak_and_leaves_its_outputs():
    ledger = ledger_of()
    assert ledger.request(claim("p", makes=[buffer(1, 30)], scratch=70)) == [Admit("p")]
    assert ledger.used_bytes() == {"d0": 100, "d1": 100}
    ledger.finished("p")
    assert ledger.used_bytes() == {"d0": 30, "d1": 30}


def test_programs_wait_for_those_that_run_in_the_order_they_came():
    ledger = ledger_of()
    ledger.request(claim("first", scratch=60))
    assert ledger.request(claim("large", scratch=50)) == []
    assert ledger.request(claim("small", scratch=10)) == []  # would fit, but is later
    assert ledger.waiting() == {"large": "memory on all", "small": "memory on all"}
    assert ledger.finished("first") == [Admit("large"), Admit("small")]


def test_programs_on_other_devices_do_not_wait():
    ledger = ledger_of(left=["d0"], right=["d1"])
    ledger.request(claim("first", scratch=60, placement="left"))
    ledger.request(claim("second", scratch=60, placement="left"))
    (admitted,) = ledger.request(claim("third", scratch=60, placement="right"))
    assert admitted == Admit("third")


def test_idle_buffers_are_spilled_least_recently_used_first_and_no_more_than_needed():
    ledger = ledger_of()
    for number in range(4):
        put(ledger, buffer(number, 25))
    ledger.request(claim("use 0", reads=[buffer(0, 25)]))
    ledger.finished("use 0")
    effects = ledger.request(claim("p", scratch=40))
    assert effects == [Spill(buffer(1, 25)), Spill(buffer(2, 25))]
    assert ledger.spilled(number_of(1)) == []
    assert ledger.spilled(number_of(2)) == [Admit("p")]


def test_a_spilled_buffer_comes_back_when_it_is_read():
    ledger = ledger_of()
    put(ledger, buffer(1, 60))
    ledger.request(claim("p", scratch=60))
    ledger.spilled(number_of(1))
    assert ledger.request(claim("q", reads=[buffer(1, 60)])) == []
    assert ledger.finished("p") == [Admit("q", (buffer(1, 60),))]
    assert ledger.used_bytes() == {"d0": 60, "d1": 60}


def test_a_buffer_on_its_way_to_the_host_is_not_used_before_it_is_there():
    ledger = ledger_of()
    put(ledger, buffer(1, 60))
    (spill,) = ledger.request(claim("p", scratch=60))
    ledger.withdraw("p")
    assert ledger.request(claim("q", reads=[buffer(1, 60)])) == []
    assert ledger.spilled(spill.buffer.number) == [Admit("q", (spill.buffer,))]


def test_what_an_admitted_program_reads_is_not_spilled():
    ledger = ledger_of()
    put(ledger, buffer(1, 60))
    ledger.request(claim("p", reads=[buffer(1, 60)]))
    assert ledger.request(claim("q", scratch=60)) == []
    assert ledger.finished("p") == [Spill(buffer(1, 60))]


def test_a_program_may_read_what_a_waiting_one_will_make():
    ledger = ledger_of()
    ledger.request(claim("running", scratch=90))
    made = buffer(1, 20)
    ledger.request(claim("maker", makes=[made]))
    ledger.request(claim("reader", reads=[made], scratch=10))
    assert ledger.finished("running") == [Admit("maker"), Admit("reader")]


def test_donated_memory_is_the_programs_own():
    ledger = ledger_of()
    put(ledger, buffer(1, 60))
    step = claim(
        "step", reads=[buffer(1, 60)], donated=[buffer(1, 60)], makes=[buffer(2, 60)]
    )
    assert ledger.request(step) == [Admit("step")]
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
    held = ["1/1 (x1): int8[60], 60 bytes"] if where == "arguments" else []
    assert refused.error.holders == held
    assert "program p of client 1 can never fit" in str(refused.error)
    assert all(each in str(refused.error) for each in held)
    assert ledger.waiting() == {}


def test_needs_on_overlapping_placements_add_up():
    ledger = ledger_of(one=["d1"])
    both = Claim(ME, "p", scratch_bytes={"all": 60, "one": 60})
    (refused,) = ledger.request(both)
    assert refused.error.needed_bytes == 120


def test_a_buffer_that_nobody_wants_goes_when_its_last_program_ends():
    ledger = ledger_of()
    put(ledger, buffer(1, 60))
    ledger.request(claim("p", reads=[buffer(1, 60)]))
    ledger.free([number_of(1)])
    assert ledger.used_bytes()["d0"] == 60
    ledger.finished("p")
    assert ledger.used_bytes()["d0"] == 0


def test_a_buffer_that_a_waiting_program_will_read_is_not_let_go():
    ledger = ledger_of()
    put(ledger, buffer(1, 10))
    ledger.request(claim("running", scratch=80))
    ledger.request(claim("reader", reads=[buffer(1, 10)], scratch=50))
    ledger.free([number_of(1)])
    assert ledger.finished("running") == [Admit("reader")]
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
    assert ledger.hold("home") == [Spill(buffer(1, 10, "home"))]
    assert ledger.request(claim("q", scratch=1, placement="home")) == []
    assert ledger.spilled(number_of(1)) == []
    assert ledger.finished("p") == [Spill(buffer(2, 10, "home"))]
    with pytest.raises(InvariantError, match="cannot move"):
        ledger.move("home", ["d1"], ["h"])
    assert ledger.spilled(number_of(2)) == [Vacant("home")]
    assert ledger.move("home", ["d1"], ["h"]) == [Admit("q")]
    ledger.request(claim("r", reads=[buffer(1, 10, "home")]))
    assert ledger.used_bytes() == {"d0": 0, "d1": 11}


def test_what_lay_on_hosts_that_died_is_named_and_takes_nothing_any_more():
    ledger = ledger_of(home=["d0"])
    put(ledger, buffer(1, 50, "home"))
    ledger.request(claim("p", scratch=60, placement="home"))
    ledger.spilled(number_of(1))
    ledger.finished("p")
    put(ledger, buffer(2, 30, "home"))
    ledger.request(claim("running", makes=[buffer(3, 10, "home")]))
    assert sorted(ledger.lose("home")) == [number_of(1), number_of(2), number_of(3)]
    assert ledger.finished("running") == []
    assert ledger.used_bytes()["d0"] == ledger.host_bytes()["h"] == 0
    assert ledger.request(claim("late", scratch=1, placement="home")) == []
    assert ledger.withdraw("late") == []
    ledger.unplace("home")


def test_what_ends_by_itself_is_not_spilled_for():
    ledger = ledger_of()
    put(ledger, buffer(1, 40))
    ledger.request(claim("running", scratch=50))
    assert ledger.request(claim("next", scratch=50)) == []
    assert ledger.finished("running") == [Admit("next")]


def test_spilled_buffers_take_host_memory_until_they_return():
    ledger = ledger_of(host_bytes=70)
    put(ledger, buffer(1, 60))
    ledger.request(claim("p", scratch=60))
    assert ledger.host_bytes() == {"h": 60}
    assert ledger.where(number_of(1)) == (True, True)
    ledger.spilled(number_of(1))
    assert ledger.where(number_of(1)) == (False, True)
    ledger.finished("p")
    ledger.request(claim("q", reads=[buffer(1, 60)]))
    assert ledger.host_bytes() == {"h": 0}
    assert ledger.where(number_of(1)) == (True, False)


def test_what_finds_no_room_on_the_host_either_fails_naming_who_holds_memory():
    ledger = ledger_of(host_bytes=50)
    put(ledger, buffer(1, 60))
    put(ledger, buffer(2, 30))
    (refused,) = ledger.request(claim("p", scratch=80))[1:]
    assert isinstance(refused, Refuse)
    assert refused.error.holders == [str(buffer(1, 60)), str(buffer(2, 30))]
    assert "1/1 (x1): int8[60], 60 bytes" in str(refused.error)
    assert ledger.waiting() == {}


def test_a_program_that_the_host_has_no_room_for_waits_for_those_that_run():
    ledger = ledger_of(host_bytes=0)
    put(ledger, buffer(1, 30))
    ledger.request(claim("running", makes=[buffer(2, 30)]))
    assert ledger.request(claim("p", scratch=60)) == []
    ledger.free([number_of(2)])
    assert ledger.finished("running") == [Admit("p")]


def test_a_placement_with_buffers_cannot_be_forgotten():
    ledger = ledger_of(home=["d0"])
    put(ledger, buffer(1, 10, "home"))
    with pytest.raises(InvariantError, match=r"got buffers \['1/1 \(x1\): "):
        ledger.unplace("home")
    ledger.free([number_of(1)])
    ledger.unplace("home")


def test_a_slice_of_thousands_of_devices_costs_as_little_as_one():
    ledger = Ledger()
    devices = [f"d{index}" for index in range(4096)]
    ledger.add_devices(devices, 100)
    ledger.add_hosts(["h"], None)
    ledger.place("all", devices, ["h"])
    ledger.place("half", devices[:2048], ["h"])
    assert len(ledger._live.devices) == 2


def reserving(reserved_bytes=60, **options):
    """A ledger in whose two devices "own" keeps memory from all others."""
    ledger = ledger_of(**options)
    ledger.place("own", ["d0", "d1"], ["h"], reserved_bytes=reserved_bytes)
    return ledger


def test_what_a_placement_reserves_is_kept_from_values_of_others():
    ledger = reserving()
    put(ledger, buffer(1, 40))
    # All that others may have is 40: what is idle leaves, what is larger fails at once.
    assert ledger.request(claim("p", makes=[buffer(2, 30)])) == [Spill(buffer(1, 40))]
    (refused,) = ledger.request(claim("q", scratch=50))
    assert isinstance(refused, Refuse)
    assert "does not fit beside what is reserved (60 by slice 'own')" in str(
        refused.error
    )
    own = claim("own", makes=[buffer(3, 60, "own")], placement="own")
    assert ledger.request(own) == [Admit("own")]
    assert ledger.spilled(number_of(1)) == [Admit("p")]
    assert ledger.used_bytes() == {"d0": 90, "d1": 90}


def test_what_is_reserved_is_there_although_others_wait_in_line():
    ledger = reserving()
    ledger.request(claim("runs", scratch=40))
    assert ledger.request(claim("waits", scratch=40)) == []
    own = [claim(f"own {n}", scratch=30, placement="own") for n in range(3)]
    assert ledger.request(own[0]) == [Admit("own 0")]
    assert ledger.request(own[1]) == [Admit("own 1")]
    assert ledger.request(own[2]) == []  # it has used up what is its own
    assert ledger.finished("own 0") == [Admit("own 2")]
    assert ledger.finished("runs") == [Admit("waits")]


def test_what_others_have_when_memory_is_reserved_leaves_when_it_is_used():
    ledger = ledger_of()
    put(ledger, buffer(1, 70))
    ledger.place("own", ["d0"], ["h"], reserved_bytes=60)
    assert ledger.request(claim("fits", scratch=30, placement="own")) == [Admit("fits")]
    ledger.finished("fits")
    more = ledger.request(claim("more", scratch=60, placement="own"))
    assert more == [Spill(buffer(1, 70))]
    assert ledger.spilled(number_of(1)) == [Admit("more")]


def test_what_is_reserved_is_free_once_its_placement_is_gone_or_moves():
    ledger = reserving(reserved_bytes=50, host_bytes=0)
    put(ledger, buffer(1, 40))
    ledger.request(claim("own", scratch=50, placement="own"))
    (refused,) = ledger.request(claim("too late", scratch=50))
    assert isinstance(refused, Refuse), "its end will leave nothing to others"
    ledger.request(claim("runs", scratch=10))
    assert ledger.request(claim("waits", scratch=45)) == []
    ledger.hold("own")
    assert ledger.finished("own") == [Vacant("own"), Admit("waits")]
    ledger.finished("waits")
    ledger.move("own", ["d0", "d1"], ["h"])
    assert ledger.request(claim("waits", scratch=45)) == []
    assert ledger.unplace("own") == [Admit("waits")]


def test_a_gauge_counts_what_is_made_until_its_last_reader_is_over():
    ledger, gauge = ledger_of(), Gauge()
    x, y = buffer(1, 10), buffer(2, 30)
    ledger.count(x.number, Label(gauge, 4, 0))  # before anybody asks for its memory
    ledger.request(claim("f0", makes=[x]))
    ledger.request(claim("b0", reads=[x]))
    ledger.request(claim("f1", makes=[y]))
    ledger.count(y.number, Label(gauge, 4, 1))
    assert gauge.peaks() == {}, "memory is set aside, and nothing is there"
    ledger.finished("f0")
    ledger.free([x.number])
    ledger.finished("b0")
    ledger.finished("f1")
    assert gauge.peaks() == {4: (1, 30)}


def test_a_gauge_counts_a_value_that_is_read_when_the_next_one_is_made():
    ledger, gauge = ledger_of(), Gauge()
    x, y, z = buffer(1, 10), buffer(2, 30), buffer(3, 5)
    for item, each in enumerate((x, y)):
        put(ledger, each)
        ledger.count(each.number, Label(gauge, 0, item))
    ledger.free([x.number])
    put(ledger, z)
    ledger.count(z.number, Label(gauge, 0, 2))
    assert gauge.peaks() == {0: (2, 40)}


def test_a_gauge_does_not_count_what_is_spilled():
    ledger, gauge = ledger_of(50), Gauge()
    x, y = buffer(1, 30), buffer(2, 40)
    put(ledger, x)
    ledger.count(x.number, Label(gauge, 0, 0))
    assert ledger.request(claim("f", makes=[y])) == [Spill(x)]
    ledger.count(y.number, Label(gauge, 0, 1))
    ledger.spilled(x.number)
    ledger.finished("f")
    assert gauge.peaks() == {0: (1, 40)}
