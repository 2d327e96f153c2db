"""Methods of `Stream` that compute with JAX; they load `timelyml.ml` when called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from timelyml.fluent.base import StreamBase, ref_of
from timelyml.graph import Pact, Placement
from timelyml.runtime.signals import HeldSignals


class ComputeMethods(StreamBase):
    """JAX functions and layers as operators."""

    def compute(
        self,
        fn: Callable[..., Any],
        *others: Self,
        init: Callable[[int], Any] | None = None,
        pact: Pact | Sequence[Pact] | None = None,
        pad: bool = False,
        name: str = "compute",
        num_shards: int | None = None,
        placement: Placement | None = None,
    ) -> Self:
        """Apply a JAX function to all rows of each time, once they are complete.

        Args:
            fn: From columns of this stream and of `others` to columns; with `init`,
                from state and columns to state and columns. Jitted once per worker.
            others: Further arguments of `fn`, from streams of the same scope.
            init: From the index of a shard to its initial state.
            pact: How rows find their shard; default: as the streams are routed.
            pad: Pad rows with zeros to a bucket, so that XLA compiles few shapes.
            name: Shown in traces and errors; the key of its state.
            num_shards: Default: that of this stream.
            placement: Which worker holds which shard.

        >>> import numpy as np
        >>> from timelyml import Dataflow
        >>> def scale(rows):
        ...     return {"x": 2 * rows["x"]}
        >>> flow = Dataflow()
        >>> _ = flow.source({"x": np.arange(3)}).compute(scale).collect()
        >>> [(time, rows["x"].tolist()) for time, rows in flow.run().batches("out")]
        [(0, [0, 2, 4])]
        """
        with (
            HeldSignals()
        ):  # an interrupt breaks JAX while it loads, or gets lost in it
            from timelyml.ml import compute  # noqa: PLC0415  it loads JAX

        return self._with(
            compute(
                [self.ref, *map(ref_of, others)],
                fn,
                init=init,
                pact=pact,
                pad=pad,
                name=name,
                num_shards=num_shards,
                placement=placement,
            )
        )

    def moe(self, layer: Any, params: Any, *, name: str = "moe") -> Self:
        """Apply a mixture-of-experts layer to tokens, its experts spread over shards.

        Args:
            layer: An `ml.MoE`.
            params: Of `layer.init`; each expert's stay with its shard.
            name: Prefix of the operators.

        >>> import jax
        >>> import numpy as np
        >>> from timelyml import Dataflow, ml
        >>> layer, x = ml.MoE(num_experts=4, d_ff=8), np.ones((3, 2), np.float32)
        >>> params = layer.init(jax.random.key(0), x)
        >>> flow = Dataflow(num_shards=1)
        >>> _ = flow.source(x).moe(layer, params).collect()
        >>> ((_, rows),) = flow.run().batches("out")
        >>> bool(np.allclose(rows, layer.dense(params, x)[0], atol=1e-6))
        True
        """
        return self._with(layer.on(self.ref, params, name=name))
