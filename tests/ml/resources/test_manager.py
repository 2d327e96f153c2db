"""What becomes of slices when they are asked for, and when devices come and go."""

from __future__ import annotations

import pytest

from tests.ml.resources.clusters import GIB, ask, manager_of, mesh, places_of
from timelyml.errors import SliceError
from timelyml.ml.resources import (
    Displaced,
    Freed,
    Granted,
    Prepare,
    Released,
    Remapped,
    SliceRequest,
    SliceState,
    TimedOut,
    Vacate,
)


def names(*indices, island="a"):
    return tuple(f"{island}/host0/device{index}" for index in indices)


def granted(manager, request):
    (effect,) = manager.request(request, 0.0)
    assert isinstance(effect, Granted)
    return effect.devices


def finish_move(manager, effects):
    """Answer what a move asks for until it is over; return all that followed."""
    found = []
    pending = list(effects)
    while pending:
        effect = pending.pop(0)
        found.append(effect)
        if isinstance(effect, Prepare):
            pending += manager.prepared(effect.slice, effect.ticket)
        elif isinstance(effect, Vacate):
            pending += manager.vacated(effect.slice, effect.ticket)
    return found


def test_slices_are_spread_over_devices_by_load():
    manager = manager_of(mesh(4))
    taken = [granted(manager, ask(f"s{i}", 2)) for i in range(4)]
    counts = [sum(name in each for each in taken) for name in names(0, 1, 2, 3)]
    assert counts == [2, 2, 2, 2]


def test_slices_are_spread_over_islands_too():
    manager = manager_of(mesh(2), mesh(2, island="b"))
    taken = [granted(manager, ask(f"s{i}", 2)) for i in range(2)]
    assert set(taken) == {names(0, 1), names(0, 1, island="b")}


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"sizes": (5,)}, "5 devices as {'x': 5} of any kind on any island"),
        ({"sizes": (1,), "kind": "gpu"}, "of kind 'gpu'"),
        ({"sizes": (1,), "island": "z"}, "on island 'z'"),
        ({"sizes": (1,), "memory_bytes": 2 * GIB}, "2,147,483,648 bytes reserved"),
        ({"sizes": (3,), "is_adjacent": True}, "neighbours"),
    ],
)
def test_what_can_never_be_given_is_refused_with_what_there_is(wish, why):
    manager = manager_of(mesh(2, 2))
    sizes = wish.pop("sizes")
    with pytest.raises(SliceError, match=why) as caught:
        manager.request(ask("s", *sizes, **wish), 0.0)
    assert caught.value.available == "island a: 4 of kind cpu with 1,024 MiB each"
    assert manager.slices() == ()


@pytest.mark.parametrize("shape", [(), (("x", 0),), (("x", 2), ("x", 2))])
def test_a_shape_that_is_none_is_refused(shape):
    with pytest.raises(SliceError, match="impossible shape"):
        SliceRequest("me", "s", shape)


def test_what_must_wait_waits_until_memory_is_free():
    manager = manager_of(mesh(2))
    granted(manager, ask("large", 2, memory_bytes=GIB))
    assert manager.request(ask("next", 1, memory_bytes=1), 0.0) == []
    assert manager.state("next") is SliceState.WAITING
    effects = manager.release("large")
    assert effects == [Released("me", "large"), Granted("me", "next", names(0))]


def test_slices_that_reserve_nothing_share_devices_at_once():
    manager = manager_of(mesh(2))
    granted(manager, ask("large", 2, memory_bytes=GIB))
    assert granted(manager, ask("small", 2)) == names(0, 1)


def test_slices_that_share_go_where_not_all_memory_is_reserved():
    manager = manager_of(mesh(2))
    (full,) = granted(manager, ask("large", 1, memory_bytes=GIB))
    for count in range(3):
        assert granted(manager, ask(f"small {count}", 1)) != (full,)


def test_a_request_waits_no_longer_than_its_client():
    manager = manager_of(mesh(1))
    granted(manager, ask("holder", 1, memory_bytes=GIB))
    assert manager.request(ask("late", 1, memory_bytes=1), 10.0, timeout_s=5.0) == []
    assert (manager.next_deadline(), manager.tick(14.9)) == (15.0, [])
    (effect,) = manager.tick(15.0)
    assert isinstance(effect, TimedOut)
    assert effect.error.holders == ["holder"]
    assert manager.next_deadline() is None
    with pytest.raises(SliceError, match="'late' is unknown"):
        manager.state("late")


