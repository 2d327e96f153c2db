"""The example: what plain JAX does wrong comes out right here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.gang_scheduling import ordered

ROOT = Path(__file__).parents[2]


def test_many_collectives_on_eight_devices_come_to_their_end():
    assert ordered.many(launches=60, length=4) == 60 * (1 - 32)


@pytest.mark.slow
def test_the_example_shows_both():
    done = subprocess.run(
        [sys.executable, "-m", "examples.gang_scheduling", "--rounds", "50"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=110,
    )
    assert "XLA aborted the process" in done.stdout
    assert "process 1: the sum of ones is 2.0, of tens 20.0" not in done.stdout
    assert "0 wrong numbers" in done.stdout
