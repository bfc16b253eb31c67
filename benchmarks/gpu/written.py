"""Write results of a GPU into `gpu.json`, the rates of its device and of its kernels, and the documents.

    python -m benchmarks.gpu.written FOLDER...   # folders of `benchmarks.gpu.session`, the latest last

Results that the folders do not have remain. A value that was measured is no longer marked as assumed. If `gpu.json`
is of another GPU, results go to `gpu_KIND.json`, a section of docs/results/gpu.md and a row of docs/status.md.
"""

import argparse
import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import runner
from benchmarks.gpu.claims import PARTS, claim_of_products
from benchmarks.gpu.device import kind_in
from benchmarks.gpu.findings import CLAIMS, FALSE, NOT_REACHED, TRUE, read_rows
from benchmarks.gpu.measured_rates import measured
from benchmarks.gpu.measured_rates import tables as tables_of
from benchmarks.gpu.once import EndedBefore
from benchmarks.gpu.overview import overview
from benchmarks.gpu.pages import with_row, with_section
from benchmarks.gpu.products import named
from benchmarks.gpu.tiles import TABLE, WRONG
from benchmarks.render.documents import RESULTS, ROOT, rendered, write_documents
from benchmarks.render.results import Table, load, read, save
from jax_moe_lb.aot.targets import GPUS
from jax_moe_lb.kernels.backends import BACKENDS, KINDS

DEVICES = ROOT / "jax_moe_lb" / "core" / "devices"

UNITS = {
    "dense": (1e12, ".4g", " TFLOP/s"),
    "grouped": (1e12, ".4g", " TFLOP/s"),
    "experts": (1e12, ".4g", " TFLOP/s"),
    "memory_share": (1, ".3f", ""),
    "planner_kernel": (1e-6, ".4g", " us"),
    "small_operations": (1e-6, ".4g", " us"),
}
"""Units and formats of the values of `measured_rates` in the file of a device."""

SOURCE = "docs/results/gpu.md, by python -m benchmarks.gpu.measured_rates"


def kind_of(folders: Sequence[Path]) -> str:
    """Return the kind of the GPU of all results."""
    devices = sorted({row.device for path in files_of(folders) for row in read_rows(path).values() if row.device})
    kinds = set(filter(None, map(kind_in, devices)))
    if len(kinds) != 1:
        raise ValueError(
            f"results are of {', '.join(devices) or 'no device'}; expected one GPU of {', '.join(GPUS)}. "
            "Pass the folders of one GPU."
        )
    return kinds.pop()


def files_of(folders: Sequence[Path]) -> list[Path]:
    """Return the files of all parts in some folders, the latest last."""
    return [path for folder in folders for part in PARTS if (path := folder / f"{part}.json").exists()]


def file_of(kind: str, out: Path) -> Path:
    """Return the file for the results of a GPU: `out`, or one of its own if `out` is of another GPU."""
    is_own = not out.exists() or kind_in(read(out)[out.stem].machine) == kind
    return out if is_own else out.with_name(f"{out.stem}_{kind}.json")


def made_by(folders: Sequence[Path], kind: str) -> dict[str, str]:
    """Return the provenance of the latest results: this machine is another one."""
    paths = files_of(folders)
    devices = [row.device for path in paths for row in read_rows(path).values() if kind_in(row.device) == kind]
    record = read(paths[-1])[paths[-1].stem]
    machine = f"{record.machine.rpartition('; ')[0]}; {devices[-1] if devices else kind}"
    found = {name: getattr(record, name) for name in ("commit", "date", "software")}
    return found | {"machine": machine, "command": "python -m benchmarks.gpu.session"}


def merged(folders: Sequence[Path], old: Path) -> dict[str, Table]:
    """Return the tables of all folders over those of an older file."""
    before = load(old) if old.exists() else {}
    # A run that did not reach a claim leaves its outcome.
    rows = {row[1]: row for row in (before[CLAIMS].rows if CLAIMS in before else [])}
    latest: dict[str, Table] = {}
    for path in files_of(folders):
        latest |= {name: table for name, table in load(path).items() if name != CLAIMS}
    table, _ = runner.summary(folders[-1])
    for folder in folders:
        rows |= {row[1]: row for row in runner.summary(folder)[0].rows if row[3] in (TRUE, FALSE)}
    # The statement of a claim is the present one.
    claims = [[*row[:3], *rows.get(row[1], (*row[:3], NOT_REACHED, row[4]))[3:]] for row in table.rows]
    found = {name: _with_older_rows(one, before.get(name)) for name, one in overview(latest).items()}
    return {**before, **found, CLAIMS: Table(table.columns, claims)}


def _with_older_rows(table: Table, older: Table | None) -> Table:
    """Return a table of several layers or models with those that the latest run did not reach."""
    first = next(iter(table.columns))
    if first not in ("layer", "model") or older is None or list(older.columns) != list(table.columns):
        return table
    reached = {row[0] for row in table.rows}
    return replace(table, rows=[*table.rows, *(row for row in older.rows if row[0] not in reached)])


