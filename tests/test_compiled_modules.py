"""The modules that a wheel can have compiled, and what is left where that fails."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def hook(monkeypatch):
    """The build hook's module; builders bring along what it derives from."""
    try:
        found = importlib.util.find_spec("hatchling.builders.hooks.plugin.interface")
    except ModuleNotFoundError:
        found = None
    if found is None:
        stand_in = types.ModuleType("hatchling.builders.hooks.plugin.interface")
        stand_in.BuildHookInterface = list  # anything with a type parameter
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
        for parent in ("hatchling", "hatchling.builders", "hatchling.builders.hooks"):
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        plugin = types.ModuleType("hatchling.builders.hooks.plugin")
        monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    spec = importlib.util.spec_from_file_location(
        "hatch_build", ROOT / "hatch_build.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    return wheel["hooks"]["custom"]["modules"]


def test_every_module_to_compile_is_there_and_listed_once():
    modules = listed()

    assert modules == sorted(set(modules))
    missing = [m for m in modules if not (ROOT / "timelyml" / f"{m}.py").is_file()]
    assert missing == []


def test_no_compiled_module_stands_beside_a_source():
    assert list((ROOT / "timelyml").rglob("*.so")) == []


def test_what_does_not_compile_leaves_no_compiled_modules(hook, tmp_path, capfd):
    assert hook._compile(ROOT, tmp_path, ["timelyml/absent.py"]) == []
    assert "absent.py" in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("value", "is_asked"), [(None, False), ("0", False), ("1", True)]
)
def test_nothing_is_compiled_unless_it_is_asked_for(hook, monkeypatch, value, is_asked):
    monkeypatch.delenv(hook.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(hook.SWITCH, value)

    assert hook._is_asked_for() == is_asked
