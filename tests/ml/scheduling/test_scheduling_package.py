"""What the package exports, and that it stays pure."""

import ast
import inspect
from pathlib import Path

import pytest

from timelyml.ml import scheduling

PACKAGE = Path(scheduling.__file__).parent
PURE = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "heapq",
    "typing",
    "timelyml",
}


def test_the_package_exports_what_it_imports_and_all_of_it_is_documented():
    tree = ast.parse(Path(scheduling.__file__).read_text(encoding="utf-8"))
    imported = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == set(scheduling.__all__)
    exports = [getattr(scheduling, name) for name in scheduling.__all__]
    callables = [e for e in exports if inspect.isclass(e) or inspect.isfunction(e)]
    assert all(inspect.getdoc(export) for export in callables)


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name
)
def test_decisions_use_no_clock_thread_socket_or_jax(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        assert {name.split(".")[0] for name in names} <= PURE
