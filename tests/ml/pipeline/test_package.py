"""What the package exports."""

import ast
import importlib
import inspect
from pathlib import Path

pipeline = importlib.import_module("timelyml.ml.pipeline")
"""The package; `ml.pipeline` is the function of its name."""


def test_the_package_exports_what_it_imports_and_all_of_it_is_documented():
    tree = ast.parse(Path(pipeline.__file__).read_text(encoding="utf-8"))
    imported = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == set(pipeline.__all__)
    exports = [getattr(pipeline, name) for name in pipeline.__all__]
    callables = [e for e in exports if inspect.isclass(e) or inspect.isfunction(e)]
    assert all(inspect.getdoc(export) for export in callables)
