"""Records for which a function of the user raised: fail, skip, or a stream of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from timelyml.errors import ConfigError, text_of
from timelyml.runtime.shard import Shard
from timelyml.runtime.tracebacks import user_traceback

T = TypeVar("T")

OnError: TypeAlias = Literal["fail", "skip", "divert"]
"""What happens to a record whose function raises: the run fails, the record is left
out, or it goes to a stream of its own as a `FailedRecord`."""

Note: TypeAlias = Callable[[Any, Exception], object]
"""Takes a record and what its function raised."""


@dataclass(frozen=True, slots=True)
class FailedRecord:
    """A record whose function raised.

    Attributes:
        record: The record, or the whole payload for functions of payloads.
        error_type: Name of the exception's class.
        message: Its text.
        traceback_text: Its traceback, from the user's function on.
        operator: Name of the operator.
    """

    record: Any
    error_type: str
    message: str
    traceback_text: str
    operator: str


class Diverted(NamedTuple, Generic[T]):
    """What an operator with `on_error="divert"` sends."""

    results: T
    failed: T


def check_on_error(operator: str, on_error: Any) -> None:
    """Refuse what is none of the three ways.

    Raises:
        ConfigError: It is not.
    """
    if on_error not in ("fail", "skip", "divert"):
        raise ConfigError(
            f"operator {operator!r} has option 'on_error' out of range; got "
            f"{on_error!r}; expected 'fail', 'skip' or 'divert'; correct the option",
            operator=operator,
            option="on_error",
        )


def noter(shard: Shard, on_error: OnError, failed: list[FailedRecord]) -> Note | None:
    """Return what takes failures of one shard: adds to `failed`, or forgets them.

    None: failures are not to be caught.
    """
    if on_error == "fail":
        return None
    if on_error == "skip":
        return lambda record, error: None  # noqa: ARG005  a Note that forgets

    def note(record: Any, error: Exception) -> None:
        failed.append(failed_record(shard, record, error))

    return note


def failed_record(shard: Shard, record: Any, error: BaseException) -> FailedRecord:
    """Describe a failure; call it where the traceback is alive."""
    return FailedRecord(
        record,
        type(error).__name__,
        text_of(error),
        user_traceback(error),
        shard.operator,
    )
