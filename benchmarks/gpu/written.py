"""Write results of a GPU into `gpu.json`, the rates of its device and of its kernels, and the documents.

    python -m benchmarks.gpu.written FOLDER...   # folders of `benchmarks.gpu.session`, the latest last

Results that the folders do not have remain. A value that was measured is no longer marked as assumed. If `gpu.json`
is of another GPU, results go to `gpu_KIND.json`.
"""

import argparse
import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import runner
from benchmarks.gpu.claims import PARTS
from benchmarks.gpu.device import kind_in
from benchmarks.gpu.findings import CLAIMS, FALSE, NOT_REACHED, TRUE, read_rows
from benchmarks.gpu.measured_rates import measured
from benchmarks.gpu.measured_rates import tables as tables_of
from benchmarks.gpu.overview import overview
from benchmarks.gpu.products import named
from benchmarks.gpu.tiles import TABLE
from benchmarks.render.documents import RESULTS, ROOT, rendered, write_documents
from benchmarks.render.results import Table, load, read, save
from jax_moe_lb.kernels.backends import KINDS

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


def file_of(folders: Sequence[Path], out: Path) -> Path:
    """Return the file for the results of some folders: `out`, or one of their GPU if `out` is of another one."""
    devices = [
        row.device for folder in folders for part in PARTS for row in read_rows(folder / f"{part}.json").values()
    ]
    known = kind_in(read(out)[out.stem].machine) if out.exists() else None
    kind = next(filter(None, map(kind_in, devices)), known)
    return out if kind == known or known is None else out.with_name(f"{out.stem}_{kind}.json")


def merged(folders: Sequence[Path], old: Path) -> tuple[dict[str, Table], str]:
    """Return the tables of all folders over those of an older file, and the device."""
    before = load(old) if old.exists() else {}
    # A run that did not reach a claim leaves its outcome.
    rows = {row[1]: row for row in (before[CLAIMS].rows if CLAIMS in before else [])}
    latest: dict[str, Table] = {}
    device = ""
    for path in (folder / f"{part}.json" for folder in folders for part in PARTS):
        if not path.exists():
            continue
        latest |= {name: table for name, table in load(path).items() if name != CLAIMS}
        device = next((row.device for row in read_rows(path).values() if row.device), device)
    table, _ = runner.summary(folders[-1])
    for folder in folders:
        rows |= {row[1]: row for row in runner.summary(folder)[0].rows if row[3] in (TRUE, FALSE)}
    claims = [_outcome(row, rows) for row in table.rows]
    return {**before, **overview(latest), CLAIMS: Table(table.columns, claims)}, device


def _outcome(row: Sequence[Any], known: Mapping[Any, Sequence[Any]]) -> Sequence[Any]:
    """Return the statement of a claim with its known outcome."""
    return [*row[:3], *known.get(row[1], (*row[:3], NOT_REACHED, row[4]))[3:]]


def kernel_rates(folders: Sequence[Path]) -> dict[tuple[str, str], float]:
    """Return the median TFLOP/s of each recorded kernel at even rows, by name and kind."""
    found: dict[tuple[str, str], list[float]] = {}
    paths = [path for folder in folders if (path := folder / "products.json").exists()]
    for at in (row for path in paths for table in load(path).values() for row in table.dicts()):
        # Only even loads and the tiles of the table are recorded.
        if (at.get("skew"), at.get("tiles")) != ("even", TABLE) or at["TFLOP/s"] is None or at[""]:
            continue
        if (name := named(at["backend"]).recorded) is not None:
            found.setdefault((name, at["kind"]), []).append(at["TFLOP/s"])
    return {key: statistics.median(rates) for key, rates in found.items()}


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
    """Return the text of a device's file with measured values.

    Keys that it does not have are ignored, and kernels that it does not have are added.
    """
    for key, value in values.items():
        table, _, name = key.partition(".")
        new = _with_line(text, f"{table}.value", name, value) if name else _with_line(text, table, "value", value)
        if new != text:
            new = _with_line(_with_line(new, table, "basis", '"measured"'), table, "source", f'"{SOURCE}"')
        text = new
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


def write(folders: Sequence[Path], out: Path, target: Path, rated: Path | None = None) -> None:
    """Write the results and the rates of the device."""
    out = file_of(folders, out)
    tables, device = merged(folders, out)
    save(tables, out, device)
    kind = kind_in(device) or "h100"
    values = device_values(measured(tables_of(rated or out)), kernel_rates(folders))
    target.joinpath(f"{kind}.toml").write_text(with_values((DEVICES / f"{kind}.toml").read_text(), values))


def dry_run(folder: Path, out: Path) -> None:
    """Write copies of all files from results of a dry run, and render the page of the GPU from them."""
    results = out / "results"
    shutil.copytree(RESULTS, results, ignore=shutil.ignore_patterns("gpu"))
    # A CPU has no times of kernels.
    write([folder], results / "gpu.json", out, rated=RESULTS / "gpu.json")
    page = ROOT / "docs" / "results" / "gpu.md"
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
    write(given.folders, RESULTS / "gpu.json", DEVICES)
    write_documents()


if __name__ == "__main__":
    main()
