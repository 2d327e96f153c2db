from __future__ import annotations

import contextlib
import pickle
import sys
import traceback
from dataclasses import dataclass

import pytest

from timelyml.errors import InvariantError, OperatorError, PeerError, TimelyError
from timelyml.runtime.failure import operator_failure, pack_error, unpack_error
from timelyml.runtime.tracebacks import with_source_lines


class TwoArgumentsError(Exception):
    """Cannot be unpickled the usual way: its constructor wants two arguments."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("no")


class DemandingError(Exception):
    def __new__(cls, one, two):
        return super().__new__(cls, one, two)


class MuteError(Exception):
    def __str__(self):
        raise SystemExit("no words")

    __repr__ = __str__


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class SelfMadeError(Exception):
    """Comes back from pickling as something that is no exception."""

    def __reduce_ex__(self, protocol):
        return str, ("not an exception",)


class ExitingError(Exception):
    """Its rebuilding exits."""

    def __reduce__(self):
        return sys.exit, (3,)


class NotedError(Exception):
    @property
    def __notes__(self):
        raise SystemExit("no notes")


def raised(error):
    with contextlib.suppress(type(error)):
        raise error
    return error


def crossed(error, **values):
    """What the driver gets of an error that a user's function raised."""
    values = {"operator": "map", "worker": 1, "shard": 3, "time": (7, 0)} | values
    return unpack_error(pack_error(operator_failure(raised(error), **values)))


@pytest.mark.parametrize(
    "cause",
    [KeyError("x"), ZeroDivisionError("by 0"), OSError(2, "no file"), PeerError("p")],
)
def test_the_error_is_of_the_users_own_type_and_says_where_it_was(cause):
    error = crossed(cause)
    assert isinstance(error, OperatorError)
    assert isinstance(error, type(cause))
    assert (error.operator, error.worker, error.shard, error.time) == (
        "map",
        1,
        3,
        (7, 0),
    )
    kind = type(cause).__name__
    assert str(error) == (
        f"operator 'map' failed on worker 1, shard 3, at time (7, 0): {kind}: {cause}"
    )
    assert type(error.__cause__) is type(cause)
    assert error.__cause__.args == cause.args


def test_the_traceback_shows_the_users_line_and_none_of_the_runtime():
    error = crossed(ValueError("here"))
    assert "raise error" in error.traceback_text
    assert "timelyml/runtime" not in error.traceback_text
    assert any("raise error" in note for note in error.__notes__)


def test_an_exception_with_its_own_constructor_comes_back_with_its_attributes():
    error = crossed(TwoArgumentsError(5, "bad"))
    assert isinstance(error, TwoArgumentsError)
    assert error.code == 5
    assert error.__cause__.code == 5


def test_an_exception_that_does_not_pickle_still_tells_its_type_and_message():
    error = crossed(UnpicklableError("lost"))
    assert isinstance(error, OperatorError)
    assert "UnpicklableError: lost" in str(error)
    assert "UnpicklableError: lost" in error.traceback_text


def test_a_type_that_cannot_be_combined_is_the_cause_only():
    error = crossed(DemandingError(1, 2))
    assert isinstance(error, OperatorError)
    assert isinstance(error.__cause__, DemandingError)


@pytest.mark.parametrize(
    "cause",
    [MuteError("m"), FrozenError(3), SelfMadeError("s"), ExitingError(), NotedError()],
    ids=lambda cause: type(cause).__name__,
)
def test_an_exception_with_odd_methods_is_named_with_the_place_and_the_traceback(cause):
    error = crossed(cause)
    assert isinstance(error, OperatorError)
    kind = type(cause).__name__
    where = "operator 'map' failed on worker 1, shard 3, at time (7, 0)"
    assert str(error).startswith(f"{where}: {kind}: ")
    assert (error.operator, error.worker, error.shard) == ("map", 1, 3)
    assert "raise error" in error.traceback_text
    assert kind in error.traceback_text


def test_a_huge_message_is_cut_and_keeps_both_ends():
    error = crossed(ValueError("begin" + "x" * 50_000_000 + "finish"))
    assert len(str(error)) < 10_000
    assert len(error.traceback_text) < 200_000
    for text in (str(error), error.traceback_text):
        assert "begin" in text
        assert "finish" in text


def test_an_exit_in_user_code_does_not_end_the_driver():
    error = crossed(SystemExit(3))
    assert not isinstance(error, SystemExit)
    assert isinstance(error, OperatorError)


def test_a_class_that_only_the_script_has_crosses_by_value():
    scope = {"__name__": "__main__"}
    exec("class Mine(LookupError):\n    pass", scope)
    error = crossed(scope["Mine"]("m"))
    assert isinstance(error, LookupError)
    assert type(error.__cause__).__name__ == "Mine"


def test_the_error_survives_pickling_again_with_cause_and_notes():
    error = crossed(KeyError("x"))
    error.add_note("then: more")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, KeyError)
    assert isinstance(again, OperatorError)
    assert str(again) == str(error)
    assert again.__notes__ == error.__notes__
    assert again.__cause__.args == ("x",)


def test_an_error_of_the_worker_itself_keeps_its_type_values_notes_and_cause():
    error = PeerError("worker 0 lost its link", worker=1)
    error.__cause__ = raised(OSError("pipe"))
    error.add_note("noted")
    again = unpack_error(pack_error(error))
    assert type(again) is PeerError
    assert again.worker == 1
    assert again.__notes__ == ["noted"]
    assert isinstance(again.__cause__, OSError)


def test_an_error_that_does_not_pickle_is_replaced_by_one_that_does():
    again = unpack_error(pack_error(InvariantError("broken", what=sys._getframe())))
    assert type(again) is InvariantError
    assert str(again) == "broken"


def test_bytes_that_are_no_error_are_an_error():
    assert isinstance(unpack_error(b"\x80junk"), TimelyError)


def test_source_lines_of_a_notebook_cell_are_added_by_the_driver(monkeypatch):
    import linecache

    cell = "<cell 3>"
    lines = ["a = 1\n", "b = a / 0\n"]
    monkeypatch.setitem(linecache.cache, cell, (10, None, lines, cell))
    text = f'Traceback:\n  File "{cell}", line 2, in f\nZeroDivisionError: x'
    assert with_source_lines(text).split("\n")[2] == "    b = a / 0"


def test_what_python_prints_of_an_error_shows_the_line_of_the_notebook_cell(
    monkeypatch,
):
    import linecache

    cell = "/tmp/ipykernel_1/2.py"
    names = {}
    exec(compile("def divide(n):\n    return n / 0\n", cell, "exec"), names)
    try:
        names["divide"](1)
    except ZeroDivisionError as error:
        failure = operator_failure(
            error, operator="map", worker=0, shard=0, time=0
        )  # as in a worker, which has no such file
    assert "return n / 0" not in "".join(failure.__notes__)
    packed = pack_error(failure)

    lines = ["def divide(n):\n", "    return n / 0\n"]
    monkeypatch.setitem(linecache.cache, cell, (10, None, lines, cell))
    printed = "".join(traceback.format_exception(unpack_error(packed)))

    assert f'File "{cell}", line 2, in divide\n    return n / 0' in printed
