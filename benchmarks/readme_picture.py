"""Draw the load of each rank before and after balancing, for the README and the first page of the site.

    python -m benchmarks.readme_picture    # writes docs/load-light.svg and docs/load-dark.svg

The loads are those of one microbatch of the Zipf workload of `bench_systems`: 8 ranks x 1,024 tokens, 32 experts,
top-4.
The planner of `exact` plans for its counts; no layer runs. The same version of matplotlib writes the same files.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.bench_systems import SIZES, zipf
from benchmarks.plots import svg
from jax_moe_lb import Topology
from jax_moe_lb.core import load, plain_plan
from jax_moe_lb.layer.systems import exact

FOLDER = Path(__file__).parents[1] / "docs"
SEED = 3
"""First microbatch counted by `bench_systems`."""

HEADROOM = 1.05
"""Rows of the receive buffer over the mean load, the default of `Buffers`."""


@dataclass(frozen=True)
class Colors:
    """Colors of one theme.

    Args:
        text: labels and axes.
        line: the size of the receive buffer.
        fits: the part of a load inside the receive buffer.
        above: the part of a load above it.
    """

    text: str
    line: str
    fits: str
    above: str


THEMES = {
    "light": Colors(text="#1f2328", line="#57606a", fits="#17799a", above="#d9622b"),
    "dark": Colors(text="#e6edf3", line="#9da7b3", fits="#4fb3cc", above="#ff9d5c"),
}


def loads() -> tuple[np.ndarray, np.ndarray]:
    """Return the loads `[R]` of `plain` and of `exact` over their mean."""
    experts = np.argsort(-zipf(SEED), axis=-1, kind="stable")[:, : SIZES.per_tok]
    by_rank = experts.reshape(SIZES.num_ranks, -1)
    counts = np.stack([np.bincount(row, minlength=SIZES.num_experts) for row in by_rank]).astype(np.int32)
    topology, system = Topology.flat(SIZES.num_ranks), exact()
    slots = SIZES.num_experts // SIZES.num_ranks + system.replica_slots
    before = plain_plan(counts, topology, slots=slots)
    after, _ = system.balancer.rebalance(counts, before, topology, system.balancer.init(counts.shape))
    both = np.asarray(load(before)), np.asarray(load(after))
    return both[0] / both[0].mean(), both[1] / both[1].mean()


def draw(before: np.ndarray, after: np.ndarray, colors: Colors) -> str:
    """Return an SVG with one panel for each of two loads `[R]`."""
    text = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), colors.text)
    with rc_context({**text, "font.size": 10, "font.family": "sans-serif"}):
        figure = Figure(figsize=(6.4, 2.6), layout="constrained")
        figure.patch.set_alpha(0)
        panels = figure.subplots(1, 2, sharey=True)
        _bars(panels[0], "Before: plain expert parallelism", before, colors)
        _bars(panels[1], "After: exact, 2 replica slots", after, colors)
        panels[0].set_ylabel("load / mean load")
        panels[1].annotate(
            f"receive buffer, {HEADROOM}",
            (len(after) - 0.5, HEADROOM),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
            color=colors.line,
        )
        return svg(figure)


def _bars(axes: Axes, title: str, loads: np.ndarray, colors: Colors) -> None:
    ranks = np.arange(len(loads))
    axes.bar(ranks, np.minimum(loads, HEADROOM), color=colors.fits)
    axes.bar(ranks, np.maximum(loads - HEADROOM, 0), bottom=HEADROOM, color=colors.above)
    axes.axhline(HEADROOM, color=colors.line, lw=1, ls="--")
    axes.set_title(f"{title}\nbusiest rank {loads.max():.2f} x mean", fontsize=10)
    axes.set_xlabel("rank")
    axes.set_xticks(ranks)
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Write one file for each theme."""
    both = loads()
    for name, colors in THEMES.items():
        (FOLDER / f"load-{name}.svg").write_text(draw(*both, colors))


if __name__ == "__main__":
    main()