def test_a_client_that_will_not_wait_is_told_at_once():
    manager = manager_of(mesh(1))
    granted(manager, ask("holder", 1, memory_bytes=GIB))
    (effect,) = manager.request(ask("now", 1, memory_bytes=1), 3.0, timeout_s=0)
    assert isinstance(effect, TimedOut)


def test_a_small_reservation_does_not_overtake_a_large_one_for_ever():
    manager = manager_of(mesh(2))
    granted(manager, ask("first", 1, memory_bytes=GIB))
    assert manager.request(ask("large", 2, memory_bytes=GIB), 0.0) == []
    assert manager.request(ask("small", 1, memory_bytes=GIB), 0.0) == []
    assert [type(e) for e in manager.release("first")] == [Released, Granted]
    assert manager.state("large") is SliceState.ACTIVE
    assert manager.state("small") is SliceState.WAITING


def test_a_new_host_serves_those_who_wait():
    manager = manager_of(mesh(1))
    granted(manager, ask("holder", 1, memory_bytes=GIB))
    manager.request(ask("next", 1, memory_bytes=GIB), 0.0)
    ((host, devices),) = mesh(1, island="b").items()
    assert manager.add_host(host, devices) == [
        Granted("me", "next", names(0, island="b"))
    ]


def test_all_slices_of_a_client_go_with_it():
    manager = manager_of(mesh(2))
    granted(manager, ask("mine", 1, memory_bytes=GIB))
    granted(manager, ask("yours", 1, client="you", memory_bytes=GIB))
    manager.request(ask("waiting", 1, memory_bytes=GIB), 0.0)
    manager.request(ask("heir", 1, client="you", memory_bytes=GIB), 0.0)
    effects = manager.leave("me")
    assert set(effects) == {
        Released("me", "mine"),
        Released("me", "waiting"),
        Granted("you", "heir", names(0)),
    }


def test_a_slice_moves_only_once_its_target_is_compiled():
    manager = manager_of(mesh(4))
    source = granted(manager, ask("s", 2))
    (prepare,) = manager.migrate("s")
    assert manager.devices_of("s") == source
    (vacate,) = manager.prepared("s", prepare.ticket)
    assert vacate == Vacate("me", "s", source, vacate.ticket)
    assert manager.vacated("s", vacate.ticket) == [
        Remapped("me", "s", prepare.devices, source)
    ]
    assert set(prepare.devices).isdisjoint(source)
    assert manager.state("s") is SliceState.ACTIVE


def test_a_slice_cannot_move_where_there_is_nothing():
    manager = manager_of(mesh(2))
    granted(manager, ask("s", 2))
    with pytest.raises(SliceError, match="cannot be migrated; got no other 2 devices"):
        manager.migrate("s")
    assert manager.state("s") is SliceState.ACTIVE


def test_a_slice_is_migrated_to_the_island_that_is_named():
    manager = manager_of(mesh(2), mesh(2, island="b"), mesh(2, island="c"))
    granted(manager, ask("s", 2))
    effects = finish_move(manager, manager.migrate("s", island="c"))
    assert effects[-1].devices == names(0, 1, island="c")


def test_a_suspended_slice_holds_nothing_and_comes_back():
    manager = manager_of(mesh(1))
    granted(manager, ask("s", 1, memory_bytes=GIB))
    (vacate,) = manager.suspend("s")
    assert manager.vacated("s", vacate.ticket) == []
    assert manager.state("s") is SliceState.SUSPENDED
    granted(manager, ask("guest", 1, memory_bytes=GIB))
    assert manager.resume("s") == []
    _, prepare = manager.release("guest")
    assert manager.prepared("s", prepare.ticket) == [
        Remapped("me", "s", names(0), names(0))
    ]


def test_a_slice_that_waits_for_its_first_devices_cannot_be_moved_or_suspended():
    manager = manager_of(mesh(1))
    granted(manager, ask("holder", 1, memory_bytes=GIB))
    manager.request(ask("s", 1, memory_bytes=GIB), 0.0)
    for change in (manager.suspend, manager.resume, manager.migrate):
        with pytest.raises(SliceError, match="waiting for its first devices"):
            change("s")


def test_a_slice_that_moves_cannot_be_moved_again():
    manager = manager_of(mesh(4))
    granted(manager, ask("s", 2))
    manager.migrate("s")
    with pytest.raises(SliceError, match="got it moving; expected it active"):
        manager.migrate("s")


def test_withdrawn_devices_are_free_once_what_stood_there_has_moved():
    manager = manager_of(mesh(4))
    granted(manager, ask("s", 2))
    effects = finish_move(manager, manager.withdraw(names(0, 1)))
    assert [type(e) for e in effects] == [Prepare, Vacate, Remapped, Freed]
    assert manager.devices_of("s") == names(2, 3)
    assert effects[-1] == Freed(names(0, 1))
    assert granted(manager, ask("t", 2)) == names(2, 3)


