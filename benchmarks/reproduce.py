"""Run every available benchmark, store its results, and update the documents and a report.

    make reproduce                                # all benchmarks in sequence
    make reproduce ARGS="--loads DIR"             # including those of recorded expert loads: .npy files [layers,
    experts]
    make reproduce ARGS=--quick                   # smaller sizes, synthetic loads, results in a separate folder
    make reproduce ARGS="--minutes 600"           # without leaving out what does not end in 40 minutes
    python -m benchmarks.reproduce --only ultraep rails

Unavailable benchmarks are listed with the reason; their last results keep their date. The time left is estimated from
the times of earlier runs in `seconds.json` here. `--list` prints these times.
"""

import argparse
import importlib.util
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.network import sandbox
from benchmarks.render.documents import RESULTS, ROOT, write_documents
from benchmarks.render.html_report import write_report
from benchmarks.render.results import Table, Value, merge

# ---- times ----------------------------------------------------------------------------

FILE = Path(__file__).parent / "seconds.json"
"""Times of the last run of each benchmark, by size."""

UNKNOWN_S = 60.0
"""Estimate for a benchmark without an earlier run."""


class Seconds(NamedTuple):
    """Times of one run."""

    wall: float
    cpu: float


@dataclass
class Pace:
    """Times of the benchmarks of this run, estimated from earlier runs."""

    size: str
    names: Sequence[str]
    file: Path = FILE
    known: dict[str, Seconds] = field(init=False)
    ended: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        found = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.known = {name: Seconds(*times) for name, times in found.get(self.size, {}).items()}

    def expected_s(self, name: str) -> float:
        """Return the time of the last run, without its waits for a busy machine, in seconds."""
        return min(self.known[name]) if name in self.known else UNKNOWN_S

    @property
    def slowdown(self) -> float:
        """Time of the ended benchmarks over that of their last runs; 1 before the first end."""
        before = math.fsum(self.expected_s(name) for name in self.ended)
        return math.fsum(self.ended.values()) / before if before else 1.0

    def left_s(self) -> float:
        """Estimate the time left at the pace of this run, in seconds."""
        return math.fsum(self.expected_s(name) for name in self.names if name not in self.ended) * self.slowdown

    def leave_out(self, name: str) -> None:
        """Remove a benchmark from this run."""
        self.names = [other for other in self.names if other != name]

    def end(self, name: str, seconds: Seconds | None) -> None:
        """Note the end of a benchmark, and its times for later runs if it succeeded."""
        self.ended[name] = self.expected_s(name) if seconds is None else seconds.wall
        if seconds is None:
            return
        found = json.loads(self.file.read_text()) if self.file.exists() else {}
        found[self.size] = dict(sorted((found.get(self.size, {}) | {name: list(seconds)}).items()))
        lines = ",\n".join(
            f' "{size}": {{\n' + ",\n".join(f'  "{run}": {json.dumps(times)}' for run, times in of.items()) + "\n }"
            for size, of in found.items()
        )
        self.file.write_text(f"{{\n{lines}\n}}\n")

    def table(self) -> Table:
        """Return the times of the last runs, and their sum."""
        known = [(name, self.known[name]) for name in self.names if name in self.known]
        rows: list[list[Value]] = [[name, *seconds] for name, seconds in known]
        sums = [math.fsum(times) for times in zip(*(seconds for _, seconds in known), strict=True)] or [0.0, 0.0]
        unknown = ", ".join(name for name in self.names if name not in self.known)
        notes = [f"Never timed: {unknown}."] if unknown else []
        return Table({"benchmark": "", "wall s": ".0f", "CPU s": ".0f"}, [*rows, ["all of these", *sums]], notes=notes)


# ---- runs -----------------------------------------------------------------------------

LIMIT_S = 3600
"""Default time limit of a benchmark in seconds."""

Refusal = Callable[[argparse.Namespace], str | None]
"""Function returning the reason why a benchmark is unavailable, or `None`."""


def _loads(given: argparse.Namespace) -> str | None:
    return None if given.loads or given.quick else "recorded loads are not in the tree; --loads names their folder"


def _compilers(given: argparse.Namespace) -> str | None:
    found = importlib.util.find_spec("tokamax") and importlib.util.find_spec("libtpu")
    return None if found else "compilers of accelerators are not installed; ci/accelerators.sh does"


def _maxtext(given: argparse.Namespace) -> str | None:
    return None if importlib.util.find_spec("maxtext") else "install MaxText as in benchmarks/compiled/peer_maxtext.py"


