"""How long a computation is expected to take before it has ever run."""

from __future__ import annotations

from timelyml.ml.functions import Computation

LAUNCH_NS = 50_000
"""What a launch costs however little it computes."""

_FLOPS_PER_NS = {"cpu": 4.0, "cuda": 20_000.0, "tpu": 50_000.0}
"""Of one device. Rough, since it only has to say what is surely shorter than a bound."""


def estimate_ns(computation: Computation) -> int:
    """Return about how much device time a computation takes; the same at every call.

    It is no measurement: the scheduler measures, and fusion must not depend on that.
    """
    rate = _FLOPS_PER_NS.get(computation.platform, _FLOPS_PER_NS["cpu"])
    return LAUNCH_NS + round(computation.flops / computation.mesh.size / rate)
