"""Sources that follow a script: what each shard sends, and when it ends, fails or waits.

Source:
    bytewax.testing (TestingSource, EOF, ABORT, PAUSE), with a script for each shard, so
    that it means the same on any number of workers.
"""

from __future__ import annotations

import secrets
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from timelyml.errors import ConfigError, TimelyError
from timelyml.exchange import as_payload
from timelyml.fluent import Dataflow, Stream
from timelyml.operators.readers import FunctionReader, Pieces
from timelyml.operators.sources import read_from
from timelyml.runtime.shard import Shard


class AbortedError(TimelyError):
    """A run came to an ABORT in the script of a source."""


class Mark(Enum):
    """A step of a script that sends nothing."""

    EOF = "the shard has nothing more to send; a run that resumes here goes on behind"
    ABORT = "the run fails with `AbortedError`, once; a later run goes on behind it"


EOF: Final = Mark.EOF
ABORT: Final = Mark.ABORT


@dataclass(frozen=True, slots=True)
class PAUSE:
    """A step that lets time pass, by the clock of the worker; others work meanwhile.

    Attributes:
        seconds: How much, at least.
    """

    seconds: float


class Script:
    """A reader for sources: the steps of each shard, by index.

    The file that marks an ABORT as done is removed with the script that the driver has;
    the copies in workers only know its path.
    """

    def __init__(self, steps: Sequence[Sequence[Any]]) -> None:
        self.steps = [list(each) for each in steps]
        name = f"timelyml-script-{secrets.token_hex(8)}"
        self._done = str(Path(tempfile.gettempdir(), name))
        weakref.finalize(self, _remove, self._done, len(self.steps))

    def pieces(self, shard: Shard, position: tuple[int, int]) -> Pieces:
        """Follow the script of one shard, from payload `position[0]` on."""

        def play(_shard: int, _num_shards: int) -> Iterator[Any]:
            return self._play(shard, position[0])

        return FunctionReader(shard.operator, play, None).pieces(shard, position)

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _play(self, shard: Shard, num_skipped: int) -> Iterator[Any]:
        num_read = num_aborts = 0
        for step in self.steps[shard.index]:
            if step is ABORT:
                num_aborts += 1
                if num_read >= num_skipped:
                    self._abort(shard, num_aborts)
            elif step is EOF:
                if num_read > num_skipped or not num_skipped:
                    return
            elif not isinstance(step, PAUSE):
                num_read += step is not None
                yield step
            elif num_read >= num_skipped:
                until = shard.now() + step.seconds
                while shard.now() < until:
                    yield None

    def _abort(self, shard: Shard, num_aborts: int) -> None:
        """Fail, unless an earlier run has failed here already."""
        done = Path(f"{self._done}-{shard.index}")
        number = int(done.read_text()) if done.exists() else 0
        if num_aborts > number:
            done.write_text(str(num_aborts))
            raise AbortedError(
                f"source {shard.operator!r} aborts on shard {shard.index}, as its script "
                f"says; run the flow again to go on behind it",
                source=shard.operator,
                shard=shard.index,
            )


def scripted(
    flow: Dataflow,
    *steps: Sequence[Any],
    regular: bool = False,
    name: str | None = None,
) -> Stream:
    """Return the stream of a source with a script for each of its shards.

    A step is a payload, which is an epoch of its own; `(epoch, payload)`, with epochs
    that never decrease; `EOF`, `ABORT` or `PAUSE(seconds)`.

    Args:
        flow: The dataflow.
        steps: Of shard 0, of shard 1, ...; there are as many shards, on any number of
            workers.
        regular: See `Dataflow.source`.
        name: Shown in traces and errors.

    Raises:
        ConfigError: There are no steps.
        PayloadError: A step is none of the above.

    >>> flow = Dataflow()
    >>> _ = scripted(flow, [[1, 2], EOF, [3]], [[10], PAUSE(0.01), [20]]).collect()
    >>> flow.run().batches("out")
    [(0, [1, 2]), (0, [10]), (1, [20])]
    """
    if not steps:
        raise ConfigError(
            f"source {name or 'scripted'!r} has no script; got no steps; expected a list "
            f"of steps for each shard; pass at least one"
        )
    for step in (step for each in steps for step in each):
        if not isinstance(step, (Mark, PAUSE)):
            is_timed = isinstance(step, tuple) and isinstance(step[0], int)
            as_payload(step[1] if is_timed else step)
    ref = read_from(
        flow.builder,
        Script(steps),
        kind="scripted",
        num_shards=len(steps),
        regular=regular,
        name=name,
    )
    return Stream(flow, ref)


def _remove(path: str, num_shards: int) -> None:
    for shard in range(num_shards):
        Path(f"{path}-{shard}").unlink(missing_ok=True)
