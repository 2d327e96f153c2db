"""The layout is the architecture: who may import what, checked on the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "timelyml"

READING_ORDER = (
    "errors",
    "progress",
    "graph",
    "exchange",
    "runtime",
    "operators",
    "io",
    "ml",
    "fluent",
    "observe",
    "testing",
    "cli_output",
    "cli_servers",
    "cli",
    "__init__",
    "__main__",
)
"""Packages and top-level modules; each imports only what stands before it."""

MAY_IMPORT_WHEN_CALLED = {"fluent": {"io", "ml"}}
"""The exceptions: `import timelyml` loads neither jax nor connectors until asked to."""

HOMES = {
    "zmq": lambda path: path.startswith(("exchange/zmq_", "exchange/security.py")),
    "msgpack": lambda path: path.startswith("exchange/") and "codec" in path,
    "cloudpickle": lambda path: path == "runtime/shipping.py",
    "jax": lambda path: path.startswith("ml/"),
    "jaxlib": lambda path: path.startswith("ml/"),
    "optax": lambda path: path.startswith("ml/"),
    "bytewax": lambda path: path.startswith("io/"),
    "pyarrow": lambda path: path.startswith("io/"),
    "pytest": lambda path: path == "testing/plugin.py",
}
"""Where a third-party package may be imported."""

PURE = ("errors.py", "progress/", "graph/")
"""What decides from values alone, without threads, clocks, sockets or chance."""

IMPURE = {"asyncio", "multiprocessing", "random", "selectors", "socket", "subprocess"}
IMPURE |= {"threading", "time"}

MAX_LINES = 400


@dataclass(frozen=True)
class Imported:
    """A module that a file imports; `is_late` if inside a function."""

    module: str
    line: int
    is_late: bool


@dataclass(frozen=True)
class Source:
    """One file of the package, by its path under it."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        parts = self.path.removesuffix(".py").split("/")
        if parts[-1] == "__init__":
            parts.pop()
        return ".".join(["timelyml", *parts])

    @property
    def layer(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")


def sources() -> list[Source]:
    return [
        Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(ROOT.rglob("*.py"))
    ]


def imports_of(source: Source) -> Iterator[Imported]:
    def visit(node: ast.AST, is_late: bool) -> Iterator[Imported]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Imported(alias.name, node.lineno, is_late)
        elif isinstance(node, ast.ImportFrom):
            yield from from_import(source, node, is_late)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_late or inside)

    yield from visit(source.tree, False)


def from_import(
    source: Source, node: ast.ImportFrom, is_late: bool
) -> Iterator[Imported]:
    base = node.module or ""
    if node.level:  # relative: from the package that the file stands in
        package = source.module.split(".")
        if not source.path.endswith("__init__.py"):
            package.pop()
        package = package[: len(package) - node.level + 1]
        base = ".".join([*package, *([node.module] if node.module else [])])
    for alias in node.names:
        full = f"{base}.{alias.name}"
        is_module = base.split(".")[0] == "timelyml" and is_file(full)
        yield Imported(full if is_module else base, node.lineno, is_late)


