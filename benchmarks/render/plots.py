"""Plots of results as SVG."""

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.render.results import Table, Value

TEXT = {"light": "#1f2328", "dark": "#e6edf3"}
"""Color of texts and axes of the pictures of the README, by theme."""

GAIN_COLORS = ("#d9622b", "#2a9dbf", "#8f6fc4", "#5aa469", "#c2a131", "#9da7b3")
"""Colors of the pairs of systems and rates in the picture of gains."""

COMPARED = {
    "plain, worst-case buffer": ("plain, worst-case buffer", "#d9622b"),
    "plain, in rounds": ("plain, in rounds", "#d9622b"),
    "capacity 1.25": ("capacity 1.25, drops {:.0%}", "#9da7b3"),
    "exact": ("exact", "#2a9dbf"),
}
"""Label and color of the systems in the picture of one rank, with the share of dropped copies."""


def figures_of(tables: Mapping[str, Table]) -> dict[str, Figure]:
    """Return all plots of one benchmark's tables by name."""
    figures = {"zipf-imbalance": bars(tables["zipf"], "imbalance")} if "zipf" in tables else {}
    if compared := [table for table in tables.values() if _published(table)]:
        figures["deviations"] = deviations(compared)
    if "rank-qwen3" in tables:
        figures |= {f"rank-{name}": one_rank(tables["rank-qwen3"], text) for name, text in TEXT.items()}
    if "gains" in tables:
        figures |= {f"gains-{name}": gains(tables["gains"], text) for name, text in TEXT.items()}
    return figures


def svg(figure: Figure) -> str:
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "results"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def middle(value: Value) -> tuple[float, float, float]:
    if isinstance(value, (int, float)):
        return value, value, value
    if value is None or isinstance(value, str):
        raise TypeError(f"{value!r} is neither a number nor a median with a range")
    first, low, high = map(float, value)
    return first, low, high


def bars(table: Table, column: str) -> Figure:
    """Return a bar chart with one bar and range per row."""
    at = list(table.columns).index(column)
    rows = [row for row in table.rows if row[at] is not None]
    values, low, high = np.array([middle(row[at]) for row in rows]).T
    figure = Figure(figsize=(7, 0.6 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh([str(row[0]) for row in rows], values, xerr=[values - low, high - values], color="C0", alpha=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(column)
    _plain(axes)
    return figure


def _published(table: Table) -> list[tuple[float, float]]:
    """Return published and simulated numbers of a comparison."""
    titles = list(table.columns)
    at = [i for i, title in enumerate(titles) if title.startswith(("published", "simulated"))]
    if len(at) != 2 or "deviation, %" not in titles:
        return []
    pairs = [(row[at[0]], row[at[1]]) for row in table.rows]
    return [(a, b) for a, b in pairs if isinstance(a, (int, float)) and isinstance(b, (int, float)) and a > 0 < b]


def deviations(tables: Sequence[Table]) -> Figure:
    """Plot simulated over published numbers, with a shaded band of 10 %."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, table in enumerate(tables):
        published, simulated = np.array(_published(table)).T
        label = table.title if len(table.title) < 60 else f"{table.title[:57]}..."
        marker = "osD^v*XP"[number // 10 % 8]
        off = 100 * (simulated / published - 1)
        axes.plot(published, off, marker, ms=5, alpha=0.7, color=f"C{number % 10}", label=label)
    axes.axhline(0, color="0.5", lw=1)
    axes.axhspan(-10, 10, color="0.9", zorder=0)
    axes.set(xscale="log", xlabel="published", ylabel="deviation of the simulated number, %")
    axes.legend(fontsize=6, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    _plain(axes)
    return figure


def one_rank(table: Table, text: str) -> Figure:
    """Plot time and memory of the slowest rank under skew 4, and its time at an even load, as bars of each system."""
    rows = {(row["skew"], row["system"]): row for row in table.dicts()}
    skewed, even = ([rows[skew, system] for system in COMPARED] for skew in ("4", "even"))
    with _theme(text):
        figure = Figure(figsize=(8, 2.1), layout="constrained")
        figure.patch.set_alpha(0)
        panels = figure.subplots(1, 3, sharey=True)
        _compare(panels[0], "ms, 4 x the mean load", [row["ms"] for row in skewed], ".1f")
        _compare(panels[1], "GB, 4 x the mean load", [row["GB"] for row in skewed], ".1f")
        _compare(panels[2], "ms, even load", [row["ms"] for row in even], ".1f")
        dropped = [row["dropped copies"] for row in skewed]
        labels = [label.format(share) for (label, _), share in zip(COMPARED.values(), dropped, strict=True)]
        panels[0].set_yticks(range(len(labels)), labels)
        panels[0].invert_yaxis()
        return figure


def gains(table: Table, text: str) -> Figure:
    """Plot the gain against the imbalance, for each pair of systems: measured with its range, and predicted."""
    of_links: dict[str, list[Sequence[Value]]] = {}
    for system, baseline, rate, *row in table.rows:
        of_links.setdefault(f"{system} over {baseline}, {middle(rate)[0] / 1000:g} Gbit/s", []).append(row)
    with _theme(text):
        figure = Figure(figsize=(8, 4), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        for (label, rows), color in zip(of_links.items(), GAIN_COLORS, strict=True):
            levels, _, predicted, measured = zip(*rows, strict=True)
            values, low, high = np.array([middle(value) for value in measured]).T
            axes.errorbar(levels, values, [values - low, high - values], fmt="o-", ms=4, color=color, label=label)
            axes.plot(levels, predicted, "--", lw=1, color=color)
        axes.axhline(1, color="#9da7b3", lw=1)
        axes.set_xlabel("imbalance (max / mean load of the ranks)")
        axes.set_ylabel("tokens/s, relative")
        figure.legend(loc="outside lower center", ncols=2, frameon=False, title="dashed: predicted", fontsize=8)
        _plain(axes)
        return figure


def _theme(text: str) -> AbstractContextManager[None]:
    """Return a context with the text color of a theme."""
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), text)
    return rc_context({**colors, "font.size": 10, "font.family": "sans-serif"})


def _compare(axes: Axes, title: str, values: Sequence[Value], spec: str) -> None:
    lengths = [middle(value)[0] for value in values]
    drawn = axes.barh(range(len(lengths)), lengths, color=[color for _, color in COMPARED.values()])
    axes.bar_label(drawn, [format(length, spec) for length in lengths], padding=3)
    axes.margins(x=0.2)
    axes.set_title(title, fontsize=10)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.patch.set_alpha(0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
