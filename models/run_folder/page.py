"""Writer of self-contained HTML reports of training runs."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from models.run_folder.files import write_whole

PAGE = Template(Path(__file__).with_suffix(".html").read_text())


def write_page(path: Path, *, title: str, kicker: str, headline: str, body: str) -> None:
    """Write a page; its body is HTML."""
    texts = {"title": escape(title), "kicker": escape(kicker), "headline": escape(headline)}
    write_whole(path, PAGE.substitute(**texts, body=body).encode())


def table(caption: str, rows: Iterable[Sequence[str]], columns: Sequence[str] = ()) -> str:
    """Return a table; the first cell of a row is its heading."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    cells = (f"<th>{escape(row[0])}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in ([head] if head else []) + list(cells))
    return f"<table><caption>{escape(caption)}</caption>{body}</table>"