def _network(given: argparse.Namespace) -> str | None:
    return sandbox.missing()


@dataclass(frozen=True)
class Run:
    """One benchmark."""

    module: str
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None
    refusal: Refusal = field(default=lambda given: None)
    result: str = ""
    aside: str = ""

    @property
    def name(self) -> str:
        """Name of the run in the results."""
        return self.result or self.file

    @property
    def file(self) -> str:
        """Name of the results file, one per module."""
        subject, _, name = self.module.rpartition(".")
        return f"{subject}_{name}" if subject in ("network", "reliability") else name

    def why_not(self, given: argparse.Namespace) -> str | None:
        """Return the reason for not running, `None` if it will run."""
        if why_not := self.refusal(given):
            return why_not
        if given.quick and self.quick is None:
            return "not in --quick"
        return f"{self.aside}; --only runs it" if self.aside and not (given.only or given.quick) else None

    def command(self, given: argparse.Namespace) -> list[str]:
        """Return the command without the output option."""
        chosen = self.quick if given.quick else self.options
        assert chosen is not None, self.name
        files = sorted(map(str, given.loads.glob("*.npy"))) if given.loads else []
        expanded = [
            part for option in chosen for part in {"LOADS": files, "DIR": [str(given.loads)]}.get(option, [option])
        ]
        return [sys.executable, "-m", *f"benchmarks.{self.module}".rsplit(".", self.module.count(".")), *expanded]


LONG = "takes five minutes or more"
MEASURED = "stays as it was measured"
CODECS = ("ratio 50, remembered", "ratio 50, shared")
RUNS = (
    Run("papers.ultraep", quick=("--tokens", "512")),
    Run("papers.feplb", quick=("--number", "200")),
    Run("papers.feplb_readings", quick=("--number", "20")),
    *(
        Run("plans.plans", (command,), (command, "--quick"), result=f"plans_{command}")
        for command in ("families", "balancers", "planners", "settings")
    ),
    Run("plans.plans", ("balancers", "--loads", "LOADS"), None, _loads, "plans_served"),
    Run("plans.plans", ("exact", "--loads", "LOADS"), ("exact", "--step", "29"), _loads, "plans_exact"),
    Run("plans.plans", ("times", "--loads", "LOADS"), ("times", "--step", "29"), _loads, "plans_times"),
    Run("plans.advice_regret", quick=("--quick",), aside=LONG),
    Run("plans.advice_time", quick=("--quick",)),
    Run("papers.rails", quick=()),
    Run("papers.sim_hybridep", quick=()),
    Run("papers.sim_ultraep", quick=("--tokens", "512")),
    Run("papers.sim_feplb", quick=("--number", "10")),
    Run("compiled.sim_gpu"),
    Run("papers.sim_networks", quick=()),
    Run("plans.stale_plans"),
    Run("papers.sim_rails", quick=("--domains", "8", "--seeds", "1")),
    Run("papers.sim_rails", ("--iteration",), ("--iteration", "--seeds", "1"), result="sim_rails_iteration"),
    Run("plans.relocation", ("--loads", "DIR", "--groups", "8"), None, _loads),
    Run("plans.break_even", ("--plot", "docs/how-to/break_even.png"), ("--quick",)),
    Run("papers.sim_once"),
    Run("layer.memory", quick=()),
    Run("layer.systems"),
    Run("training.losses", aside=LONG),
    Run("papers.codec", ("--steps", "200"), aside=LONG),
    Run(
        "papers.codec",
        ("--steps", "800", "--seeds", "2", "--codecs", "ratio 1", *CODECS),
        result="codec_long",
        aside=LONG,
    ),
    Run(
        "papers.codec",
        ("--gradients", "--steps", "1000"),
        ("--gradients", "--steps", "20", "--seeds", "1"),
        result="gradient_codec",
        aside=LONG,
    ),
    Run("training.curves", ("table",), aside=MEASURED),
    Run("compiled.peers", refusal=_compilers),
    Run("compiled.peers", ("--maxtext",), None, _maxtext, "peers_maxtext"),
    Run("compiled.pipeline", refusal=_compilers),
    Run("compiled.smallest_cluster", ("--device", "h100"), refusal=_compilers),
    Run("training.generate"),
    Run("training.published", quick=()),
    Run("training.loading", ("--layers", "4")),
    Run("compiled.memory_model", refusal=_compilers),
    Run("compiled.timeline", ("steps",), refusal=_compilers),
    Run("compiled.timeline", ("options",), refusal=_compilers, result="timeline_options"),
    Run("compiled.timeline", ("forms",), refusal=_compilers, result="timeline_tpu"),
    Run("compiled.slices", refusal=_compilers),
    Run("reliability.files", ("--number", "100000"), ()),
    Run(
        "reliability.files",
        ("--number", "20000", "--seed", "1"),
        ("--seed", "1"),
        result="reliability_files_again",
    ),
    Run("reliability.plans", ("--number", "20000"), ()),
    Run("reliability.layers", ("--number", "160"), ("--number", "1"), aside=LONG),
    Run("reliability.soak", quick=("--number", "300"), aside=LONG),
    Run("reliability.sockets", aside="runs a C++ test"),
    Run("reliability.mutants", aside="lists recorded mutants"),
    *(
        Run(f"reliability.{name}", aside=LONG)
        for name in ("calls", "interrupts", "kills", "writers", "process_kills", "training_kills", "stalls")
    ),
    Run("network.hybridep", refusal=_network, aside=MEASURED),
    Run("network.hybridep", ("--near",), refusal=_network, result="network_hybridep_near", aside=MEASURED),
    Run("network.once", refusal=_network, aside=MEASURED),
    Run("network.rails", refusal=_network, aside=MEASURED),
    Run(
        "network.training",
        ("compare", "3"),
        refusal=_network,
        result="network_training_measured_3",
        aside=MEASURED,
    ),
    Run("network.training_speed", ("table",), refusal=_network, aside=MEASURED),
    Run("network.whole_runs", refusal=_network, aside=MEASURED),
)


