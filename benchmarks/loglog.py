"""Power laws fitted to times, and log-log plots."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

Curve = tuple[Sequence[float], Sequence[Sequence[float]]]
"""Sizes, and `[median, low, high]` seconds for each."""


def exponents(sizes: np.ndarray, times_s: np.ndarray) -> np.ndarray:
    """Fit the exponents `p` of `time = c * prod(size ** p)` by least squares of logarithms.

    Args:
        sizes: `[points, kinds]`.
        times_s: `[points]`.

    Returns:
        `[kinds + 1]`: the exponents, and the error factor of a point as a geometric mean.
    """
    sizes = np.asarray(sizes, float)
    unknown = np.column_stack([np.log(sizes), np.ones(len(sizes))])
    found = np.linalg.lstsq(unknown, np.log(times_s))[0]
    off = np.log(times_s) - unknown @ found
    return np.append(found[:-1], np.exp(np.sqrt(np.mean(off**2))))


def draw(panels: Mapping[str, Mapping[str, Curve]], labels: Mapping[str, str], path: Path) -> None:
    """Write a PNG with one panel per group of curves.

    Args:
        panels: curves by name, by panel title.
        labels: axis label of the sizes, by panel title.
        path: output file.
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
    # Omit the version of matplotlib: equal numbers give an equal file.
    figure.savefig(path, dpi=100, metadata={"Software": None})
