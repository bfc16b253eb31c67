"""Run every available benchmark, store its results, and update the documents.

    make reproduce                                # all benchmarks in sequence
    make reproduce ARGS="--loads DIR"             # including those of recorded expert loads: .npy files [layers,
    experts]
    make reproduce ARGS=--quick                   # smaller sizes, synthetic loads, results in a separate folder
    python -m benchmarks.reproduce --only ultraep hybridep

Unavailable benchmarks are listed with the reason; their last results keep their date.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.network import sandbox
from benchmarks.render.documents import RESULTS, ROOT, write_documents
from benchmarks.render.results import merge

LIMIT_S = 3600
"""Time limit of a benchmark in seconds."""

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
    Run("plans.plans", ("jnp", "--loads", "LOADS"), ("jnp", "--step", "29"), _loads, "plans_jnp"),
    Run("plans.plans", ("times", "--loads", "LOADS"), ("times", "--step", "29"), _loads, "plans_times"),
    Run("plans.advice_regret", quick=("--quick",), aside=LONG),
    Run("papers.rails", quick=()),
    Run("papers.sim_hybridep", quick=()),
    Run("papers.sim_ultraep", quick=("--tokens", "512")),
    Run("papers.sim_feplb", quick=("--number", "10")),
    Run("compiled.sim_gpu"),
    Run("papers.sim_networks", quick=()),
    Run("plans.limits", quick=("--seeds", "1")),
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
        ("--gradients", "--steps", "1000"),
        ("--gradients", "--steps", "20", "--seeds", "1"),
        result="gradient_codec",
        aside=LONG,
    ),
    Run("training.curves", ("table",), aside=MEASURED),
    Run("compiled.peers", refusal=_compilers),
    Run("compiled.peers", ("--maxtext",), None, _maxtext, "peers_maxtext"),
    Run("compiled.smallest_cluster", ("--device", "h100"), refusal=_compilers),
    Run("training.published", quick=()),
    Run("training.loading", ("--layers", "4")),
    Run("compiled.memory_model", refusal=_compilers),
    Run("compiled.timeline", ("steps",), refusal=_compilers),
    Run("compiled.timeline", ("options",), refusal=_compilers, result="timeline_options"),
    Run("compiled.timeline", ("forms",), refusal=_compilers, result="timeline_tpu"),
    Run("compiled.timeline", ("planner",), refusal=_compilers, result="timeline_planner"),
    Run("compiled.torus", quick=()),
    Run("compiled.slices", refusal=_compilers),
    Run("reliability.files", ("--number", "100000"), ()),
    Run("reliability.files", ("--number", "20000", "--seed", "1"), ("--seed", "1"), result="reliability_files_again"),
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
    Run("network.training", ("compare",), None, _network, "network_training_measured_6", MEASURED),
    Run("network.training_speed", ("table",), refusal=_network, aside=MEASURED),
    Run("network.whole_runs", refusal=_network, aside=MEASURED),
)


def run(one: Run, given: argparse.Namespace, folder: Path) -> str:
    """Run a benchmark and return its status; results are replaced only if it succeeds."""
    log, found = folder / f"{one.name}.log", folder / f"{one.name}.json"
    found.unlink(missing_ok=True)
    start_s = time.monotonic()
    with log.open("w") as file:
        command = [*one.command(given), "--out", str(found)]
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, timeout=LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
    seconds = time.monotonic() - start_s
    if code:
        return f"FAILED with {code} after {seconds:.0f} s: {log}"
    if not given.quick:
        merge(found, RESULTS / f"{one.file}.json")
    return f"{seconds:.0f} s"


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Use smaller sizes, with results in a separate folder.")
    parser.add_argument("--loads", type=Path, help="Folder of recorded loads.")
    parser.add_argument("--only", nargs="+", default=[], choices=[one.name for one in RUNS], metavar="NAME")
    return parser.parse_args()


def main() -> None:
    """Run all benchmarks; exit with 1 if one failed."""
    given, failed = options(), False
    folder = ROOT / "runs" / ("reproduce-quick" if given.quick else "reproduce")
    folder.mkdir(parents=True, exist_ok=True)
    for one in RUNS:
        if given.only and one.name not in given.only:
            continue
        why_not = one.why_not(given)
        status = f"left out: {why_not}" if why_not else run(one, given, folder)
        failed |= status.startswith("FAILED")
        print(f"{one.name}: {status}", flush=True)
    if not given.quick:
        write_documents()
    sys.exit(failed)


if __name__ == "__main__":
    main()
