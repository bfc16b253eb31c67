"""Report of a run: one self-contained HTML file with figures."""

import base64
import io
import math
import time
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from matplotlib import rc_context, rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from models.run_folder.files import write_whole
from models.run_folder.metrics import RECENT_STEPS, RunFolder, summarise

# Colors of the site: orange for plain expert parallelism, petrol for the plan.
BEFORE, AFTER, INK, MUTED = "#d9622b", "#17799a", "#18262e", "#64757f"
LN_2 = math.log(2)
MAX_PANELS = 4
WIDTH_IN = 5.4  # Width of a figure. Its text has 9 pixels on a phone, and 12 in one of the two columns of a wide page.
DOTS_PER_INCH = 220
STYLE: dict[Any, Any] = rc_params_from_file(Path(__file__).with_suffix(".mplstyle"), use_default_template=False)


def loss_png(steps: list[dict], validation: list[dict], entropy_nats: float, unit: str = "byte") -> bytes:
    """Draw training and validation loss over steps, with the unigram entropy for comparison."""
    with rc_context(STYLE):
        figure, axes = _figure(3.2)
        axes.plot([r["step"] for r in steps], [r["loss"] for r in steps], color="#5fa3ba", lw=1.1, label="training")
        xs, ys = [r["step"] for r in validation], [r["loss"] for r in validation]
        axes.plot(xs, ys, color=AFTER, marker="o", ms=4, label="validation")
        axes.axhline(entropy_nats, color=MUTED, ls=(0, (4, 3)), lw=1.3)
        _note(axes, 0.005, entropy_nats, f"{unit}-unigram entropy {entropy_nats:.2f}", MUTED, 4)
        axes.annotate(f"{ys[-1]:.2f}", (xs[-1], ys[-1]), (6, 0), textcoords="offset points", va="center", color=AFTER)
        axes.set(xlabel="step", ylabel=f"loss [nats per {unit}]", xlim=(0, 1.1 * xs[-1]))
        in_bits = axes.secondary_yaxis(
            "right", functions=(lambda n: np.divide(n, LN_2), lambda b: np.multiply(b, LN_2))
        )
        in_bits.set_ylabel(f"[bits per {unit}]")
        in_bits.spines["right"].set_visible(False)
        axes.legend(frameon=False, loc="upper center")
        return _png(figure)


