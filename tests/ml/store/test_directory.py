"""Who holds which buffer, and what becomes of it."""

from __future__ import annotations

import pytest

from tests.ml.store.test_ledger import buffer
from timelyml.errors import HandleError
from timelyml.ml.store import NOBODY, BufferState, Delete, Directory, Known

ME, YOU = 1, 2


def promised(directory, client=ME, count=1):
    made = buffer(count + 1000 * client, 8, "slice")
    directory.promise(client, [made])
    return made.number


def ready(directory, client=ME, count=1):
    number = promised(directory, client, count)
    directory.ready([number])
    return number


def deleted(effects):
    assert all(isinstance(effect, Delete) for effect in effects)
    return [effect.buffer.number for effect in effects]


def test_a_buffer_goes_with_the_last_who_can_ask_for_it():
    directory = Directory()
    number = ready(directory)
    entry = directory.readable(ME, number)
    directory.use([entry])
    assert directory.drop(ME, [number]) == []
    assert deleted(directory.unuse([entry])) == [number]
    assert number not in directory


def test_a_client_hears_of_a_value_once_also_if_it_asked_before():
    directory = Directory()
    number = promised(directory)
    assert directory.wait(ME, number) == []
    assert directory.ready([number]) == [Known(ME, number)]
    assert directory.ready([number]) == []
    assert directory.wait(ME, number) == [Known(ME, number)]


def test_a_failure_is_told_to_all_who_wait_and_to_those_who_ask_later():
    directory = Directory()
    number = promised(directory)
    directory.wait(ME, number)
    assert directory.fail([number], b"why") == [Known(ME, number, b"why")]
    assert directory.wait(ME, number) == [Known(ME, number, b"why")]
    assert directory.ready([number]) == []
    assert directory.get(number).state is BufferState.FAILED


def test_only_a_buffers_holder_can_use_it():
    directory = Directory()
    number = ready(directory)
    for attempt in (
        lambda: directory.readable(YOU, number),
        lambda: directory.wait(YOU, number),
        lambda: directory.publish(YOU, "name", [number], b"*"),
        lambda: directory.publish(ME, "name", [number, 99], b"*"),
    ):
        with pytest.raises(HandleError, match=r"a buffer is not client \d's"):
            attempt()
    assert directory.drop(YOU, [number]) == []
    assert deleted(directory.drop(ME, [number])) == [number]  # no name was given


def test_what_is_given_up_is_gone_for_its_client_at_once():
    directory = Directory()
    number = ready(directory)
    entry = directory.readable(ME, number)
    directory.use([entry])
    assert directory.give_up(ME, [number]) == []
    with pytest.raises(HandleError, match="gave away"):
        directory.readable(ME, number)
    assert directory.give_up(ME, [number]) == []
    assert deleted(directory.unuse([entry])) == [number]


def test_a_buffer_that_others_hold_may_not_be_donated():
    directory = Directory()
    entries = [directory.get(ready(directory, count=count)) for count in range(4)]
    _, shown, opened, exported = entries
    directory.publish(ME, "shown", [shown.buffer.number], b"*")
    directory.publish(ME, "opened", [opened.buffer.number], b"*")
    directory.open(YOU, "opened")
    directory.unpublish("opened")
    directory.use([exported], is_exported=True)
    may = [directory.may_donate(ME, entry) for entry in entries]
    assert may == [True, False, False, False]
    directory.unuse([exported], is_exported=True)
    directory.leave(YOU)
    assert directory.may_donate(ME, exported)
    assert directory.may_donate(ME, opened)


def test_what_a_client_published_outlives_it():
    directory = Directory()
    kept, own = ready(directory, count=1), ready(directory, count=2)
    directory.publish(ME, "weights", [kept], b"{'w': *}")
    assert deleted(directory.leave(ME)) == [own]
    assert directory.get(kept).owner == NOBODY
    assert directory.open(YOU, "weights") == ((kept,), b"{'w': *}")
    assert directory.unpublish("weights") == []
    assert directory.get(kept).owner == YOU
    assert deleted(directory.leave(YOU)) == [kept]


