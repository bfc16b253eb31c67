"""Check claims about NVIDIA GPUs on this machine, and print a table of them: true, false or not reached.

    make gpu                                                 # all; continues where the last run stopped
    make gpu ARGS="--parts kit values"                       # some parts
    make gpu ARGS="--again layer-exact times"                # claims, or all claims of a part, again
    python -m benchmarks.gpu.session --dry-run               # all checks and `written`, tiny, on CPUs

`claims.py` lists the claims. Each part runs for at most 8 minutes; the end writes all outcomes into
`benchmarks/results/gpu.json` for the documents, or `gpu_KIND.json` if that is of another GPU. On a machine that has its
GPU for fifteen minutes, two commands with limits run the most valuable checks first:

    make gpu-kit                                             # before, on any machine
    python -m benchmarks.gpu.session first --out FOLDER      # at most 8 minutes
    python -m benchmarks.gpu.session second --out FOLDER     # at most 4 minutes
    python -m benchmarks.gpu.written FOLDER                  # afterwards: results, rates of the device, documents

The file of a part is written after each check. The first check loads a program of `make gpu-kit`; if that fails, all
programs are compiled. The steps of a rank compile in other processes meanwhile.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from benchmarks.gpu import kit, once, runner, written
from benchmarks.gpu.claims import PARTS
from benchmarks.gpu.comparison import LAYERS
from benchmarks.gpu.findings import CLAIMS, DRY_RUN_FAILED, FALSE, NOT_REACHED, TRUE, read_rows
from benchmarks.gpu.overview import overview
from benchmarks.render.documents import RESULTS
from benchmarks.render.results import load, save

DRY_RUN_LIMIT_S = 600.0

WAIT_S = 20.0
"""Seconds that steps of a rank may compile after the checks before them."""

THREADS = 4
"""Compilations at once of a layer."""


@dataclass(frozen=True)
class Item:
    """Checks of one part."""

    part: str
    limit_s: float
    takes: Callable[[str], bool] = lambda name: True
    beside: bool = False
    """Whether it runs beside the next item, in the time of that one: for checks without times."""

    def claims(self) -> list[str]:
        """Return the names of the checks."""
        return [claim.name for claim in PARTS[self.part] if self.takes(claim.name)]


def starting(*prefixes: str) -> Callable[[str], bool]:
    """Return a function that is true for names with one of the prefixes."""
    return lambda name: name.startswith(prefixes)


STEPS_OF_RANKS = "comparison"
"""Part whose programs compile in other processes."""

SESSIONS = {
    "first": (
        Item("kit", 30),
        Item("device", 35),
        Item("values", 65, starting("products-")),
        Item("products", 120),
        Item(STEPS_OF_RANKS, 150, starting("rank-")),
        Item("counters", 60),
    ),
    "second": (
        Item("training", 75, beside=True),
        Item("values", 75, starting("layer-")),
        Item("kernels", 30),
        Item("steps", 65, starting("step-")),
        Item("compiled", 40, starting("temporaries", "timeline")),
        Item("copies", 30, starting("ended-process")),
    ),
}
"""Checks of both commands, the most valuable first. Time that one does not need is left to those after it."""

ALL, REST = "all", "rest"
"""Names of all checks, and of those of neither command in a dry run."""


def rest() -> Iterator[Item]:
    """Yield the checks that are in no command."""
    known = {name for items in SESSIONS.values() for item in items for name in item.claims()}
    for part in PARTS:
        item = Item(part, DRY_RUN_LIMIT_S, lambda name: name not in known)
        if item.claims():
            yield item


@contextmanager
def compiling(*, dry_run: bool) -> Iterator[Callable[[], None]]:
    """Compile the steps of a rank in processes; give a function that waits for them."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    common = [sys.executable, "-m", "benchmarks.gpu.ahead", "--threads", str(THREADS)]
    layers = list(LAYERS)[:1] if dry_run else list(LAYERS)
    commands = [[*common, "--here", layer, *(["--dry-run"] if dry_run else [])] for layer in layers]
    # Other checks run beside them.
    started = [subprocess.Popen(["nice", *command], env=environment) for command in commands]

    def wait() -> None:
        end = time.monotonic() + (DRY_RUN_LIMIT_S if dry_run else WAIT_S)
        for process in started:
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    try:
        yield wait
    finally:
        for process in started:
            process.kill()
            process.wait()


