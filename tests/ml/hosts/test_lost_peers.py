"""What a host does without peers that went: it waits to hear why, and not for ever."""

from __future__ import annotations

import re

import numpy as np
import pytest

from timelyml.errors import BufferLostError, PeerError
from timelyml.exchange import CONTROLLER
from timelyml.ml.functions import ArrayType
from timelyml.ml.hosts import Expect, Export, Gone, Orders, Piece, Pieces, SliceMade
from timelyml.ml.hosts.service import HostService
from timelyml.runtime.failure import unpack_error
from timelyml.runtime.service import ServiceSite
from timelyml.testing.leftovers import eventually

FLOAT = ArrayType((4,), "float32", 4)
GIVE_UP_S = 10.0
NOTHING = dict.fromkeys(Orders._fields, ())
BROKE = PeerError("worker 1 lost its link from worker 0; got reset by its peer")
KILLED = Gone(0, "island-0", "worker 0 (pid 7) was killed by SIGKILL")


class Here:
    """Worker 1, alone on its island, with a slice that is to get rows from worker 0."""

    def __init__(self):
        self.now_s = 100.0
        self.sent = []
        options = {"islands": {"b": [1]}, "give_up_s": GIVE_UP_S}
        send = lambda peer, body, _: self.sent.append((peer, body))  # noqa: E731
        self.service = HostService(
            ServiceSite(1, send, lambda: None, lambda: self.now_s, options)
        )
        self.service.handle(CONTROLLER, SliceMade("s", ("x",), (1,), ((0, 0),)))

    def expect(self, senders=(0,)):
        """Have it expect rows, and show what came of them."""
        expect = Expect(7, "s", FLOAT, (), senders=senders)
        export = Export(7, FLOAT, CONTROLLER, 9, (((0, 4),),))
        orders = {**NOTHING, "expects": (expect,), "exports": (export,)}
        self.service.handle(CONTROLLER, Orders(**orders))

    def answer(self):
        """What came of the rows, once something did."""

        def is_there():
            self.service.step()
            return bool(self.sent)

        assert eventually(is_there, 30.0)
        ((peer, pieces),) = self.sent
        assert (peer, pieces.target) == (CONTROLLER, 9)
        return pieces


@pytest.fixture
def here():
    here = Here()
    yield here
    here.service.close(None)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_told_first", [False, True])
def test_what_a_peer_will_not_send_is_lost_with_the_cause(here, is_told_first, is_late):
    if not is_late:
        here.expect()
    events = [
        lambda: here.service.lost(0, BROKE),
        lambda: here.service.handle(CONTROLLER, KILLED),
    ]
    for event in reversed(events) if is_told_first else events:
        here.service.step()
        assert here.sent == []
        event()
    here.service.step()
    if is_late:  # the order was on its way
        here.expect()

    error = unpack_error(here.answer().error)
    assert isinstance(error, BufferLostError)
    assert re.search(
        r"float32\[4\] .* slice 's' .* island 'island-0'; got worker 0 .* SIGKILL",
        str(error),
    )
    assert here.service.next_deadline() is None


def test_without_a_word_of_the_controller_a_peer_is_given_up_in_the_end(here):
    here.expect()
    here.service.lost(0, BROKE)
    assert here.service.next_deadline() == here.now_s + GIVE_UP_S
    here.now_s += GIVE_UP_S - 0.1
    here.service.step()
    assert here.sent == []

    here.now_s += 0.1
    error = unpack_error(here.answer().error)
    assert re.search(r"float32\[4\] that host 0 .* reset by its peer", str(error))


def test_rows_that_were_on_their_way_come_though_their_sender_is_known_to_be_dead(here):
    here.expect()
    here.service.handle(CONTROLLER, KILLED)
    here.service.step()
    here.service.handle(0, Pieces(7, (Piece((0,), np.arange(4, dtype=np.float32)),)))
    here.service.lost(0, BROKE)

    pieces = here.answer()
    assert pieces.error is None
    np.testing.assert_array_equal(pieces.pieces[0].array, np.arange(4))
