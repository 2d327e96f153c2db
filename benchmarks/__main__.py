"""Runs one benchmark by name: `python -m benchmarks NAME [--json] [options]`."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import benchmarks

# Modules of this package that are no benchmarks.
SUPPORT = frozenset(
    {"__main__", "bare", "exchanged", "peers", "pulse", "report", "simulated"}
)


def names() -> list[str]:
    """Names of all benchmarks, sorted."""
    found = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)}
    return sorted(found - SUPPORT)


def main(argv: list[str]) -> int:
    """Run the benchmark that `argv` names and return the exit code."""
    if not argv or argv[0] not in names():
        wrong = f"no benchmark {argv[0]!r}; " if argv else ""
        print(f"{wrong}benchmarks: {', '.join(names())}", file=sys.stderr)
        return 2 if argv else 0
    code = importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:])
    return int(code or 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
