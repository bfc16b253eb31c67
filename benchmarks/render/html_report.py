"""One self-contained HTML file with all results and their plots."""

import html
from collections.abc import Mapping
from pathlib import Path

from benchmarks.render.plots import figures_of, svg
from benchmarks.render.results import Record, read
from models.run_folder.page import table, write_page


def write_report(results: Path, path: Path, ended: Mapping[str, str]) -> Path:
    records = dict(sorted(read(results).items()))
    links = " ".join(f'<a href="#{name}">{name}</a>' for name in records)
    how = table("This run", ended.items(), ("benchmark", "of this run"))
    body = "".join(section(name, record) for name, record in records.items())
    body = f"<p>{links}</p><section>{how}</section>{body}"
    write_page(path, title="Results", kicker="jax_moe_lb", headline="Results", body=body)
    return path


def section(name: str, record: Record) -> str:
    """Return the section of one run: provenance, plots, tables."""
    made = (record.command, record.date, f"commit {record.commit}", record.machine, record.software)
    said, tables = html.escape("; ".join(made)), record.tables
    plots = "".join(map(svg, figures_of(name, tables).values()))
    shown = "".join(
        table(one.title or title, one.cells(), list(one.columns))
        + "".join(f"<p>{html.escape(note)}" for note in one.notes)
        for title, one in tables.items()
    )
    return f'<section class=wide id="{name}"><h2>{name}</h2><p class=caption>{said}</p>{plots}{shown}</section>'
