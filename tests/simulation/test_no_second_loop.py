"""The simulator steps the very endpoints that processes run; it has no loop of its own."""

from __future__ import annotations

import ast
from pathlib import Path

from timelyml.exchange.codec import Codec
from timelyml.runtime import simulation
from timelyml.runtime.controller import Controller
from timelyml.runtime.shipping import worker_codec
from timelyml.runtime.simulation import Simulation, random_scenario
from timelyml.runtime.worker import Worker

SOURCES = sorted(Path(simulation.__file__).parent.glob("*.py"))

STEP_CODE = {
    # what a step of a worker is made of
    *("apply", "propagate", "update_many", "take", "take_for_controller"),
    *("receive_data", "receive_credit", "frontier_moved"),
    *("pop_ready", "hear", "consumed", "left_queue", "run_one"),
    # and of the controller
    *("settle", "tick", "handle", "begin", "start_run"),
}
"""Calls that only the runtime itself may make."""


def calls_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr, ast.unparse(node.func.value)


def test_only_the_simulation_steps_and_it_steps_the_real_endpoints(tmp_path):
    steps = {
        (path.name, owner)
        for path in SOURCES
        for name, owner in calls_of(path)
        if name == "step"
    }
    built = Simulation(random_scenario(1), tmp_path, worker_codec())

    assert steps == {("simulation.py", "self.controller"), ("simulation.py", "worker")}
    assert type(built.controller) is Controller
    assert {type(worker) for worker in built.workers} == {Worker}
    assert isinstance(built._codec, Codec)


def test_the_simulation_has_no_step_code_of_its_own():
    own = {
        (path.name, name)
        for path in SOURCES
        for name, owner in calls_of(path)
        if name.removeprefix("_") in STEP_CODE
    }
    assert own == set()


def test_the_simulation_derives_nothing_from_the_runtime():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base) for base in node.bases}
                assert bases <= {"Enum", "NamedTuple", "Exception"}, node.name
            if isinstance(node, ast.FunctionDef):
                assert node.name != "step"
