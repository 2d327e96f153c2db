"""The fluent API: `Dataflow` and `Stream`, thin methods over the operators.

A method adds to the graph and returns at once; nothing runs before `run` or `start`.
What the operators do is documented with them, in `timelyml.operators`. The methods stand
in families, one a file, as `docs/operators.md` lists them.

>>> from timelyml import Dataflow
>>> flow = Dataflow("words")
>>> words = flow.source(["to be or", "not to be"]).flat_map(str.split)
>>> _ = words.reduce(lambda w: w, lambda a, b: a + b, value=lambda w: 1).collect()
>>> sorted(flow.run()["out"])
[('be', 2), ('not', 1), ('or', 1), ('to', 2)]
"""

from __future__ import annotations

from timelyml.fluent.dataflow import Dataflow, Loop, Stream
from timelyml.fluent.running import Mode

__all__ = ["Dataflow", "Loop", "Mode", "Stream"]
