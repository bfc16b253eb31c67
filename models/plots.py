"""These functions draw the figures of a run, as PNG."""

import io
import math
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BEFORE, AFTER, INK, MUTED = "#e07a2f", "#2563a8", "#1f2933", "#7b8794"
LN_2 = math.log(2)
MAX_PANELS = 4
WIDTH_IN = 9.0
DOTS_PER_INCH = 170
STYLE: dict[Any, Any] = {
    "font.size": 10.0,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.edgecolor": "#cbd2d9",
    "axes.labelcolor": INK,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eef1f4",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
}


def loss_png(steps: list[dict], validation: list[dict], entropy_nats: float, unit: str = "byte") -> bytes:
    """Draws training and validation loss over steps, above what frequencies alone reach.

    Args:
        steps: the recorded steps.
        validation: the recorded validations, at least one.
        entropy_nats: what frequencies alone reach, in nats per token.
        unit: what a token is called.
    """
    with rc_context(STYLE):
        figure, axes = _figure(3.8)
        axes.plot([r["step"] for r in steps], [r["loss"] for r in steps], color="#a9c1dc", lw=1.1, label="training")
        xs, ys = [r["step"] for r in validation], [r["loss"] for r in validation]
        axes.plot(xs, ys, color=AFTER, marker="o", ms=4, label="validation")
        axes.axhline(entropy_nats, color=MUTED, ls=(0, (4, 3)), lw=1.3)
        _note(axes, 0.995, entropy_nats, f"{unit}-unigram entropy {entropy_nats:.2f}", MUTED, 4)
        axes.annotate(f"{ys[-1]:.2f}", (xs[-1], ys[-1]), (6, 0), textcoords="offset points", va="center", color=AFTER)
        axes.set(xlabel="step", ylabel=f"loss [nats per {unit}]", xlim=(0, 1.05 * xs[-1]))
        in_bits = axes.secondary_yaxis(
            "right", functions=(lambda n: np.divide(n, LN_2), lambda b: np.multiply(b, LN_2))
        )
        in_bits.set_ylabel(f"[bits per {unit}]")
        in_bits.spines["right"].set_visible(False)
        axes.legend(frameon=False, loc="upper center")
        return _png(figure)


def imbalance_png(steps: np.ndarray, before: np.ndarray, after: np.ndarray) -> bytes:
    """Draws `max / mean` of the load over steps; lines are means over layers, bands reach from least to most.

    Args:
        steps: `[steps]`, the number of each step.
        before: `[steps, layers]`, the imbalance under plain expert parallelism.
        after: `[steps, layers]`, the imbalance under the plan.
    """
    with rc_context(STYLE):
        figure, axes = _figure(3.4)
        for values, color, name in (
            (before, BEFORE, "before: every expert at home"),
            (after, AFTER, "after balancing"),
        ):
            axes.fill_between(steps, values.min(1), values.max(1), color=color, alpha=0.16, lw=0)
            axes.plot(steps, values.mean(1), color=color, label=name)
        axes.set(xlabel="step", ylabel="imbalance  (max / mean load)", xlim=(0, steps[-1]), ylim=(0, None))
        axes.axhline(1, color=MUTED, ls=(0, (4, 3)), lw=1.2)
        _note(axes, 0.995, 1, "perfect balance", MUTED, -12)
        axes.legend(frameon=False, loc="upper left", ncols=2, bbox_to_anchor=(0, 1.12), borderaxespad=0)
        return _png(figure)


def speed_png(steps: list[dict]) -> bytes:
    """Draws the time of each step, and how often the fullest receive buffer of a layer was filled in it.

    Args:
        steps: the recorded steps.
    """
    with rc_context(STYLE):
        figure = Figure((WIDTH_IN, 3.6), layout="constrained")
        above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
        numbers = [row["step"] for row in steps]
        above.plot(numbers, [row["step_time_s"] * 1e3 for row in steps], color=AFTER, lw=1.1)
        above.set(ylabel="step [ms]", xlim=(0, numbers[-1]), ylim=(0, None))
        below.step(numbers, [row["rounds_max"] for row in steps], color=BEFORE, where="mid", lw=1.1)
        below.set(xlabel="step", ylabel="most rounds", ylim=(0, None))
        return _png(figure)


def counts_png(counts: np.ndarray) -> bytes:
    """Draws heat maps of the copies that each rank routes to each expert, from counts `[layers, R, E]` of a step."""
    return _heat_maps([(counts, "rank that holds the token")])