def run(one: Run, given: argparse.Namespace, folder: Path) -> tuple[str, Seconds | None]:
    """Run a benchmark and return its status, and its times if it succeeded; results are replaced only then."""
    log, found = folder / "logs" / f"{one.name}.log", folder / "logs" / f"{one.name}.json"
    found.unlink(missing_ok=True)
    start_s, start_cpu_s = time.monotonic(), _cpu_s()
    with log.open("w") as file:
        command = [*one.command(given), "--out", str(found)]
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, timeout=LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
    seconds = Seconds(round(time.monotonic() - start_s, 1), round(_cpu_s() - start_cpu_s, 1))
    if code:
        return f"FAILED with {code} after {seconds.wall:.0f} s: {log}", None
    merge(found, (folder if given.quick else RESULTS) / f"{one.file}.json")
    return f"{seconds.wall:.0f} s", seconds


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Use smaller sizes, with results in a separate folder.")
    parser.add_argument("--loads", type=Path, help="Folder of recorded loads.")
    parser.add_argument("--only", nargs="+", default=[], choices=[one.name for one in RUNS], metavar="NAME")
    parser.add_argument("--folder", type=Path, help="Folder of logs and report; runs/reproduce by default.")
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="Time limit; benchmarks that would end later are left out."
    )
    parser.add_argument("--list", action="store_true", help="Print the runs with their last times, and run none.")
    return parser.parse_args()


def main() -> None:
    """Run all benchmarks; exit with 1 if one failed."""
    given = options()
    folder = (given.folder or ROOT / "runs" / ("reproduce-quick" if given.quick else "reproduce")).resolve()
    chosen = [one for one in RUNS if not given.only or one.name in given.only]
    ended = {one.name: f"left out: {why_not}" for one in chosen if (why_not := one.why_not(given))}
    pace = Pace("quick" if given.quick else "full", [one.name for one in chosen if one.name not in ended])
    for name, how in ended.items():
        print(f"{name}: {how}", flush=True)
    if given.list:
        print(pace.table())
        return
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    end_s = math.inf if given.only else time.monotonic() + 60 * given.minutes
    for one in chosen:
        if one.name in ended:
            continue
        seconds = None
        if pace.expected_s(one.name) * pace.slowdown > end_s - time.monotonic():
            ended[one.name] = f"left out: it would end after {given.minutes:.0f} minutes; --minutes allows more"
            pace.leave_out(one.name)
        else:
            ended[one.name], seconds = run(one, given, folder)
            pace.end(one.name, seconds)
        print(f"{one.name}: {ended[one.name]}; {math.ceil(pace.left_s() / 60)} min left", flush=True)
    if not given.quick:
        write_documents()
    print(write_report(folder if given.quick else RESULTS, folder / "report.html", ended))
    sys.exit(any(how.startswith("FAILED") for how in ended.values()))


if __name__ == "__main__":
    main()
