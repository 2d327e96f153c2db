"""Where a worker says that it is, in memory that outlives it."""

from __future__ import annotations

import os

import pytest

from tests.runtime.world import World
from timelyml import Dataflow
from timelyml.errors import OperatorError
from timelyml.runtime.child import Child
from timelyml.runtime.launch_processes import ProcessLauncher
from timelyml.runtime.whereabouts import SIZE_BYTES, Whereabouts, new_memory, place_in


def test_a_worker_is_in_no_callback_any_more_once_one_has_raised():
    world, memory = World(), bytearray(SIZE_BYTES)
    world.workers[0]._memory = memory
    flow = Dataflow()
    flow.source([0]).map(lambda n: 1 / n).collect()

    with pytest.raises(OperatorError, match="ZeroDivisionError"):
        world.run(flow.build())

    assert any(memory), "it noted where it was"
    assert place_in(memory) is None


def test_where_a_worker_died_is_kept_without_a_descriptor():
    memory, descriptor = new_memory()
    os.close(descriptor)
    Whereabouts(memory, 3).enter(1, 2, 5)
    child = Child(0, Process(), -1, None, memory)

    ProcessLauncher._release(None, child)

    assert not isinstance(child.memory, type(memory))
    assert place_in(child.memory) == place_in(memory)


class Process:
    """One whose pipes are closed."""

    stdin = stderr = None