def served_png(counts: np.ndarray, quota: np.ndarray) -> bytes:
    """Draws heat maps of the token copies that each rank serves, by expert: at home, and by the plan of a step.

    Args:
        counts: `[layers, R, E]`, what each rank routes to each expert.
        quota: `[layers, E, R]`, what each rank serves of each expert.
    """
    _, num_ranks, num_experts = counts.shape
    home = np.arange(num_experts) // (num_experts // num_ranks) == np.arange(num_ranks)[:, None]
    return _heat_maps([(home * counts.sum(1, keepdims=True), "before: rank"), (quota.swapaxes(1, 2), "after: rank")])


def _heat_maps(rows: list[tuple[np.ndarray, str]]) -> bytes:
    """Draws a row of panels, one per layer, for each array `[layers, R, E]` with its label; one scale for all."""
    num_layers, num_ranks, num_experts = rows[0][0].shape
    num_home, top = num_experts // num_ranks, max(values.max() for values, _ in rows)
    with rc_context({**STYLE, "axes.grid": False}):
        figure, grid = _panels(num_layers, 0.5 + 2.2 * len(rows), len(rows))
        for (values, label), panels in zip(rows, grid, strict=True):
            for axes, layer in panels:
                # A step without tokens would have a scale of no width.
                image = axes.imshow(values[layer], cmap="Blues", vmin=0, vmax=max(top, 1), aspect="auto")
                for edge in range(num_home, num_experts, num_home):
                    axes.axvline(edge - 0.5, color="white", lw=1.6)
                axes.set_xticks(_ticks(num_experts), labels=map(str, _ticks(num_experts)))
            panels[0][0].set_ylabel(label)
        for axes, layer in grid[0]:
            axes.set_title(f"layer {layer + 1}")
        for axes, _ in grid[-1]:
            axes.set_xlabel("expert")
        everywhere = [axes for panels in grid for axes, _ in panels]
        figure.colorbar(image, ax=everywhere, label="token copies", pad=0.012, aspect=24 * len(rows))
        return _png(figure)


def load_png(before: np.ndarray, after: np.ndarray) -> bytes:
    """Draws the token copies that each rank serves before and after balancing, from loads `[layers, R]` of a step."""
    ranks = np.arange(before.shape[1])
    with rc_context({**STYLE, "axes.grid.axis": "y"}):
        figure, (panels,) = _panels(len(before), 2.9)
        for axes, layer in panels:
            axes.bar(ranks - 0.2, before[layer], 0.4, color=BEFORE, label="before")
            axes.bar(ranks + 0.2, after[layer], 0.4, color=AFTER, label="after")
            axes.axhline(before[layer].mean(), color=INK, ls=(0, (4, 3)), lw=1, label="mean")
            axes.set(title=f"layer {layer + 1}", xlabel="rank")
            axes.set_xticks(_ticks(len(ranks)), labels=map(str, _ticks(len(ranks))))
        panels[0][0].set_ylabel("token copies served")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        return _png(figure)


def _figure(height_in: float) -> tuple[Figure, Axes]:
    figure = Figure((WIDTH_IN, height_in), layout="constrained")
    return figure, figure.subplots()


def _panels(num_layers: int, height_in: float, num_rows: int = 1) -> tuple[Figure, list[list[tuple[Axes, int]]]]:
    """Makes rows with one panel per layer, at most `MAX_PANELS`, whose layers are spread from first to last."""
    layers = np.unique(np.linspace(0, num_layers - 1, min(num_layers, MAX_PANELS)).round().astype(int))
    figure = Figure((WIDTH_IN, height_in), layout="constrained")
    grid = figure.subplots(num_rows, len(layers), sharex=num_rows > 1, sharey=True, squeeze=False)
    return figure, [list(zip(row, layers, strict=True)) for row in grid]


def _ticks(count: int) -> list[int]:
    return list(range(0, count, max(1, -(-count // 8))))


def _note(axes: Axes, x: float, y: float, text: str, color: str, offset_points: float) -> None:
    """Writes text at the right end of the horizontal line at `y`."""
    place = axes.get_yaxis_transform()
    axes.annotate(
        text,
        (x, y),
        (0, offset_points),
        xycoords=place,
        textcoords="offset points",
        ha="right",
        color=color,
        fontsize=9,
    )


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return buffer.getvalue()
