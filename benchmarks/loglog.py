"""Powers of sizes: fitted to times, and drawn on logarithmic axes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

Curve = tuple[Sequence[float], Sequence[Sequence[float]]]
"""Sizes, and for each of them `[median, low, high]` of its seconds."""


def exponents(sizes: np.ndarray, times_s: np.ndarray) -> np.ndarray:
    """The powers `p` of `time = c * prod(size ** p)` that fit best, by least squares of logarithms.

    Args:
        sizes: `[points, kinds]`.
        times_s: `[points]`.

    Returns:
        `[kinds + 1]`: the powers, and by which factor a point is off, as a geometric mean.
    """
    sizes = np.asarray(sizes, float)
    unknown = np.column_stack([np.log(sizes), np.ones(len(sizes))])
    found = np.linalg.lstsq(unknown, np.log(times_s))[0]
    off = np.log(times_s) - unknown @ found
    return np.append(found[:-1], np.exp(np.sqrt(np.mean(off**2))))


def draw(panels: Mapping[str, Mapping[str, Curve]], labels: Mapping[str, str], path: Path) -> None:
    """Write a panel for each group of curves, as a PNG.

    Args:
        panels: curves by their names, by the title of their panel.
        labels: what a panel's sizes are.
        path: the file.
    """
    figure = Figure(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name, (sizes, spreads) in curves.items():
            middle, low, high = 1e3 * np.asarray(spreads).T
            axes.errorbar(sizes, middle, (middle - low, high - middle), fmt="o-", ms=3, lw=1, capsize=2, label=name)
        axes.set(xscale="log", yscale="log", xlabel=labels[title], ylabel="ms, median and range", title=title)
        axes.set_xticks(sorted({size for sizes, _ in curves.values() for size in sizes}))
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params("x", rotation=60)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    # Without the version of matplotlib, so that the same numbers make the same file.
    figure.savefig(path, dpi=100, metadata={"Software": None})
