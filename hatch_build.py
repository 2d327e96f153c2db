"""Compiles the modules that epochs and calls pass through, where a wheel is to have them.

They are plain Python, strictly typed, and work as they stand. With
`TIMELYML_COMPILE=1` in the environment mypyc translates them to C while a wheel is
built, and the results go into it beside their sources. Where that fails, for want of a
C compiler say, the wheel is pure Python all the same. An editable install is never
compiled, so no compiled module can stand beside a source that was changed since.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "TIMELYML_COMPILE"
# What mypyc reads beside the sources: types of numpy and pyzmq.
DEPENDENCIES = ["mypy>=1.13", "numpy>=1.26", "pyzmq>=26.0", "setuptools>=65"]
SETUP = """
import os
from mypyc.build import mypycify
from setuptools import setup

options = ["--ignore-missing-imports", "--follow-imports=silent"]
modules = mypycify([*options, *{sources!r}], opt_level="3", debug_level="0", separate=True)
build = {{"inplace": True, "parallel": os.cpu_count()}}
setup(name="timelyml", packages=[], ext_modules=modules, options={{"build_ext": build}})
"""


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds compiled modules to a wheel, if the environment asks for it."""

    def dependencies(self) -> list[str]:
        """Return what a build needs beside hatchling."""
        return DEPENDENCIES if _is_asked_for() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell the builder which files to take along."""
        if version == "editable" or not _is_asked_for():
            return
        self._folder = Path(tempfile.mkdtemp(prefix="timelyml-build-"))
        sources = [f"timelyml/{name}.py" for name in self.config["modules"]]
        compiled = _compile(Path(self.root), self._folder, sources)
        if not compiled:
            self.app.display_warning("timelyml was not compiled: it is pure Python")
            return
        for path in compiled:
            build_data["force_include"][str(path)] = str(path.relative_to(self._folder))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, *_: Any) -> None:
        """Remove what the builder has taken by now."""
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder)


def _is_asked_for() -> bool:
    return os.environ.get(SWITCH, "0") not in ("", "0")


def _compile(root: Path, folder: Path, sources: list[str]) -> list[Path]:
    """Return the compiled modules, in place in a copy of the package; none if it failed."""
    skipped = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(root / "timelyml", folder / "timelyml", ignore=skipped)
    # Its imports lead to all modules; these need a quarter of them to be checked.
    (folder / "timelyml" / "__init__.py").write_text("")
    (folder / "setup.py").write_text(SETUP.format(sources=sources))
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    done = subprocess.run(command, cwd=folder, check=False)  # noqa: S603  our own script
    return sorted(folder.glob("timelyml/**/*.so")) if done.returncode == 0 else []
