"""The package stays pure."""

import ast
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


@pytest.mark.sources
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