def test_a_client_that_opened_a_buffer_keeps_it_when_others_go():
    directory = Directory()
    number = ready(directory)
    directory.publish(ME, "weights", [number], b"*")
    directory.open(YOU, "weights")
    directory.leave(ME)
    directory.unpublish("weights")
    (entry,) = directory.entries()
    assert directory.readable(YOU, number) is entry
    assert (entry.holders, entry.names, entry.num_references) == ({YOU: 1}, set(), 1)


def test_a_buffer_is_held_as_often_as_it_was_given():
    directory = Directory()
    number = ready(directory)
    directory.publish(ME, "twice", [number, number], b"*")
    directory.open(YOU, "twice")
    directory.unpublish("twice")
    directory.leave(ME)
    assert directory.drop(YOU, [number]) == []
    assert deleted(directory.drop(YOU, [number, number])) == [number]


def test_names_are_published_once_and_known():
    directory = Directory()
    number = ready(directory)
    directory.publish(ME, "weights", [number], b"*")
    assert directory.is_published("weights")
    with pytest.raises(HandleError, match="'weights' is published already"):
        directory.publish(ME, "weights", [number], b"*")
    for attempt in (
        lambda: directory.open(YOU, "weight"),
        lambda: directory.unpublish("w"),
    ):
        with pytest.raises(HandleError, match=r"not published.*one of \['weights'\]"):
            attempt()


def test_a_number_is_promised_once():
    directory = Directory()
    promised(directory)
    with pytest.raises(HandleError, match="is there already"):
        promised(directory)


def test_what_is_lost_is_told_to_all_who_hold_it_unless_they_know_of_worse():
    directory = Directory()
    there, failed = ready(directory, count=1), promised(directory, count=2)
    directory.fail([failed], b"f failed")
    directory.publish(ME, "shown", [there], b"*")
    directory.open(YOU, "shown")
    (entry, _) = directory.on("slice")
    assert entry.buffer.number == there
    assert directory.lose(there, b"gone") == [
        Known(ME, there, b"gone"),
        Known(YOU, there, b"gone"),
    ]
    assert directory.lose(failed, b"gone") == []
    assert directory.get(failed).error == b"f failed"


def test_all_of_a_client_goes_with_it():
    directory = Directory()
    numbers = [promised(directory, count=count) for count in range(3)]
    entry = directory.get(numbers[0])
    directory.use([entry])
    yours = ready(directory, client=YOU)
    assert directory.of_client(ME) == numbers
    assert deleted(directory.leave(ME)) == numbers[1:]
    assert directory.of_client(ME) == []
    assert deleted(directory.unuse([entry])) == numbers[:1]
    assert yours in directory
    assert directory.leave(3) == []


def test_what_only_a_call_needs_has_no_holder():
    directory = Directory()
    made = buffer(5, 8, "slice")
    (entry,) = directory.promise(NOBODY, [made], "call 7")
    directory.use([entry])
    assert (entry.owner, entry.producer, entry.num_references) == (NOBODY, "call 7", 1)
    assert deleted(directory.unuse([entry])) == [made.number]


def test_what_a_call_holds_between_its_parts_is_charged_to_its_client():
    directory = Directory()
    held, failed, left = (buffer(count, 8, "slice") for count in (5, 6, 7))
    entries = directory.promise(NOBODY, (held, failed, left), "call 7")
    for entry in entries:
        directory.use([entry])
        directory.charge(entry, ME)
        assert entry.owner == ME
    assert directory.held_bytes(ME) == 3 * held.type.size_bytes
    directory.fail([failed.number], b"no")
    assert entries[1].owner == NOBODY
    assert deleted(directory.unuse([entries[0]])) == [held.number]
    assert directory.held_bytes(ME) == left.type.size_bytes
    directory.leave(ME)
    assert deleted(directory.unuse([entries[2]])) == [left.number]
    assert (directory.held_bytes(ME), entries[2].owner) == (0, NOBODY)
