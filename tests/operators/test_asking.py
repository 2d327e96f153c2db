"""How often something is asked whether it has come."""

from __future__ import annotations

from timelyml.operators.asking import LATEST_S, SOONEST_S, Asking


class Shard:
    """Its time passes as the test says; remembers when it is to be activated."""

    def __init__(self):
        self.time = 100.0
        self.due = []

    def now(self):
        return self.time

    def activate_after(self, seconds):
        self.due.append(self.time + seconds)

    def pass_silence(self, asking, seconds):
        """Activate as asked; returns how often that was."""
        until = self.time + seconds
        asking.ask_again(self)
        asked = len(self.due)
        while self.due[-1] <= until:
            self.time = self.due[-1]
            asking.ask_again(self)
        return len(self.due) - asked


def test_it_is_asked_soon_first_and_seldom_after_a_while():
    asking, shard = Asking(), Shard()
    first = shard.pass_silence(asking, 0.05)
    shard.pass_silence(asking, 1.0)
    later = shard.pass_silence(asking, 10.0)
    assert first >= 4
    assert later <= 10.0 / LATEST_S + 1


def test_after_something_came_it_is_asked_soon_again():
    asking, shard = Asking(), Shard()
    shard.pass_silence(asking, 10.0)
    asking.found()
    asking.ask_again(shard)
    assert shard.due[-1] <= shard.time + SOONEST_S


def test_others_that_activate_the_shard_do_not_make_it_ask_more_often():
    asking, shard = Asking(), Shard()
    shard.pass_silence(asking, 5.0)
    before = len(shard.due)
    shard.time = shard.due[-1] - LATEST_S / 2
    for _ in range(5):
        asking.ask_again(shard)
    assert len(shard.due) == before
