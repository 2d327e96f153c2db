"""What a package exports exists, is documented, and is all that it imports."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent / "timelyml"
PACKAGES = sorted(
    path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/__init__.py")
)


def load(package: str) -> ModuleType:
    return importlib.import_module(f"timelyml.{package.replace('/', '.')}")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_exports_exactly_what_it_imports(package):
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    assert imported == set(getattr(load(package), "__all__", ()))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_export_is_documented(package):
    module = load(package)
    exports = [getattr(module, name) for name in getattr(module, "__all__", ())]
    silent = [
        export.__name__
        for export in exports
        if (inspect.isclass(export) or inspect.isfunction(export))
        and not inspect.getdoc(export)
    ]
    assert silent == []


def test_every_public_error_derives_from_one_base():
    errors = importlib.import_module("timelyml.errors")
    classes = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    ]
    assert all(issubclass(value, errors.TimelyError) for value in classes)
    assert all(value.__doc__ for value in classes)
