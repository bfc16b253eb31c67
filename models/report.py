"""`write_report` shows a run as one HTML file that needs nothing else."""

import base64
import json
import time
from html import escape
from string import Template

import numpy as np

from models.files import write_whole
from models.others import STEPS, other_systems
from models.plots import counts_png, imbalance_png, load_png, loss_png, served_png, speed_png
from models.recording import RunFolder
from models.summary import RECENT_STEPS, summarise

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { --ink: #1f2933; --muted: #616e7c; --line: #e4e7eb; --accent: #2563a8; }
* { box-sizing: border-box; }
body { margin: 0; background: #f7f8fa; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 48px 24px 72px; }
.kicker { margin: 0 0 8px; color: var(--accent); font-weight: 600; font-size: 14px; }
h1 { margin: 0 0 28px; font-size: 25px; line-height: 1.34; font-weight: 600; letter-spacing: -0.01em; }
h2 { margin: 0 0 2px; font-size: 17px; }
p.caption { margin: 0 0 14px; color: var(--muted); font-size: 14.5px; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; margin: 0 0 20px; }
.card, section { background: white; border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 14px 16px; }
.card b { display: block; font-size: 22px; font-weight: 650; font-variant-numeric: tabular-nums; }
.card span { color: var(--muted); font-size: 13.5px; }
section { margin: 0 0 20px; padding: 22px 24px 20px; }
img { display: block; width: 100%; height: auto; }
.tables { columns: 2; column-gap: 36px; }
table { width: 100%; border-collapse: collapse; font-size: 14px; margin-bottom: 22px; break-inside: avoid; }
caption { text-align: left; font-weight: 650; font-size: 15px; padding: 0 0 6px; }
th { text-align: left; font-weight: 400; color: var(--muted); padding-right: 12px; white-space: nowrap; }
td { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
th, td { padding-top: 4px; padding-bottom: 4px; border-bottom: 1px solid var(--line); vertical-align: top; }
@media (max-width: 720px) { .cards { grid-template-columns: 1fr 1fr; } .tables { columns: 1; } }
</style>
</head>
<body><main>
<p class="kicker">$kicker</p>
<h1>$headline</h1>
<div class="cards">$cards</div>
$sections
<section><div class="tables">$tables</div></section>
</main></body>
</html>
""")


UNITS = ("nats", "bits", "tokens", "bytes", "s")


def write_report(folder: RunFolder, summary: dict) -> bool:
    """Writes `report.html` and its figures from the other files of a run, which may be under way.

    Args:
        folder: its folder.
        summary: the numbers of `summarise`, and those that the loop adds.

    Returns:
        Whether there were counts of any step; without, it writes nothing.
    """
    described = json.loads(folder.config.read_text())
    segments = folder.all_counts()
    if not segments:
        return False
    figures, replayed = _figures(folder, segments, summary), _replayed(described, segments[-1]["counts"])
    for path, (_, _, png) in zip(folder.figures, figures, strict=True):
        write_whole(path, png)
    config = described["config"]
    page = PAGE.substitute(
        title=escape(f"{folder.path.name}: training report"),
        kicker=escape(f"{folder.path.name} · {described['environment']['date'][:10]}"),
        headline=escape(_headline(config, summary)),
        cards="".join(f"<div class=card><b>{escape(n)}</b><span>{escape(t)}</span></div>" for n, t in _cards(summary)),
        sections="\n".join(map(_section, figures)),
        tables="".join(_table(*table) for table in _tables(described, summary, replayed)),
    )
    write_whole(folder.report, page.encode())
    return True


class LiveReport:
    """`LiveReport` writes the report of a run that is under way, every so often.

    Args:
        folder: its folder.
        others: numbers of the summary that the folder does not have.
        every_s: the seconds between two; 60 are usual, as drawing takes one or two.
    """

    def __init__(self, folder: RunFolder, others: dict, every_s: float = 60.0) -> None:
        self.folder, self.others, self.every_s = folder, others, every_s
        self.began = self.last = time.monotonic()

    def update(self) -> None:
        """Writes it if it is time, and there has been a validation."""
        now = time.monotonic()
        if now - self.last >= self.every_s and self.folder.rows("validation"):
            write_report(self.folder, summarise(self.folder) | self.others | {"wall_s": now - self.began})
            self.last = time.monotonic()


def _headline(config: dict, summary: dict) -> str:
    gap = summary["unigram_entropy_nats"] - summary["validation_loss_nats"]
    before, after = summary["imbalance_before"], summary["imbalance_after"]
    effect = f"makes that {after:.2f}" if f"{after:.2f}" != f"{before:.2f}" else "leaves it so"
    return (
        f"After {summary['steps']} steps the model needs {summary['validation_loss_nats']:.2f} nats per unseen "
        f"{summary['unit']}, {abs(gap):.2f} {'less' if gap > 0 else 'more'} than frequencies alone. Its routing loads "
        f"the busiest of {config['parallel']['expert_parallel']} ranks {before:.2f} times the mean; "
        f"{config['parallel']['system']} {effect}."
    )


def _cards(summary: dict) -> list[tuple[str, str]]:
    balance = f"{summary['imbalance_before']:.2f} → {summary['imbalance_after']:.2f}"
    loss, bits = f"{summary['validation_loss_nats']:.3f}", f"{summary['validation_loss_bits']:.2f}"
    return [
        (loss, f"validation loss in nats per {summary['unit']} ({bits} bits)"),
        (balance, f"imbalance before → after, last {RECENT_STEPS} steps"),
        (f"{summary['one_round_share']:.0%}", "of these steps took one round in every layer"),
        (f"{summary['tokens_per_s']:,.0f}", f"tokens per second ({summary['step_time_s'] * 1e3:,.0f} ms a step)"),
    ]


Figure = tuple[str, str, bytes]


def _figures(folder: RunFolder, segments: list[dict[str, np.ndarray]], summary: dict) -> list[Figure]:
    """Makes title, caption and PNG of each figure, in the order of `FIGURES`."""
    arrays = segments[-1]
    before, after, counts = arrays["load_before"], arrays["load_after"], arrays["counts"]
    of = " of the first group" if summary["num_groups"] > 1 else ""
    entropy_nats, last = summary["unigram_entropy_nats"], arrays["steps"][-1]
    unit = summary["unit"]
    return [
        (
            "Loss",
            f"Cross-entropy of the next {unit}. Below the dashed line, more is known than how often each occurs.",
            loss_png(folder.rows("step"), folder.rows("validation"), entropy_nats, unit),
        ),
        (
            "Imbalance over training",
            "Load of the busiest rank over the mean; lines are means over layers, bands span the layers.",
            imbalance_png(*_over_segments(segments)),
        ),
        (
            "Time and rounds over training",
            "Seconds of each step, checkpoints included; the rounds of the layer that needed most.",
            speed_png(folder.rows("step")),
        ),
        (
            f"Load of each rank at step {last}",
            f"Token copies that a rank{of} serves with every expert at home, and with the balanced plan.",
            load_png(before[-1], after[-1]),
        ),
        (
            f"Who serves which expert at step {last}",
            f"Token copies that a rank{of} serves, by expert: with every expert at home, and by the plan.",
            served_png(counts[-1], arrays["quota"][-1]),
        ),
        (
            f"Routing at step {last}",
            f"Token copies from each rank{of} to each expert; white lines separate the home experts of the ranks.",
            counts_png(counts[-1]),
        ),
    ]


def _over_segments(segments: list[dict[str, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Collects the numbers of all steps, and their imbalance, which ranks of any number have."""
    steps = np.concatenate([arrays["steps"] for arrays in segments])
    before, after = (
        np.concatenate([arrays[name].max(-1) / arrays[name].mean(-1) for arrays in segments])
        for name in ("load_before", "load_after")
    )
    return steps, before, after


def _section(figure: Figure) -> str:
    title, caption, png = figure
    data = base64.b64encode(png).decode()
    return (
        f"<section><h2>{escape(title)}</h2><p class=caption>{escape(caption)}</p>"
        f'<img alt="{escape(title)}" src="data:image/png;base64,{data}"></section>'
    )


def _replayed(described: dict, counts: np.ndarray) -> dict[str, float | str]:
    """The imbalance that other planners leave on the last steps, and the experts that nobody chose."""
    resolved = described.get("resolved", {})
    parallel = described["config"]["parallel"]
    found = other_systems(counts, parallel["ranks_per_domain"], resolved.get("replica_slots") or 2)
    unused = (counts[-STEPS:].sum((0, 2)) == 0).sum(1)
    return found | {"experts that no token chose, by layer": " ".join(map(str, unused.tolist()))}


def _tables(described: dict, summary: dict, replayed: dict[str, float | str]) -> list[tuple[str, dict]]:
    config = dict(described["config"])
    model, parallel = config.pop("model"), config.pop("parallel")
    return [
        ("Result", summary | {"date": described["environment"]["date"]}),
        (f"Imbalance by system, its last {STEPS} steps planned again", replayed),
        ("Defaults of the system", described.get("resolved", {})),
        ("Training", config),
        ("Model and mesh", model | parallel),
        ("Data and environment", described["data"] | described["environment"]),
    ]


def _table(caption: str, values: dict) -> str:
    rows = "".join(
        f"<tr><th>{escape(_label(name))}</th><td>{escape(_text(value))}</td></tr>" for name, value in values.items()
    )
    return f"<table><caption>{escape(caption)}</caption>{rows}</table>"


def _label(name: str) -> str:
    """Writes a name of the files for a reader, with its unit, which ends it, in brackets."""
    words, _, unit = name.rpartition("_")
    if unit not in UNITS or words.endswith("_per"):
        return name.replace("_", " ")
    return f"{words.replace('_', ' ')} [{unit}]"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return "system's default" if value is None else str(value)
