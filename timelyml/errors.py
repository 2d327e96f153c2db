"""Every exception class of timelyml, grouped by whose fault it is.

The groups are the user's graph, the user's function, a peer or the network,
placement, the program, and ours (`InvariantError`). Values that a message quotes are
also attributes, and every error survives pickling, since errors cross processes.
"""

from __future__ import annotations

from typing import Any, Self

MAX_SUMMARY_CHARACTERS = 2_000


class TimelyError(Exception):
    """Base of every error that timelyml raises on purpose.

    Keyword arguments become attributes, so that a program need not parse the
    message; they survive pickling.
    """

    def __init__(self, message: str, **values: Any) -> None:
        super().__init__(message)
        self.values = values
        for key, value in values.items():
            setattr(self, key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.values)

    def anew(self) -> Self:
        """Return an equal error that was never raised.

        For one that is handed out several times: a raised error holds the frames that
        it passed, and so all their variables, as long as it is kept.
        """
        make, parts = self.__reduce__()
        error: Self = make(*parts)
        error.__cause__ = self.__cause__
        if notes := getattr(self, "__notes__", None):
            error.__notes__ = list(notes)
        return error


def _rebuild(cls: type[TimelyError], message: str, values: dict[str, Any]) -> Any:
    return cls(message, **values)


class GraphError(TimelyError):
    """The dataflow graph is not one that can run."""


class DuplicateNameError(GraphError):
    """Two operators, scopes or loops of one dataflow ask for the same name."""


class ForeignStreamError(GraphError):
    """A stream, scope or loop of one dataflow is used in another."""


class ScopeError(GraphError):
    """A stream is used in a scope that it has not entered, or leaves none."""


class LoopError(GraphError):
    """A feedback loop is never connected, connected twice, or holds no operator."""


class CycleError(GraphError):
    """A cycle of the graph does not advance time; `path` names its operators."""


class ShardCountError(GraphError):
    """Shard counts of two operators, a pact or a placement do not fit together."""


class DenseEdgeError(GraphError):
    """A dense edge leaves an operator that need not fire once per time."""


class TimeError(TimelyError):
    """A timestamp is malformed or moves backwards."""


class CapabilityError(TimelyError):
    """An operator used a right to send that it does not hold."""


class PayloadError(TimelyError):
    """A payload is not a list of records or columns of one length."""


class UnreadableError(PayloadError):
    """A record was pickled where it was sent and does not unpickle where it came to.

    `__cause__` is what its class raised; `rest` what came with it.
    """

    rest: Any = None


class SchemaError(PayloadError):
    """A stream's columns are not those that were declared, or that came first."""

    column: str | None = None


class RoutingError(TimelyError):
    """A destination lies outside the shards of the receiving operator."""


class ShippingError(TimelyError):
    """User code or a captured object cannot be shipped to workers."""


class ConfigError(TimelyError):
    """An option has a value that cannot work."""


class ScheduleError(TimelyError):
    """A pipeline schedule cannot run; says why in a word, and where it is known."""

    reason: str = ""
    rank: int | None = None
    row: int | None = None
    action: str | None = None


class ScheduleDeadlockError(ScheduleError):
    """Ranks of a pipeline wait for each other for ever; `cycle` tells the waits."""

    cycle: tuple[str, ...] = ()


class OperatorError(TimelyError):
    """A user's function raised inside an operator.

    `__cause__` is the user's own exception; `traceback_text` its traceback.
    """


class LoopLimitError(OperatorError):
    """A record goes round a loop more often than the loop's limit allows."""


class StateLimitError(OperatorError):
    """An operator retains more state than its limit allows."""


class PeerError(TimelyError):
    """A worker process died, never came, or stopped answering."""


class PeerLostError(PeerError):
    """A message cannot be sent, because the link to its peer is dead."""


class WireError(TimelyError):
    """A frame is malformed, truncated, foreign or of another version."""


class DeadlineError(TimelyError):
    """Something did not happen in the time that the caller allowed."""


class ReentryError(TimelyError):
    """A callback waits for what only its own thread could bring about."""


class RunStoppedError(TimelyError):
    """The run was cancelled or its cluster closed before it was complete."""


class TapeError(TimelyError):
    """A captured stream cannot be written or read."""


class CheckpointError(TimelyError):
    """A checkpoint cannot be written or read, or is of another model."""


class PlacementError(TimelyError):
    """A shard or computation cannot be placed as asked."""


class SliceError(PlacementError):
    """A virtual slice cannot be given as asked; `available` says what there is."""


class SpillError(TimelyError):
    """A queue cannot spill: the disk is full or its directory is not writable."""


# The program


class ProgramError(TimelyError):
    """A program of compiled functions asks for what it cannot have."""


class TraceError(ProgramError):
    """A compiled function or a program cannot be traced, or a function not compiled.

    `__cause__` is what JAX, XLA or the function raised; `where` is the user's line, and
    `host` who was to compile it.
    """

    function: str = ""
    where: str = ""
    host: str = ""


class ComputationError(ProgramError):
    """A check or a host callback of a compiled function failed while it ran.

    `where` is the user's line.
    """

    function: str = ""
    where: str = ""


class AdmissionError(ProgramError):
    """A client has as much waiting as it may."""


class MemoryLimitError(ProgramError):
    """A program can never fit into memory; `holders` name what is in its way."""


class HandleError(ProgramError):
    """A handle is unknown, or its value was given away, or never came to be."""


class BufferLostError(HandleError):
    """The value of a handle went with the devices that held it."""


class InvariantError(TimelyError):
    """timelyml broke one of its own invariants: a bug here, not in user code."""


class LaunchOrderError(InvariantError):
    """A host was told to launch out of sequence."""


class ProgressProtocolError(InvariantError):
    """A progress batch is a duplicate, out of sequence, or of another generation."""


def text_of(error: BaseException) -> str:
    """Return what an exception says, whatever its `__str__` does."""
    try:
        return str(error)
    except BaseException as problem:  # noqa: BLE001  of the user's
        return f"(its __str__ raised {type(problem).__name__})"


def summary_of(error: BaseException) -> str:
    """Return type and message on one line.

    >>> summary_of(KeyError("x"))
    "KeyError: 'x'"
    """
    text = shortened(text_of(error), MAX_SUMMARY_CHARACTERS).replace("\n", " ")
    return f"{type(error).__name__}: {text}"


def shortened(text: str, limit: int) -> str:
    """Cut the middle out: the beginning and the end tell the most."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"