def is_file(module: str) -> bool:
    path = ROOT.joinpath(*module.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def faults_of_order(source: Source) -> list[str]:
    if source.layer not in READING_ORDER:
        return [f"{source.path} stands in no known layer"]
    position = READING_ORDER.index(source.layer)
    late = MAY_IMPORT_WHEN_CALLED.get(source.layer, set())
    faults = []
    for found in imports_of(source):
        if found.module.split(".")[0] != "timelyml":
            continue
        layer = layer_of(found.module)
        where = f"{source.path}:{found.line} imports {found.module}"
        if layer in late:
            if not found.is_late:
                faults.append(f"{where} when loaded, not when called")
        elif found.is_late:
            faults.append(f"{where} inside a function, which hides a cycle")
        elif layer not in READING_ORDER or READING_ORDER.index(layer) > position:
            faults.append(f"{where}, which stands below it")
        elif layer == source.layer and "/" not in source.path:
            faults.append(f"{where}, itself")
    return faults


def faults_of_homes(source: Source) -> list[str]:
    return [
        f"{source.path}:{found.line} imports {found.module}"
        for found in imports_of(source)
        if (home := HOMES.get(found.module.split(".")[0])) and not home(source.path)
    ]


def faults_of_purity(source: Source) -> list[str]:
    if not source.path.startswith(PURE):
        return []
    return [
        f"{source.path}:{found.line} imports {found.module}"
        for found in imports_of(source)
        if found.module.split(".")[0] in IMPURE
    ]


def faults_of_init(source: Source) -> list[str]:
    if not source.path.endswith("__init__.py"):
        return []
    faults = []
    for position, node in enumerate(source.tree.body):
        is_docstring = position == 0 and isinstance(node, ast.Expr)
        if is_docstring or isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = exported(node)
        if names is None:
            faults.append(f"{source.path}:{node.lineno} holds logic")
        elif names != sorted(names, key=export_order):
            faults.append(f"{source.path}:{node.lineno} has an unsorted __all__")
    if ast.get_docstring(source.tree) is None:
        faults.append(f"{source.path} has no docstring")
    return faults


def exported(node: ast.stmt) -> list[str] | None:
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    target = node.targets[0]
    if not isinstance(target, ast.Name) or target.id != "__all__":
        return None
    names = ast.literal_eval(node.value)
    return names if isinstance(names, list) else None


def export_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: as ruff sorts them."""
    if name.isupper():
        return 0, name
    return (1, name) if name[:1].isupper() else (2, name)


def faults_of_style(source: Source) -> list[str]:
    faults = []
    for number, line in enumerate(source.text.splitlines(), 1):
        if re.fullmatch(r"\s*#.*[-=]{4,}\s*", line):
            faults.append(f"{source.path}:{number} is a banner")
    num_lines = len(source.text.splitlines())
    if num_lines > MAX_LINES:
        faults.append(f"{source.path} has {num_lines} lines")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name | ast.Attribute | ast.alias):
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "name", "")))
            if name == "TYPE_CHECKING":
                faults.append(f"{source.path} uses TYPE_CHECKING")
    return faults


def import_cycle(files: list[Source]) -> list[str] | None:
    """Return modules that import each other in a circle, if there are any."""
    modules = {source.module for source in files}
    graph = {
        source.module: sorted({f.module for f in imports_of(source)} & modules)
        for source in files
    }
    done: set[str] = set()
    path: list[str] = []

    def search(module: str) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        path.append(module)
        for imported in graph[module]:
            if cycle := search(imported):
                return cycle
        done.add(path.pop())
        return None

    return next((cycle for module in graph if (cycle := search(module))), None)


@pytest.mark.parametrize(
    "faults_of",
    [
        faults_of_order,
        faults_of_homes,
        faults_of_purity,
        faults_of_init,
        faults_of_style,
    ],
)
def test_every_file_keeps_to_the_layout(faults_of):
    faults = [fault for source in sources() for fault in faults_of(source)]
    assert faults == []


def test_no_modules_import_each_other_in_a_circle():
    # Within a package too; importing one's own package counts, as it imports back.
    assert import_cycle(sources()) is None


def test_the_checks_see_every_package():
    layers = {source.layer for source in sources()}
    assert {"errors", "progress", "graph", "__init__"} <= layers


def loaded_by(code: str) -> set[str]:
    """Names of the modules that are there after `code`, in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_importing_timelyml_loads_neither_jax_nor_bytewax():
    loaded = {module.split(".")[0] for module in loaded_by("import timelyml")}
    assert "timelyml" in loaded
    assert not loaded & {"jax", "jaxlib", "optax", "bytewax"}


def test_importing_timelyml_adds_little_to_numpy_and_zmq():
    # Counted, not timed: a module costs about a third of a millisecond.
    given = loaded_by("import numpy, zmq")
    added = loaded_by("import numpy, zmq, timelyml") - given

    assert len(added) < 250
    heavy = {"asyncio", "email", "http", "multiprocessing", "optree", "rich", "typer"}
    assert not added & heavy
    packages = {".".join(module.split(".")[:2]) for module in added}
    assert not packages & {
        f"timelyml.{name}" for name in ("cli", "io", "ml", "observe")
    }
    assert "timelyml.runtime.simulation" not in added


BROKEN = {
    "imports upwards": (
        faults_of_order,
        Source("progress/a.py", "from timelyml.graph import Graph"),
        "which stands below it",
    ),
    "imports upwards by name": (
        faults_of_order,
        Source("graph/a.py", "from timelyml import exchange"),
        "which stands below it",
    ),
    "imports upwards relatively": (
        faults_of_order,
        Source("graph/a.py", "from ..exchange import codec"),
        "which stands below it",
    ),
    "hides an import": (
        faults_of_order,
        Source("exchange/a.py", "def f():\n    import timelyml.graph"),
        "inside a function",
    ),
    "fluent loads ml": (
        faults_of_order,
        Source("fluent/a.py", "from timelyml.ml import moe"),
        "when loaded",
    ),
    "stands nowhere": (faults_of_order, Source("utils.py", ""), "no known layer"),
    "zmq outside": (
        faults_of_homes,
        Source("runtime/a.py", "import zmq.asyncio"),
        "zmq",
    ),
    "jax outside": (
        faults_of_homes,
        Source("operators/a.py", "def f():\n    import jax"),
        "jax",
    ),
    "a clock": (
        faults_of_purity,
        Source("graph/a.py", "from time import sleep"),
        "time",
    ),
    "logic": (faults_of_init, Source("graph/__init__.py", '"""D."""\nx = 1'), "logic"),
    "unsorted": (
        faults_of_init,
        Source("graph/__init__.py", '"""D."""\n__all__ = ["b", "a"]'),
        "unsorted",
    ),
    "a banner": (
        faults_of_style,
        Source("graph/a.py", "x = 1\n\n# Parts ------------\n"),
        "is a banner",
    ),
    "too long": (faults_of_style, Source("graph/a.py", "\n" * 401), "401 lines"),
    "typing only": (
        faults_of_style,
        Source("graph/a.py", "import typing\nif typing.TYPE_CHECKING:\n    pass"),
        "TYPE_CHECKING",
    ),
}


@pytest.mark.parametrize(
    ("faults_of", "source", "expected"), BROKEN.values(), ids=BROKEN
)
def test_a_broken_file_is_found(faults_of, source, expected):
    faults = faults_of(source)
    assert len(faults) == 1
    assert expected in faults[0]


def test_fluent_may_import_ml_when_called():
    source = Source("fluent/a.py", "def f():\n    from timelyml.ml import moe")
    assert faults_of_order(source) == []


def test_a_circle_within_a_package_is_found():
    a = Source("graph/a.py", "import timelyml.graph.b")
    b = Source("graph/b.py", "from timelyml.graph.a import A")
    assert import_cycle([a, b]) == [
        "timelyml.graph.a",
        "timelyml.graph.b",
        "timelyml.graph.a",
    ]


def test_importing_the_own_package_is_a_circle():
    init = Source("graph/__init__.py", "from timelyml.graph.a import A")
    a = Source("graph/a.py", "from timelyml.graph import A")
    assert import_cycle([init, a]) == [
        "timelyml.graph",
        "timelyml.graph.a",
        "timelyml.graph",
    ]