def imbalance_png(steps: np.ndarray, before: np.ndarray, after: np.ndarray) -> bytes:
    """Draw the imbalance `max / mean` over steps: means over layers as lines, ranges over layers as bands."""
    with rc_context(STYLE):
        figure, axes = _figure(3.2)
        for values, color, name in (
            (before, BEFORE, "before: plain expert parallelism"),
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
    """Draw the duration of each step, and its maximum number of rounds over layers."""
    with rc_context(STYLE):
        figure = Figure((WIDTH_IN, 3.2), layout="constrained")
        above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
        numbers = [row["step"] for row in steps]
        above.plot(numbers, [row["step_time_s"] * 1e3 for row in steps], color=AFTER, lw=1.1)
        above.set(ylabel="step [ms]", xlim=(0, numbers[-1]), ylim=(0, None))
        below.step(numbers, [row["rounds_max"] for row in steps], color=BEFORE, where="mid", lw=1.1)
        below.set(xlabel="step", ylabel="max. rounds", ylim=(0, None))
        return _png(figure)


def served_png(counts: np.ndarray, quota: np.ndarray) -> bytes:
    """Draw heat maps of the copies served by each rank, by expert: at home, and by the plan of a step."""
    _, num_ranks, num_experts = counts.shape
    home = np.arange(num_experts) // (num_experts // num_ranks) == np.arange(num_ranks)[:, None]
    return _heat_maps([(home * counts.sum(1, keepdims=True), "before: rank"), (quota.swapaxes(1, 2), "after: rank")])


def _heat_maps(rows: list[tuple[np.ndarray, str]]) -> bytes:
    """Draw a row of panels, one per layer, for each array `[layers, R, E]` with its label, in one color scale."""
    num_layers, num_ranks, num_experts = rows[0][0].shape
    num_home, top = num_experts // num_ranks, max(values.max() for values, _ in rows)
    with rc_context({**STYLE, "axes.grid": False}):
        figure, grid = _panels(num_layers, 3.6, len(rows))
        for (values, label), panels in zip(rows, grid, strict=True):
            for axes, layer in panels:
                # A step without tokens would give the color scale zero width.
                image = axes.imshow(values[layer], cmap="Blues", vmin=0, vmax=max(top, 1), aspect="auto")
                for edge in range(num_home, num_experts, num_home):
                    axes.axvline(edge - 0.5, color="#c6d1d7", lw=0.8)
                axes.set_xticks(_ticks(num_experts), labels=map(str, _ticks(num_experts)))
                axes.set_yticks(_ticks(num_ranks))
            panels[0][0].set_ylabel(label)
        for axes, layer in grid[0]:
            axes.set_title(f"layer {layer + 1}")
        for axes, _ in grid[-1]:
            axes.set_xlabel("expert")
        everywhere = [axes for panels in grid for axes, _ in panels]
        figure.colorbar(image, ax=everywhere, label="token copies", pad=0.012, aspect=24 * len(rows))
        return _png(figure)


def load_png(before: np.ndarray, after: np.ndarray) -> bytes:
    """Draw the copies served by each rank before and after balancing, from loads `[layers, R]` of a step."""
    ranks = np.arange(before.shape[1])
    with rc_context({**STYLE, "axes.grid.axis": "y"}):
        figure, (panels,) = _panels(len(before), 3.2)
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
    """Create rows with one panel per layer, at most `MAX_PANELS`, evenly spaced from the first layer to the last."""
    layers = np.unique(np.linspace(0, num_layers - 1, min(num_layers, MAX_PANELS)).round().astype(int))
    figure = Figure((WIDTH_IN, height_in), layout="constrained")
    grid = figure.subplots(num_rows, len(layers), sharex=num_rows > 1, sharey=True, squeeze=False)
    return figure, [list(zip(row, layers, strict=True)) for row in grid]


def _ticks(count: int) -> list[int]:
    return list(range(0, count, max(1, -(-count // 4))))


def _note(axes: Axes, x: float, y: float, text: str, color: str, offset_points: float) -> None:
    """Write text at the end of the horizontal line at `y` that is nearer to `x`, a fraction of the width."""
    how: dict[str, Any] = {
        "xycoords": axes.get_yaxis_transform(),
        "textcoords": "offset points",
        "color": color,
        "fontsize": 9,
    }
    axes.annotate(text, (x, y), (0, offset_points), ha="left" if x < 0.5 else "right", **how)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return buffer.getvalue()


PAGE, BODY = (Template(Path(__file__).with_name(name).read_text()) for name in ("page.html", "report.html"))
UNITS = ("nats", "bits", "tokens", "bytes", "s")


def write_report(folder: RunFolder, summary: dict) -> bool:
    """Write `report.html` from the other files of a run, finished or in progress."""
    described, segments = folder.described(), folder.all_counts()
    if not segments:
        return False
    figures = _figures(folder, segments, summary)
    tables = (
        (caption, [(_label(name), _text(value)) for name, value in values.items()])
        for caption, values in _tables(described, summary, segments[-1]["counts"])
    )
    body = BODY.substitute(
        {name: f"data:image/png;base64,{base64.b64encode(png).decode()}" for name, png in figures.items()},
        unit=escape(summary["unit"]),
        last=segments[-1]["steps"][-1],
        of=" of the first group" if summary["num_groups"] > 1 else "",
        cards="".join(f"<div class=card><b>{escape(n)}</b><span>{escape(t)}</span></div>" for n, t in _cards(summary)),
        tables="".join(_table(*given) for given in tables),
    )
    page = PAGE.substitute(
        title=escape(f"{folder.path.name}: training report"),
        kicker=escape(f"{folder.path.name} · {described['environment']['date'][:10]}"),
        headline=escape(_headline(described["config"], summary)),
        body=body,
    )
    write_whole(folder.report, page.encode())
    return True


def _table(caption: str, rows: list[tuple[str, str]]) -> str:
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(caption)}</caption>{lines}</table>"


REPORT_S = 60.0  # minimum seconds between two reports of a run in progress
MAX_SHARE = 0.05  # maximum share of the time for reports; each reads all rows and counts of the run


class LiveReport:
    """Periodic report of a run in progress."""

    def __init__(self, folder: RunFolder, others: dict) -> None:
        self.folder, self.others, self.began = folder, others, time.monotonic()
        self.due = self.began + REPORT_S

    def update(self) -> None:
        """Write the report if it is due and there is a validation."""
        now = time.monotonic()
        if now < self.due:
            return
        if self.folder.rows("validation"):
            write_report(self.folder, summarise(self.folder) | self.others | {"wall_s": now - self.began})
        end = time.monotonic()
        self.due = end + max(REPORT_S, (end - now) / MAX_SHARE)


def _headline(config: dict, summary: dict) -> str:
    gap = summary["unigram_entropy_nats"] - summary["validation_loss_nats"]
    before, after = summary["imbalance_before"], summary["imbalance_after"]
    return (
        f"Validation loss after {summary['steps']} steps is {summary['validation_loss_nats']:.2f} nats per "
        f"{summary['unit']}, {abs(gap):.2f} {'below' if gap > 0 else 'above'} the unigram entropy. Imbalance (max/mean "
        f"load of {config['parallel']['expert_parallel']} ranks) is {before:.2f} before balancing and {after:.2f} with "
        f"{config['parallel']['system']}."
    )


def _cards(summary: dict) -> list[tuple[str, str]]:
    balance = f"{summary['imbalance_before']:.2f} → {summary['imbalance_after']:.2f}"
    loss, bits = f"{summary['validation_loss_nats']:.3f}", f"{summary['validation_loss_bits']:.2f}"
    return [
        (loss, f"validation loss in nats per {summary['unit']} ({bits} bits)"),
        (balance, f"imbalance before → after, last {RECENT_STEPS} steps"),
        (f"{summary['one_round_share']:.0%}", f"of the last {RECENT_STEPS} steps with one round in each layer"),
        (f"{summary['tokens_per_s']:,.0f}", f"tokens per second ({summary['step_time_s'] * 1e3:,.0f} ms per step)"),
    ]


def _figures(folder: RunFolder, segments: list[dict[str, np.ndarray]], summary: dict) -> dict[str, bytes]:
    """Return the PNG of each figure by its name in the page."""
    last, steps = {name: rows[-1] for name, rows in segments[-1].items()}, folder.rows("step")
    return {
        "loss": loss_png(steps, folder.rows("validation"), summary["unigram_entropy_nats"], summary["unit"]),
        "imbalance": imbalance_png(*_over_segments(segments)),
        "speed": speed_png(steps),
        "load": load_png(last["load_before"], last["load_after"]),
        "served": served_png(last["counts"], last["quota"]),
        "counts": _heat_maps([(last["counts"], "source rank")]),
    }


def _over_segments(segments: list[dict[str, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps of all segments and their imbalance, which is defined for any number of ranks."""
    steps = np.concatenate([arrays["steps"] for arrays in segments])
    before, after = (
        np.concatenate([arrays[name].max(-1) / arrays[name].mean(-1) for arrays in segments])
        for name in ("load_before", "load_after")
    )
    return steps, before, after


def _tables(described: dict, summary: dict, counts: np.ndarray) -> list[tuple[str, dict]]:
    config, unused = dict(described["config"]), (counts[-RECENT_STEPS:].sum((0, 2)) == 0).sum(1)
    others = {"date": described["environment"]["date"], "unused experts, by layer": " ".join(map(str, unused))}
    model, parallel = config.pop("model"), config.pop("parallel")
    config.pop("multi_process", None)
    sections = [(name, config.pop(name)) for name in list(config) if isinstance(config[name], dict)]
    config |= {f"{name} {key}": value for name, section in sections for key, value in section.items()}
    return [
        ("Result", summary | others),
        ("Resolved settings of the system", described.get("resolved", {})),
        ("Training", config),
        ("Model and mesh", model | parallel),
        ("Data and environment", described["data"] | described["environment"]),
    ]


def _label(name: str) -> str:
    """Format a metric name for display, with its unit suffix in brackets."""
    words, _, unit = name.rpartition("_")
    if unit not in UNITS or words.endswith("_per"):
        return name.replace("_", " ")
    return f"{words.replace('_', ' ')} [{unit}]"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return "unset" if value is None else str(value)
