"""CPU time of `jax-moe-lb advise` for every model preset on 16 nodes of 8 H100, on one core.

Each search is a new process, so its time includes the imports. A model that does not fit has no search: `advise` prints
the changes with which it does.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping

from benchmarks.render.results import Table, Value
from jax_moe_lb.cli.advise import NOTHING_FITS
from jax_moe_lb.sim.config import preset_names

CLUSTER = "h100_16_nodes"


def cpu_s_of_children() -> float:
    """Return the CPU seconds of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def searched(model: str) -> list[Value]:
    """Run `advise` in a process; return the model, the simulated choices, the best one and the CPU seconds."""
    before_s = cpu_s_of_children()
    command = [sys.executable, "-m", "jax_moe_lb.cli", "advise", model, CLUSTER, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, NOTHING_FITS):
        raise RuntimeError(f"advise of {model} exited with {done.returncode}: {done.stderr}")
    found, took_s = json.loads(done.stdout), cpu_s_of_children() - before_s
    if done.returncode == NOTHING_FITS:
        return [model, None, "nothing fits", took_s]
    return [model, len(found["glances_s"]), found["best"], took_s]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="Search for one model.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    # Child processes inherit the affinity.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    # Presets of clusters have a model, too.
    models = [name for name in preset_names("model") if name not in preset_names("cluster")]
    rows = [searched(model) for model in models[: 1 if given.quick else None]]
    columns = {"model": "", "choices simulated": "d", "best": "", "CPU s": ".1f"}
    return {"searches": Table(columns, rows)}
