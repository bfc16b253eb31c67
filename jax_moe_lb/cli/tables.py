"""These functions make what the simulator's commands print."""

from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from jax_moe_lb.sim import Report
from jax_moe_lb.sim.hbm import HbmTraffic

UNITS = (("ms", 1e3, 10.0), ("s", 1.0, 600.0), ("min", 1 / 60, 7200.0), ("h", 1 / 3600, float("inf")))
"""Each with how many there are in a second, and up to how many seconds it is used."""


def time_unit(seconds: float) -> tuple[str, float]:
    """Chooses the unit in which a step of so many seconds reads well, for all times of a table."""
    return next((name, per_s) for name, per_s, most_s in UNITS if seconds < most_s)


def report_json(report: Report) -> dict[str, Any]:
    """Collects all numbers of a report, without its timeline."""
    stages = {name: asdict(stage) | {"hidden_s": stage.hidden_s} for name, stage in report.stages.items()}
    return {
        "step_s": report.step_s,
        "imbalance_before": report.imbalance_before,
        "imbalance_after": report.imbalance_after,
        "rounds": report.rounds,
        "stages": stages,
        "level_bytes": report.level_bytes,
        "memory_bytes": asdict(report.memory) | {"total": report.memory.total},
    }


def layer_table(head: dict[str, Any], report: Report, hbm: HbmTraffic) -> Table:
    """Makes a table with a line for every stage, and one for the step."""
    title = ", ".join(f"{name} {value}" for name, value in head.items())
    moved = ", ".join(f"{name} {decimal(round(total))}" for name, total in report.level_bytes.items())
    parts = ", ".join(f"{name} {decimal(round(value))}" for name, value in report.memory.by_name.items())
    in_memory = ", ".join(f"{name} {decimal(round(value))}" for name, value in asdict(hbm).items() if value)
    caption = (
        f"imbalance {report.imbalance_before:.3f} -> {report.imbalance_after:.3f}, rounds {report.rounds}\n"
        f"sent over all links: {moved}\nmemory of a rank: {decimal(round(report.memory.total))} ({parts})\n"
        f"read and written in its memory in a layer: {decimal(round(hbm.total))} ({in_memory})"
    )
    table = Table(title=escape(title), title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    table.add_column("stage", no_wrap=True)
    unit, per_s = time_unit(report.step_s)
    for header in (f"busy {unit}", f"exposed {unit}", f"hidden {unit}", "of the step", "sent"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, stage in report.stages.items():
        times = (f"{value * per_s:.3f}" for value in (stage.busy_s, stage.exposed_s, stage.hidden_s))
        # Of a step that takes no time there are no shares.
        share = f"{stage.exposed_s / report.step_s:.1%}" if report.step_s else "-"
        table.add_row(name, *times, share, decimal(round(stage.bytes)) if stage.bytes else "-")
    table.add_section()
    table.add_row("step", "", f"{report.step_s * per_s:.3f}", "", "", decimal(round(sum(report.level_bytes.values()))))
    return table
