"""Who holds which buffer, and what becomes of it."""

from __future__ import annotations

import pytest

from timelyml.errors import BufferLostError, HandleError, OperatorError
from timelyml.ml.store import Buffer, BufferState, Delete, Directory, Handle, Known


def promised(directory, client="me", number=1):
    handle = Handle(client, number)
    directory.promise(client, [Buffer(handle, "slice", 8, "f(x)")])
    return handle


def ready(directory, client="me", number=1):
    handle = promised(directory, client, number)
    directory.ready([handle])
    return handle


def test_a_buffer_goes_with_the_last_who_can_ask_for_it():
    directory = Directory()
    handle = ready(directory)
    directory.use("me", [handle])
    assert directory.drop("me", [handle]) == []
    assert directory.unuse([handle]) == [Delete(handle)]
    assert handle not in directory


def test_a_client_hears_of_a_value_once_also_if_it_asked_before():
    directory = Directory()
    handle = promised(directory)
    assert directory.wait("me", handle) == []
    assert directory.ready([handle]) == [Known("me", handle)]
    assert directory.ready([handle]) == []
    assert directory.wait("me", handle) == [Known("me", handle)]


def test_a_failure_is_told_to_all_who_wait_and_to_those_who_ask_later():
    directory = Directory()
    handle = promised(directory)
    directory.wait("me", handle)
    error = OperatorError("computation 'f' failed")
    assert directory.fail([handle], error) == [Known("me", handle, error)]
    assert directory.wait("me", handle) == [Known("me", handle, error)]
    assert directory.error_of([handle]) is error
    assert directory.ready([handle]) == []


def test_only_a_buffers_holder_can_use_it():
    directory = Directory()
    handle = ready(directory)
    for attempt in (
        lambda: directory.use("you", [handle]),
        lambda: directory.wait("you", handle),
        lambda: directory.publish("you", "name", [handle], "*"),
        lambda: directory.use("me", [handle, Handle("me", 99)]),
    ):
        with pytest.raises(HandleError, match="is not client"):
            attempt()
    assert directory.drop("me", [handle]) == [Delete(handle)]  # no use was counted


def test_a_donated_buffer_is_dead_at_once():
    directory = Directory()
    handle = ready(directory)
    directory.use("me", [handle], donated=[handle])
    with pytest.raises(HandleError, match=r"me/1 \(f\(x\)\) was donated"):
        directory.use("me", [handle])
    with pytest.raises(HandleError, match="was donated"):
        directory.wait("me", handle)


def test_a_buffer_that_others_hold_may_not_be_donated():
    directory = Directory()
    mine, shown, used = (ready(directory, number=n) for n in range(3))
    directory.publish("me", "shown", [shown], "*")
    directory.use("me", [used])
    assert directory.may_donate("me", mine)
    assert not directory.may_donate("me", shown)
    assert not directory.may_donate("me", used)


def test_what_a_client_published_outlives_it():
    directory = Directory()
    kept, own = ready(directory, number=1), ready(directory, number=2)
    directory.publish("me", "weights", [kept], "{'w': *}")
    assert directory.leave("me") == [Delete(own)]
    assert directory.open("you", "weights") == ((kept,), "{'w': *}")
    assert directory.unpublish("weights") == []
    assert directory.leave("you") == [Delete(kept)]


def test_a_client_that_opened_a_buffer_keeps_it_when_others_go():
    directory = Directory()
    handle = ready(directory)
    directory.publish("me", "weights", [handle], "*")
    directory.open("you", "weights")
    directory.leave("me")
    directory.unpublish("weights")
    directory.use("you", [handle])
    (line,) = directory.listing()
    assert (line.holders, line.names, line.num_uses) == (("you",), (), 1)


def test_names_are_published_once_and_known():
    directory = Directory()
    handle = ready(directory)
    directory.publish("me", "weights", [handle], "*")
    with pytest.raises(HandleError, match="'weights' is published already"):
        directory.publish("me", "weights", [handle], "*")
    with pytest.raises(HandleError, match=r"not published.*one of \['weights'\]"):
        directory.open("you", "weight")


def test_a_handle_is_promised_once():
    directory = Directory()
    promised(directory)
    with pytest.raises(HandleError, match="is there already"):
        promised(directory)


def test_lost_buffers_are_reported_by_name():
    directory = Directory()
    there, failed = ready(directory, number=1), promised(directory, number=2)
    directory.fail([failed], OperatorError("f failed"))
    directory.wait("me", there)
    directory.lose(directory.on("slice"), "host h0 died")
    known = directory.wait("me", there)
    assert isinstance(known[0].error, BufferLostError)
    assert str(known[0].error).startswith(
        "buffer me/1 (f(x)) is lost; got host h0 died"
    )
    assert isinstance(directory.error_of([failed]), OperatorError)
    states = [line.state for line in directory.listing()]
    assert states == [BufferState.LOST, BufferState.FAILED]


def test_all_of_a_client_goes_with_it():
    directory = Directory()
    handles = [promised(directory, number=n) for n in range(3)]
    directory.use("me", handles[:1])
    yours = ready(directory, client="you")
    assert directory.leave("me") == [Delete(handle) for handle in handles[1:]]
    assert directory.unuse(handles[:1]) == [Delete(handles[0])]
    assert yours in directory
    assert directory.leave("nobody") == []