def run(name: str, folder: Path, parts: Sequence[str], again: list[str], *, dry_run: bool) -> bool:
    """Run the checks of a command, and return whether a check failed for its own fault in a dry run."""
    every = {**SESSIONS, ALL: tuple(Item(part, runner.LIMIT_S) for part in PARTS), REST: tuple(rest())}
    items = [item for item in every[name] if item.part in parts]
    once.forget()
    if name == REST or not any(item.part == STEPS_OF_RANKS for item in items):
        return _run_items(items, folder, None, again, dry_run=dry_run)
    with compiling(dry_run=dry_run) as wait:
        return _run_items(items, folder, wait, again, dry_run=dry_run)


def _run_items(
    items: Sequence[Item], folder: Path, wait: Callable[[], None] | None, again: list[str], *, dry_run: bool
) -> bool:
    failed, beside, end = list[bool](), list[Thread](), time.monotonic()

    def attempt(item: Item, limit_s: float) -> None:
        try:
            failed.append(_run_item(item, folder / f"{item.part}.json", again, limit_s, dry_run=dry_run))
        except Exception:  # the other parts have little time, too
            traceback.print_exc()
            failed.append(True)

    for item in items:
        if wait is not None and item.part == STEPS_OF_RANKS:
            end += WAIT_S
            wait()
        end += 0.0 if item.beside else item.limit_s
        limit_s = DRY_RUN_LIMIT_S if dry_run else end - time.monotonic() + (item.limit_s if item.beside else 0.0)
        if item.beside:
            beside.append(Thread(target=attempt, args=(item, limit_s)))
            beside[-1].start()
            continue
        attempt(item, limit_s)
        while beside:
            beside.pop().join()
    # The parts may leave out the next item.
    for thread in beside:
        thread.join()
    return any(failed)


def _run_item(item: Item, path: Path, again: list[str], limit_s: float, *, dry_run: bool) -> bool:
    todo = set(runner.remaining(item.part, path, again))
    names, begin = [one for one in item.claims() if one in todo], time.monotonic()
    runner.run_part(item.part, names, path, dry_run=dry_run, limit_s=limit_s)
    rows = [row for row in read_rows(path).values() if row.claim in names]
    print(f"{item.part}: {len(rows)} claims in {time.monotonic() - begin:.0f} s", flush=True)
    # A load raised, ended its process, or did not end.
    if item.part == "kit" and (once.marks() or any(row.outcome == FALSE for row in rows)):
        kit.disable()
    return any(row.found.startswith(DRY_RUN_FAILED) for row in rows)


def collect(folder: Path, out: Path) -> None:
    """Write the outcomes of all claims, and all their tables, into one file for the documents."""
    paths = written.files_of([folder])
    tables = {name: table for path in paths for name, table in load(path).items() if name != CLAIMS}
    kind = written.kind_of([folder])
    made = written.made_by([folder], kind)
    save({CLAIMS: runner.summary(folder)[0], **overview(tables)}, written.file_of(kind, out), **made)


def print_summary(folder: Path) -> int:
    """Print all claims, and return the number of false ones."""
    table, counted = runner.summary(folder)
    print(f"\n{table}\n\n" + ", ".join(f"{counted[name]} {name}" for name in (TRUE, FALSE, NOT_REACHED)))
    return counted[FALSE]


def dry_run(parts: Sequence[str]) -> bool:
    """Run all checks with tiny sizes and write copies of all files; return whether one failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            failed = [run(one, folder / "gpu", parts, [], dry_run=True) for one in (*SESSIONS, REST)]
            written.dry_run(folder / "gpu", folder)
        finally:
            # Programs for the CPU.
            shutil.rmtree(kit.path_of("probe", "cpu").parent, ignore_errors=True)
        print_summary(folder / "gpu")
    return any(failed)


def main() -> None:
    """Parse the command line and run."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.session", description=__doc__, formatter_class=form)
    parser.add_argument("session", nargs="?", choices=(ALL, *SESSIONS), default=ALL, help="command; all by default")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run; all by default")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="claims or parts to check again")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="folder of results")
    parser.add_argument("--dry-run", action="store_true", help="use tiny sizes and CPUs, and a temporary folder")
    given = parser.parse_args()
    names = {claim.name for claims in PARTS.values() for claim in claims}
    if unknown := set(given.again) - names - set(PARTS):
        parser.error(f"--again is {', '.join(sorted(unknown))}; expected names of claims or parts")
    if given.dry_run:
        sys.exit(dry_run(given.parts))
    failed = run(given.session, given.out, given.parts, given.again, dry_run=False)
    if given.session == ALL:
        failed |= print_summary(given.out) > 0
        try:
            collect(given.out, given.out.with_suffix(".json"))
        except ValueError as error:
            sys.exit(str(error))
    sys.exit(failed)


if __name__ == "__main__":
    main()
