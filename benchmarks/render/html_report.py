"""One self-contained HTML file with all results and their plots."""

import html
from collections.abc import Mapping
from pathlib import Path

from benchmarks.render.plots import figures_of, svg
from benchmarks.render.results import Record, Table, read

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: auto; padding: 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid #ddd; padding: 2px 8px; text-align: right; }
td:first-child, th:first-child { text-align: left; }
.wide { overflow-x: auto; margin: 1rem 0; } .made { color: #666; font-size: 13px; }
svg { max-width: 100%; height: auto; } nav a { margin-right: 1em; white-space: nowrap; }
"""


def write_report(results: Path, path: Path, ended: Mapping[str, str]) -> Path:
    """Write a report."""
    records = dict(sorted(read(results).items()))
    links = " ".join(f'<a href="#{name}">{name}</a>' for name in records)
    how = Table({"benchmark": "", "of this run": ""}, list(ended.items()))
    head = f"<h1>Results</h1><nav>{links}</nav><h2>This run</h2>{table_html(how)}"
    body = "".join(section(name, record) for name, record in records.items())
    page = (
        f"<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Results</title><style>{STYLE}</style>{head}{body}"
    )
    path.write_text(page)
    return path


def section(name: str, record: Record) -> str:
    """Return the section of one run: provenance, plots, tables."""
    made = (record.command, record.date, f"commit {record.commit}", record.machine, record.software)
    said, tables = html.escape("; ".join(made)), record.tables
    plots = "".join(map(svg, figures_of(name, tables).values()))
    shown = "".join(
        f"<h3>{html.escape(table.title or title)}</h3>{table_html(table)}" for title, table in tables.items()
    )
    return f'<h2 id="{name}">{name}</h2><p class=made>{said}</p>{plots}{shown}'


def table_html(table: Table) -> str:
    """Return one table and its notes as HTML."""
    head = "".join(f"<th>{html.escape(title)}" for title in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in table.cells())
    notes = "".join(f"<p>{html.escape(note)}" for note in table.notes)
    return f"<div class=wide><table><tr>{head}{rows}</table></div>{notes}"
