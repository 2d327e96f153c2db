"""The picture of a run: how well it learnt, and how experts share the work over time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from examples.moe_routing.report import NATS_PER_BIT, History, heat_map


def save_picture(history: History, path: Path) -> Path:
    """Save how tokens were shared among experts; as text without matplotlib.

    Returns:
        Where it was written; another suffix if it is text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    shares = history.shares_over_time(200)
    try:
        import matplotlib as mpl  # noqa: PLC0415  optional, and slow to load
    except ImportError:
        path = path.with_suffix(".txt")
        path.write_text(heat_map(shares[..., :100], history.names) + "\n")
        return path
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  after the backend is chosen

    layers, experts, columns = shares.shape
    steps = history.first + np.linspace(0, len(history.losses), columns)
    figure, (upper, *below) = plt.subplots(
        1 + layers, 1, figsize=(9, 2 + 3 * layers), sharex=True
    )
    bits = np.array(history.losses) / NATS_PER_BIT
    upper.plot(history.first + np.arange(len(bits)), bits, linewidth=0.8)
    upper.set_ylabel("bits per byte")
    labels = [f"expert {name}" for name in history.names] if experts <= 16 else ()
    for layer, axes in enumerate(below):
        axes.stackplot(steps, shares[layer], labels=labels)
        for share in np.arange(1, experts) / experts:  # where all would be equal
            axes.axhline(share, color="white", linewidth=0.4)
        axes.set_ylabel(f"layer {layer}: share of tokens")
        axes.set_ylim(0, 1)
    if labels:
        below[0].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    below[-1].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