def kernel_rates(folders: Sequence[Path]) -> dict[tuple[str, str], float]:
    """Return the median TFLOP/s of each recorded kernel at even rows, by name and kind, without faulty kernels."""
    found: dict[tuple[str, str], list[float]] = {}
    # A layer takes the kernel with the highest rate, so one wrong result excludes it.
    faulty = {(name, kind) for name in map(_recorded, _false_products(folders)) for kind in KINDS}
    paths = [path for folder in folders if (path := folder / "products.json").exists()]
    for at in (row for path in paths for table in load(path).values() for row in table.dicts()):
        # Only even loads and the tiles of the table are recorded.
        if at.get("tiles") != TABLE or (name := _recorded(at["backend"])) is None:
            continue
        if at[""].startswith((WRONG, EndedBefore.__name__)):
            faulty.add((name, at["kind"]))
        if at["skew"] == "even" and at["TFLOP/s"] is not None and not at[""]:
            found.setdefault((name, at["kind"]), []).append(at["TFLOP/s"])
    return {key: statistics.median(rates) for key, rates in found.items() if key not in faulty}


def _recorded(backend: str) -> str | None:
    return named(backend).recorded


def _false_products(folders: Sequence[Path]) -> list[str]:
    """Return the backends whose products differ from those by blocks of rows."""
    rows = [row for folder in folders for row in read_rows(folder / "values.json").values()]
    false = {row.claim for row in rows if row.outcome == FALSE}
    return [backend.name for backend in BACKENDS if claim_of_products(backend) in false]


def device_values(run: Mapping[str, Any], kernels: Mapping[tuple[str, str], float]) -> dict[str, str]:
    """Return the values of a device's file by their key; of a kernel, by `kernels` and its name."""
    found = {key: _shown(value, *UNITS[key]) for key, value in run.items()}
    for name in dict.fromkeys(name for name, _ in kernels):
        of_kinds = {kind: 1e12 * kernels[name, kind] for kind in KINDS if (name, kind) in kernels}
        found[f"kernels.{name}"] = _shown(of_kinds, *UNITS["grouped"])
    return found


def _shown(value: Any, unit: float, form: str, name: str) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_shown(one, unit, form, name)}' for key, one in value.items())} }}"
    return f'"{value / unit:{form}}{name}"' if name else f"{value / unit:{form}}"


def with_values(text: str, values: Mapping[str, str]) -> str:
    """Return the text of a device's file with measured values; tables and kernels that it does not have are added."""
    for key, value in values.items():
        table, _, name = key.partition(".")
        where = (f"{table}.value", name) if name else (table, "value")
        full = text
        for needed in dict.fromkeys((table, where[0])):
            full = full if f"[{needed}]\n" in full else f"{full.rstrip()}\n\n[{needed}]\n"
        if _with_line(full, *where, value) != text:
            full = _with_line(_with_line(full, table, "source", f'"{SOURCE}"'), table, "basis", '"measured"')
            text = _with_line(full, *where, value)
    return text


def _with_line(text: str, table: str, key: str, value: str) -> str:
    """Return the text of a TOML file with a value of a key of a table; unchanged without the table."""
    found = re.search(rf"^\[{re.escape(table)}\]\n(?:.+\n)*", text, re.M)
    if found is None:
        return text
    line, new = re.compile(rf'^{key} = (?:""".*?"""|.*?)\n', re.M | re.S), f"{key} = {value}\n"
    head, _, lines = found[0].partition("\n")
    block = line.sub(lambda _: new, lines) if line.search(lines) else new + lines
    return f"{text[: found.start()]}{head}\n{block}{text[found.end() :]}"


def write(folders: Sequence[Path], out: Path, target: Path, kind: str, rated: Path | None = None) -> Path:
    """Write the results and the rates of the device, and return the file of the results."""
    out = file_of(kind, out)
    save(merged(folders, out), out, **made_by(folders, kind))
    values = device_values(measured(tables_of(rated or out), kind), kernel_rates(folders))
    print(f"{kind}.toml: {', '.join(values) or 'no rates'} measured")
    target.joinpath(f"{kind}.toml").write_text(with_values((DEVICES / f"{kind}.toml").read_text(), values))
    return out


def write_pages(out: Path, kind: str, root: Path) -> None:
    """Write the section and the row of a GPU whose results have a file of their own."""
    if out.stem == "gpu":
        return
    page, status, record = root / "docs" / "results" / "gpu.md", root / "docs" / "status.md", read(out)[out.stem]
    page.write_text(with_section(page.read_text(), kind, out.stem, record))
    status.write_text(with_row(status.read_text(), kind, record.tables))


def dry_run(folder: Path, out: Path) -> None:
    """Write copies of all files from results of a dry run, as of an H200, and render the pages from them."""
    results, kind = out / "results", "h200"
    shutil.copytree(RESULTS, results, ignore=shutil.ignore_patterns("gpu"))
    shutil.copytree(ROOT / "docs", out / "docs")
    # A CPU has no times of kernels.
    written = write([folder], results / "gpu.json", out, kind, rated=RESULTS / "gpu.json")
    write_pages(written, kind, out)
    for page in (out / "docs" / "results" / "gpu.md", out / "docs" / "index.md"):
        rendered(page.read_text(), results, page.parent)


def main() -> None:
    """Write all files and documents."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.written",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folders of results, the latest last")
    given = parser.parse_args()
    try:
        kind = kind_of(given.folders)
    except ValueError as error:
        parser.error(str(error))
    write_pages(write(given.folders, RESULTS / "gpu.json", DEVICES, kind), kind, ROOT)
    write_documents()


if __name__ == "__main__":
    main()
