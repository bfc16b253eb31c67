"""These functions make what the simulator's commands print."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from jax_moe_lb.sim import Report
from jax_moe_lb.sim.advise import SWEPT_TOKENS, WORTH_IT, Outcome, Verdict

UNITS = (("ms", 1e3, 10.0), ("s", 1.0, 600.0), ("min", 1 / 60, 7200.0), ("h", 1 / 3600, float("inf")))
"""Each with how many there are in a second, and up to how many seconds it is used."""


def _unit(seconds: float) -> tuple[str, float]:
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


def layer_table(head: dict[str, Any], report: Report) -> Table:
    """Makes a table with a line for every stage, and one for the step."""
    title = ", ".join(f"{name} {value}" for name, value in head.items())
    moved = ", ".join(f"{name} {decimal(round(total))}" for name, total in report.level_bytes.items())
    parts = ", ".join(f"{name} {decimal(round(value))}" for name, value in asdict(report.memory).items())
    caption = (
        f"imbalance {report.imbalance_before:.3f} -> {report.imbalance_after:.3f}, rounds {report.rounds}\n"
        f"sent over all links: {moved}\nmemory of a rank: {decimal(round(report.memory.total))} ({parts})"
    )
    table = Table(title=escape(title), title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    table.add_column("stage", no_wrap=True)
    unit, per_s = _unit(report.step_s)
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


def advice_table(title: str, found: Sequence[Outcome]) -> Table:
    """Makes a table with a line for every candidate."""
    # `verdict` has refused before if plain could not run.
    plain = next(one.report.step_s for one in found if one.candidate.name == "plain" and one.report)
    unit, per_s = _unit(plain)
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD)
    table.add_column("system", no_wrap=True)
    for header in (f"step {unit}", "of plain", "imbalance", f"experts {unit}", "rounds", "sent", "memory"):
        table.add_column(header, justify="right", no_wrap=True)
    for one in found:
        if one.report is None:
            table.add_row(one.candidate.name, "-", escape(one.refused))
            continue
        experts_s = sum(stage.exposed_s for name, stage in one.report.stages.items() if name.startswith("experts"))
        table.add_row(
            one.candidate.name,
            f"{one.report.step_s * per_s:.2f}",
            f"{one.report.step_s / plain:.3f}",
            f"{one.report.imbalance_after:.3f}",
            f"{experts_s * per_s:.2f}",
            str(one.report.rounds),
            decimal(round(sum(one.report.level_bytes.values()))),
            decimal(round(one.report.memory.total)),
        )
    return table


def verdict_lines(answer: Verdict, tokens: int) -> list[str]:
    """Says in words what to do."""
    if answer.leave_off:
        lines = [f"Leave balancing off: nothing saves {WORTH_IT:.0%} of a step at {tokens} tokens per rank."]
    else:
        lines = [f"Use {answer.best.name}: {answer.gain:.1%} of a step less than plain at {tokens} tokens per rank."]
    if answer.best.name == "plain":
        return lines
    if answer.pays_from is None:
        return [*lines, f"{answer.best.name} is not faster at {SWEPT_TOKENS[-1]} tokens per rank."]
    if answer.pays_from == SWEPT_TOKENS[0]:
        return [*lines, f"{answer.best.name} is faster from {SWEPT_TOKENS[0]} tokens per rank on, the fewest tried."]
    return [*lines, f"{answer.best.name} begins to pay at {answer.pays_from} tokens per rank."]
