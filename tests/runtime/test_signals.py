"""Signals that are counted, held back, or insisted on."""

from __future__ import annotations

import signal
import sys
import weakref

import pytest

from timelyml.runtime.signals import GuaranteedInterrupt, HeldSignals, Interrupts


@pytest.fixture(autouse=True)
def _default_handlers():
    before = {number: signal.getsignal(number) for number in (2, 15)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Item:
    """Can be referred to weakly."""


@pytest.fixture
def lost(monkeypatch):
    """Raise a SIGINT where Python drops what the handler raises; returns how often."""
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)

    def interrupt():
        item = Item()
        ref = weakref.ref(item, lambda _: signal.raise_signal(signal.SIGINT))
        del item
        assert ref() is None
        return len(dropped)

    return interrupt


def test_the_first_signal_is_counted_and_the_second_raises():
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.was_interrupted
        assert not interrupts.is_insisted_on()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert interrupts.is_insisted_on()
    assert interrupts.exit_error().code == 128 + signal.SIGTERM


def test_what_was_held_back_comes_at_the_end():
    came = []

    def hold():
        with HeldSignals(lambda: came.append(1)):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            came.append("end")

    with pytest.raises(KeyboardInterrupt):
        hold()
    assert came == [1, 1, "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_was_held_back_within_a_run_is_counted_there():
    with Interrupts() as interrupts:
        with HeldSignals():
            signal.raise_signal(signal.SIGTERM)
            assert interrupts.count == 0
        assert interrupts.count == 1


def test_a_program_that_handles_signals_itself_keeps_doing_so():
    came = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    with Interrupts() as interrupts, HeldSignals(), GuaranteedInterrupt():
        signal.raise_signal(signal.SIGINT)
        assert came == [signal.SIGINT]
    assert not interrupts.was_interrupted


def test_an_interrupt_that_python_drops_comes_at_the_end_of_the_block(lost):
    def insist():
        with GuaranteedInterrupt():
            assert lost() == 1

    with pytest.raises(KeyboardInterrupt):
        insist()


def test_a_run_within_such_a_block_drains_as_ever(lost):
    with GuaranteedInterrupt(), Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
    assert interrupts.count == 1


def test_a_second_interrupt_that_python_drops_is_insisted_on(lost):
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert lost() == 1
        assert interrupts.is_insisted_on()
