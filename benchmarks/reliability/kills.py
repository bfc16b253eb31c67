"""SIGKILL of training runs at random times; the resumed runs have the losses of uninterrupted ones."""

import argparse
import json
import os
import tempfile
from pathlib import Path

from benchmarks.reliability.tries import log_option, number_option, seed_option, summary
from benchmarks.render.results import Table
from tests.models.kill_training import kill_and_compare

STEPS_PER_KILL = 10
"""Mean number of training steps between two kills; a checkpoint is written every two steps."""


def options(parser: argparse.ArgumentParser) -> None:
    number_option(parser, 200, "Kills.")
    seed_option(parser)
    parser.add_argument("--per-run", type=int, default=5, help="Kills of each training run.")
    log_option(parser)


def benchmark(given: argparse.Namespace) -> dict[str, Table]:
    seed, per_run = given.seed, given.per_run
    with tempfile.TemporaryDirectory() as folder:
        # Starts take most of the time. Resumed runs load the program compiled by the uninterrupted one.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder) / "compiled")
        log = given.log or Path(folder) / "kills.jsonl"
        log.touch()
        ended = [json.loads(line) for line in log.read_text().splitlines()]
        for run in range(len(ended), given.number // per_run):
            fault = ""
            try:
                kill_and_compare(Path(folder) / str(run), per_run, seed + run, STEPS_PER_KILL)
            except (AssertionError, RuntimeError) as error:
                fault = " ".join(str(error).split())[:100]
            ended.append({"seed": seed + run, "fault": fault})
            with log.open("a") as file:
                file.write(json.dumps(ended[-1]) + "\n")
    bad = [one for one in ended if one["fault"]]
    notes = [f"Seeds from {seed}; {per_run} kills of each run."]
    notes += [f"Seed {one['seed']}: {one['fault']}." for one in bad]
    tried, held = len(ended) * per_run, (len(ended) - len(bad)) * per_run
    condition = "all losses equal those of an uninterrupted run, bit for bit"
    return {"summary": summary("SIGKILL of a training run", tried, held, condition, notes)}