def test_only_slices_on_withdrawn_devices_move():
    manager = manager_of(mesh(4))
    granted(manager, ask("s", 2))
    granted(manager, ask("t", 2))
    finish_move(manager, manager.withdraw(names(0)))
    assert manager.devices_of("t") == names(2, 3)
    assert names(0)[0] not in manager.devices_of("s")


def test_a_slice_without_a_way_out_leaves_withdrawn_devices_and_waits():
    manager = manager_of(mesh(2))
    granted(manager, ask("s", 2))
    effects = finish_move(manager, manager.withdraw(names(1)))
    assert [type(e) for e in effects] == [Vacate, Freed]
    assert manager.state("s") is SliceState.DISPLACED
    effects = finish_move(manager, manager.restore(names(1)))
    assert effects[-1] == Remapped("me", "s", names(0, 1), names(0, 1))


def test_devices_that_nobody_uses_are_free_at_once():
    manager = manager_of(mesh(2))
    assert manager.withdraw(names(1)) == [Freed(names(1))]


def test_a_dead_host_displaces_only_what_stood_there():
    manager = manager_of(mesh(4, per_host=2))
    granted(manager, ask("s", 2))
    granted(manager, ask("t", 2))
    displaced, prepare = manager.lose_host("a/host0")
    assert displaced == Displaced("me", "s", names(0, 1))
    assert places_of(manager, "t") == [(2,), (3,)]
    (remapped,) = manager.prepared("s", prepare.ticket)
    assert remapped.before == ()
    assert places_of(manager, "s") == [(2,), (3,)]


def test_a_target_that_dies_is_replaced_and_its_late_answer_ignored():
    manager = manager_of(mesh(2), mesh(2, island="b"), mesh(2, island="c"))
    granted(manager, ask("s", 2))
    (first,) = manager.migrate("s")
    (second,) = manager.lose_host("b/host0")
    assert isinstance(second, Prepare)
    assert manager.prepared("s", first.ticket) == []
    effects = finish_move(manager, [second])
    assert effects[-1].devices == names(0, 1, island="c")


def test_a_target_that_dies_while_the_source_is_vacated_is_replaced():
    manager = manager_of(mesh(2), mesh(2, island="b"), mesh(2, island="c"))
    granted(manager, ask("s", 2))
    (first,) = manager.migrate("s")
    (vacate,) = manager.prepared("s", first.ticket)
    (second,) = manager.lose_host("b/host0")
    assert manager.vacated("s", vacate.ticket) == []
    assert manager.prepared("s", first.ticket) == []  # of the dead target
    assert manager.prepared("s", second.ticket) == [
        Remapped("me", "s", names(0, 1, island="c"), names(0, 1))
    ]


def test_an_answer_about_devices_that_died_says_nothing_about_later_ones():
    manager = manager_of(mesh(2), mesh(2, island="b"))
    granted(manager, ask("s", 2))
    (first,) = manager.suspend("s")
    (prepare,) = manager.resume("s")
    manager.lose_host("a/host0")
    manager.prepared("s", prepare.ticket)
    (second,) = manager.suspend("s")
    assert manager.vacated("s", first.ticket) == []
    assert manager.devices_of("s") == names(0, 1, island="b")
    manager.vacated("s", second.ticket)
    assert manager.state("s") is SliceState.SUSPENDED


def test_a_source_that_dies_during_a_move_leaves_the_target():
    manager = manager_of(mesh(2), mesh(2, island="b"))
    granted(manager, ask("s", 2))
    (prepare,) = manager.migrate("s")
    (displaced,) = manager.lose_host("a/host0")
    assert displaced.lost == names(0, 1)
    assert manager.prepared("s", prepare.ticket) == [
        Remapped("me", "s", names(0, 1, island="b"), ())
    ]


def test_a_slice_released_while_it_moves_frees_both_ends():
    manager = manager_of(mesh(2))
    granted(manager, ask("s", 1, memory_bytes=GIB))
    (prepare,) = manager.migrate("s")
    manager.release("s")
    assert manager.prepared("s", prepare.ticket) == []
    assert granted(manager, ask("t", 2, memory_bytes=GIB)) == names(0, 1)


def test_names_are_unique_and_known():
    manager = manager_of(mesh(2))
    granted(manager, ask("s", 1))
    with pytest.raises(SliceError, match="is there already"):
        manager.request(ask("s", 1), 0.0)
    with pytest.raises(SliceError, match=r"'t' is unknown.*one of \['s'\]"):
        manager.release("t")
