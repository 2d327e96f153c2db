"""Schedules to test with: golden files, and every generator at random sizes."""

from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st

from timelyml.ml.pipeline import (
    SCHEDULES,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
    zbv,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "schedules"
GENERATORS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved1f1b": interleaved_1f1b,
    "zb1p": zb_h1,
    "interleavedzb": interleaved_zero_bubble,
    "zbv": zbv,
}
FLAT = ("gpipe", "1f1b", "zb-h1")
"""Schedules that with one stage a rank need channels only one message deep."""

MANY = ("interleaved 1f1b", "interleaved zero-bubble")
"""Schedules with any number of stages a rank."""

unhurried = settings(deadline=None, max_examples=60)
"""Large schedules take their time on a busy machine."""

num_ranks = st.integers(1, 6)
num_microbatches = st.integers(1, 13)
small_costs = st.integers(1, 7)


def golden_text(name):
    # The csv format ends lines in "\r\n", and so must what is compared with it.
    return (GOLDEN / name).read_bytes().decode()


def golden_names(kind):
    names = (path.name for path in GOLDEN.glob(f"*.{kind}.csv"))
    return sorted(name for name in names if not name.startswith("negative"))


def generated_for(name):
    """Generate the plan that the golden file called `name` is about."""
    kind, ranks, microbatches = name.split(".")[0].split("_")
    ranks = ranks.removeprefix("S").removesuffix("x2")
    return GENERATORS[kind](int(ranks), int(microbatches.removeprefix("M")))


@st.composite
def schedules(draw, names=tuple(SCHEDULES), max_stages=3):
    name = draw(st.sampled_from(names))
    sizes = draw(num_ranks), draw(num_microbatches)
    if name in MANY:
        return SCHEDULES[name](*sizes, stages_per_rank=draw(st.integers(1, max_stages)))
    if name == "gpipe":
        placement = draw(st.sampled_from(["loop", "v"]))
        stages = draw(st.integers(1, max_stages))
        return gpipe(*sizes, stages_per_rank=stages, placement=placement)
    return SCHEDULES[name](*sizes)
