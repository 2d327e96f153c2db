"""The `timelyml` command: arguments and exit codes; the work is done elsewhere.

What concerns islands and their servers stands in `cli_servers.py`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import reprlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from timelyml.cli_output import FAILED, complain, exit_codes, show
from timelyml.cli_servers import COMMANDS
from timelyml.errors import (
    ConfigError,
    TimelyError,
    summary_of,
)
from timelyml.fluent import Dataflow
from timelyml.runtime.enquiries import ask_drivers
from timelyml.runtime.signals import GuaranteedInterrupt
from timelyml.runtime.stall import StallReport, StallRow

DEFAULT_FLOW = "flow"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Run and inspect timely dataflows.",
)


class Mode(StrEnum):
    """Where the workers of a run live."""

    INLINE = "inline"
    THREADS = "threads"
    PROCESSES = "processes"


class Wire(StrEnum):
    """What carries messages between worker processes."""

    IPC = "ipc"
    TCP = "tcp"


Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FLOW",
        help="A Dataflow, or a function that returns one, in a module or a .py file; "
        "FLOW defaults to 'flow'.",
    ),
]


for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """Run the command line and leave with its exit code."""
    app()


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.")
    ] = False,
) -> None:
    if version:
        typer.echo(f"timelyml {importlib.metadata.version('timelyml')}")
        raise typer.Exit


@app.command()
def run(
    target: Target,
    *,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-w",
            min=1,
            help="Number of worker processes. Default: none, this process works.",
        ),
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option(help="Where workers live, if not in processes.")
    ] = None,
    transport: Annotated[
        Wire | None, typer.Option(help="Between worker processes. Default: ipc.")
    ] = None,
    print_: Annotated[
        list[str] | None,
        typer.Option(
            "--print",
            metavar="NAME",
            help="Print what collect(name) gathered, a record a line; repeatable.",
        ),
    ] = None,
) -> None:
    """Run a dataflow to its end; the first Ctrl-C drains it."""
    with exit_codes():
        flow = _load(target)
        _check_names(flow, print_ or [])
        result = flow.run(
            workers,
            mode=None if mode is None else mode.value,
            transport=None if transport is None else transport.value,
        )
        for name in print_ or []:
            for record in result[name]:
                show(record)


@app.command()
def graph(
    target: Target,
    *,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="A Mermaid diagram instead of text.")
    ] = False,
) -> None:
    """Print a dataflow's graph without running it."""
    with exit_codes():
        flow = _load(target)
        show(flow.to_mermaid() if mermaid else flow.describe())


@app.command()
def why(
    process: Annotated[
        int | None,
        typer.Argument(metavar="[PID]", help="Of one driver only. Default: all."),
    ] = None,
    *,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for an answer.")
    ] = 2.0,
) -> None:
    """Say what the runs wait for that you have going on this machine."""
    with exit_codes():
        found = ask_drivers(timeout_s)
    answers = [each for each in found if process in (None, each["process_id"])]
    for answer in answers:
        for line in _lines_of(answer):
            show(line)
    if not answers:
        whose = "of yours" if process is None else f"with process id {process}"
        complain(f"no driver {whose} has a cluster on this machine")
        raise typer.Exit(FAILED)


def _lines_of(answer: dict[str, Any]) -> Iterator[str]:
    """Show what one session of a driver said."""
    who = f"process {answer['process_id']}"
    if "error" in answer:
        yield f"{who} {answer['error']}"
        return
    yield f"{who}, {answer['program']}, number of workers: {answer['num_workers']}"
    for run in answer["runs"]:
        rows = [StallRow(**row) for row in run["rows"]]
        report = StallReport(run["headline"], tuple(rows), tuple(run["unanswered"]))
        yield from (f"  {line}" for line in str(report).splitlines())
    if not answer["runs"]:
        yield "  no run is going on"
    for worker, doing in answer["workers"].items():
        yield f"  worker {worker} is {doing}"


def _check_names(flow: Dataflow, names: list[str]) -> None:
    """Refuse a name to print before anything runs, rather than after."""
    collected = [spec.name for spec in flow.build().operators if spec.kind == "collect"]
    for name in names:
        if name not in collected:
            raise ConfigError(
                f"dataflow {flow.name!r} collects nothing of that name; got --print "
                f"{name!r}; expected one of {collected}; collect it in the flow"
            )


def _load(target: str) -> Dataflow:
    """Return the dataflow that `module:flow` or `path/to/file.py:flow` names."""
    where, colon, name = target.partition(":")
    name = name if colon else DEFAULT_FLOW
    is_file = where.endswith(".py")
    is_module = all(part.isidentifier() for part in where.split("."))
    if not (is_file or is_module) or not name.isidentifier():
        raise ConfigError(
            f"target {target!r} names no dataflow; got {where!r} for the module and "
            f"{name!r} for the flow; expected MODULE:FLOW, a module name or a path ending "
            "in .py, and a name in it; correct it"
        )
    with GuaranteedInterrupt():  # a user's module may load for long
        found = _found(_file(where) if is_file else _module(where), where, name)
    if not isinstance(found, Dataflow):
        shown = " ".join(reprlib.repr(found).split())
        raise ConfigError(
            f"target {target!r} names no dataflow; got {shown} for {name!r}; expected "
            "a Dataflow or a function without arguments that returns one; correct it"
        )
    return found


def _found(module: ModuleType, where: str, name: str) -> object:
    """Return what a module has under a name, or what the function there returns."""
    with _user_code(f"{name!r} of {where!r}", "made"):
        found: Any = getattr(module, name, None)
        is_made = isinstance(found, Dataflow) or not callable(found)
        return found if is_made else found()


def _module(name: str) -> ModuleType:
    """Import a module from the current directory or the path."""
    sys.path.insert(0, str(Path.cwd()))
    with _user_code(f"module {name!r}", "imported"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there; something that it imports is not
            raise ConfigError(
                f"module {name!r} cannot be found; got no module {error.name!r}; "
                "expected a module importable from here, or a path ending in .py; "
                "correct it"
            ) from None


def _file(name: str) -> ModuleType:
    """Import a file as a script would be, but under its own name."""
    path = Path(name)
    spec = None
    if path.is_file():
        spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(
            f"file {name!r} does not exist; got a path that leads nowhere; expected a "
            "Python file or a module name; correct it"
        )
    sys.path.insert(0, str(path.parent.resolve()))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with _user_code(f"file {name!r}", "imported"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _user_code(what: str, done: str) -> Iterator[None]:
    """Show an exception of the user's own code as Python does, less our frames."""
    try:
        yield
    except TimelyError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  of the user's
        frames = error.__traceback__
        while frames is not None and _is_loader(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next
        if frames is not None and isinstance(error, Exception):  # an exit is told below
            lines = traceback.format_exception(type(error), error, frames)
            typer.echo("".join(lines).rstrip(), err=True)
        raise ConfigError(
            f"{what} cannot be {done}; got {summary_of(error)}; expected no exception; "
            "correct it"
        ) from None


def _is_loader(filename: str) -> bool:
    return filename in (__file__, importlib.__file__) or filename.startswith("<frozen ")
