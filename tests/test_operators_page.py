"""The page of operators names every one, and no other."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from timelyml import Dataflow, Stream

PAGE = (Path(__file__).parent.parent / "docs/operators.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)

OF_FLOWS_THEMSELVES = {"build", "describe", "to_mermaid", "run", "start"}


def public(cls):
    return {
        name
        for name in dir(cls)
        if not name.startswith("_") and callable(getattr(cls, name))
    }


def test_every_method_has_one_line_and_every_line_a_method():
    named = Counter(name for name, _ in ROWS)

    assert set(named) == (public(Stream) | public(Dataflow)) - OF_FLOWS_THEMSELVES
    assert max(named.values()) == 1


@pytest.mark.parametrize("cls", [Stream, Dataflow])
def test_every_method_shows_how_it_is_called(cls):
    without = [name for name in public(cls) if ">>>" not in getattr(cls, name).__doc__]

    assert without == []


def methods_in_all_modes():
    """Methods that are called in tests on every cluster, or in what those call."""
    called = set()
    for path in (Path(__file__).parent).rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any("cluster" in names_of(node) for node in tree.body):
            called |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    return called


def names_of(node):
    """The parameters of a test."""
    is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    return {each.arg for each in node.args.args} if is_test else set()


def test_every_method_is_tested_in_all_run_modes():
    operators = (public(Stream) | public(Dataflow)) - OF_FLOWS_THEMSELVES

    assert operators - methods_in_all_modes() == set()


def test_options_that_the_page_names_exist():
    import inspect

    options = {
        "filter": ["by_batch", "on_error"],
        "map": ["on_error"],
        "flat_map": ["on_error"],
        "map_batch": ["on_error"],
        "map_async": ["on_error", "limit"],
        "exchange": ["by_batch"],
        "partition": ["num_parts", "choose"],
        "distinct": ["across_times", "ttl_epochs"],
        "join": ["across_times", "ttl_epochs"],
        "state_machine": ["ttl_epochs"],
        "iterate": ["max_iterations", "limit"],
    }
    for name, of_method in options.items():
        parameters = inspect.signature(getattr(Stream, name)).parameters
        assert set(of_method) <= set(parameters), name


ROWS_OF_COLUMNS = {"k": np.array([1, 2, 1]), "x": np.array([0.5, 1.5, 2.5])}
KEEPS_COLUMNS = {
    "filter": lambda s: s.filter(lambda row: True),
    "map_batch": lambda s: s.map_batch(lambda block: block),
    "inspect": lambda s: s.inspect(lambda row: None),
    "inspect_batch": lambda s: s.inspect_batch(lambda time, block: None),
    "aggregate": lambda s: s.aggregate("k", {"n": "count"}),
    "delay": lambda s: s.delay(lambda row, time: 3),
    "distinct": lambda s: s.distinct("k"),
    "join": lambda s: s.join(s, key="k"),
    "map": lambda s: s.map(lambda row: 1),
    "flat_map": lambda s: s.flat_map(lambda row: [1]),
    "map_async": lambda s: s.map_async(lambda row: 1),
}


@pytest.mark.parametrize("name", KEEPS_COLUMNS)
def test_columns_stay_columns_where_the_page_says_so(name):
    flow = Dataflow()
    KEEPS_COLUMNS[name](flow.source(ROWS_OF_COLUMNS)).collect()

    (line,) = [text for row, text in ROWS if row == name]
    is_columns = name in ("distinct", "join") or line.endswith("stay columns")
    for _, payload in flow.run().batches("out"):
        assert isinstance(payload, dict) == is_columns
