"""Kinds of tries. Each returns a table `summary`: input or fault, number tried and held, condition for holding."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.render.results import Table, Value

ROOT = Path(__file__).parents[2]
COLUMNS = {"input or fault": "", "tried": "d", "held": "d", "condition": ""}

PATHS = ("convert", "calibrate", "train", "resume")
"""Commands whose system calls fail."""

PER_RUN, STEPS_PER_KILL = 10, 10
"""Kills of a training run, and mean number of steps between two; a checkpoint is written every two steps."""

INPUTS = 18
"""Inputs of each random layer, one of each kind."""

Tables = dict[str, Table]
Tries = list[dict[str, Any]]


def log_file(text: str) -> Path:
    """Return the path of a log, created if missing; type of an option."""
    path = Path(text)
    path.touch()
    return path


def summary(name: str, tried: int, held: int, condition: str, notes: Sequence[str] = ()) -> Tables:
    return {"summary": Table(COLUMNS, [[name, tried, held, condition]], notes=notes)}


def summary_of(tries: Tries, name: str, condition: str, notes: Sequence[str] = ()) -> Tables:
    """Return the summary of tries, with the first faults."""
    bad = [f"Try {at}: {one['faults'][0][:200]}." for at, one in enumerate(tries) if one["faults"]]
    notes = [*notes, *bad[:9]]
    if stalls := sum(one.get("stalls", 0) for one in tries):
        notes += [f"{stalls} times a run ended in one line, as no step ended although all processes responded."]
    return summary(name, len(tries), len(tries) - len(bad), condition, notes)


def run_into(log: Path | None, *command: str) -> Tries:
    """Run a module that prints a JSON object per try, append each one to a log, and return all."""
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if log is not None:
            with log.open("a") as file:
                file.write(line)
    process.wait()
    return objects("".join(lines))


def objects(text: str) -> Tries:
    # A killed run may end in the middle of a line.
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def logged(given: argparse.Namespace) -> Tries:
    """Return the finished tries of the log."""
    return objects(given.log.read_text()) if given.log else []


# ---- system calls and sockets ---------------------------------------------------------


def calls(given: argparse.Namespace) -> Tables:
    """Fail the system calls of commands on their files, with each error; then run the command again."""
    tries = logged(given)
    for path in PATHS:
        if path not in {one["path"] for one in tries}:
            tries += run_into(given.log, "tests.faults.run", path, "1")
    condition = "nothing lost, one line, and the next command has the right result"
    return summary_of(tries, "failed system calls", condition, ["Every call, with five errors."])


def sockets(given: argparse.Namespace) -> Tables:
    """Fail sends and receives of peer copies in one of four processes, or kill it before a send.

    The C++ test `sockets_test` does so; ci/sanitizers.sh builds it.
    """
    tried, held, program = 0, 0, ROOT / "build" / "cpp" / "sockets_test"
    for part, pattern in (("fail 1", r"failed (\d+) calls"), ("die 0", r"killed before each of (\d+) sends")):
        done = subprocess.run([program, *part.split()], stderr=subprocess.PIPE, text=True)
        found = re.search(pattern, done.stderr)
        if found is None:
            raise RuntimeError(f"{program} {part} printed {done.stderr[-200:]!r}; expected a number of calls")
        tried += int(found[1])
        held += int(found[1]) * (done.returncode == 0)
    condition = "all four processes continue, or all end in one line that names the error or the process"
    return summary("faults of sockets of peer copies", tried, held, condition)


# ---- inputs ---------------------------------------------------------------------------


def files(given: argparse.Namespace) -> Tables:
    """Read mutated files of every kind in one worker process."""
    from tests.fuzz.run import failures, fuzzed
    from tests.fuzz.worker import MOST_BYTES, MOST_S

    results = fuzzed(given.seed, given.number or 200)
    bad = failures(results)
    notes = [f"Seed {given.seed}."]
    notes += [f"File {one.index}: {one.kind}, {one.outcome}: {one.detail[:100]}." for one in bad[:9]]
    condition = f"legal data or one line, in {MOST_S:g} CPU s and {MOST_BYTES // 2**20} MiB"
    return summary("mutated files", len(results), len(results) - len(bad), condition, notes)


def plans(given: argparse.Namespace) -> Tables:
    """Check plans of every balancer for random shapes, loads and histories."""
    from tests.stress.plans import random_plans

    tries = [
        {"faults": [f"{case.balancer}, {case.fault}"] if case.fault else []}
        for case in random_plans(given.seed, given.number or 200)
    ]
    condition = "legal plan: all tokens are served, by slots with their expert, inside the domain"
    note = f"Seed {given.seed}; plans on the host, for up to 32 ranks and 128 experts."
    return summary_of(tries, "random plans", condition, [note])


def layers(given: argparse.Namespace) -> Tables:
    """Compare random layers under random transformations with a dense float64 reference."""
    found = logged(given)
    first, number = 1 + max((one["layer"] for one in found), default=-1), given.number or 160
    if first < number:
        found += run_into(given.log, "tests.stress.modules", str(first), str(number), str(INPUTS))
    bad = [one for one in found if one["faults"]]
    tried = sum(max(one["cases"], bool(one["faults"])) for one in found)
    held = tried - sum(max(one["cases"], 1) for one in bad)
    refused = sum(bool(one["refused"]) for one in found)
    notes = [f"{len(found) - refused} layers, and {refused} refused combinations of options."]
    notes += [f"Layer {one['layer']}: {one['faults'][0][:200]}." for one in bad[:9]]
    condition = "values and all gradients equal those of a dense float64 layer, counts exactly"
    return summary("inputs of random layers", tried, held, condition, notes)


def mutants(given: argparse.Namespace) -> Tables:
    """Count the mutants of C++ with a wrong operand recorded by `ci/mutants.py --record`."""
    operators = json.loads((ROOT / "tests" / "mutation" / "operands.json").read_text())["operators"].values()
    built = sum(sum(counts.values()) - counts.get("does not build", 0) for counts in operators)
    killed = sum(counts.get("killed", 0) for counts in operators)
    return summary("mutants with a wrong operand", built, killed, "a test fails")


# ---- training runs and processes -------------------------------------------------------


def kills(given: argparse.Namespace) -> Tables:
    """End training runs by SIGKILL at random times; each seed is a run of `PER_RUN` kills."""
    from tests.models.kill_training import kill_and_compare

    with tempfile.TemporaryDirectory() as folder:
        # Starts take most of the time. Resumed runs load the program compiled by the uninterrupted one.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder) / "compiled")
        log = given.log or log_file(f"{folder}/kills.jsonl")
        ended = objects(log.read_text())
        for run in range(len(ended), (given.number or 200) // PER_RUN):
            fault = ""
            try:
                kill_and_compare(Path(folder) / str(run), PER_RUN, given.seed + run, STEPS_PER_KILL)
            except (AssertionError, RuntimeError) as error:
                fault = " ".join(str(error).split())[:100]
            ended.append({"seed": given.seed + run, "fault": fault})
            with log.open("a") as file:
                file.write(json.dumps(ended[-1]) + "\n")
    bad = [one for one in ended if one["fault"]]
    notes = [f"Seeds from {given.seed}; {PER_RUN} kills of each run."]
    notes += [f"Seed {one['seed']}: {one['fault']}." for one in bad]
    condition = "all losses equal those of an uninterrupted run, bit for bit"
    held = PER_RUN * (len(ended) - len(bad))
    return summary("SIGKILL of a training run", PER_RUN * len(ended), held, condition, notes)


def interrupts(given: argparse.Namespace) -> Tables:
    """Send SIGINT to training runs at random times, then resume them."""
    condition = "at most one line, and the resumed run has the losses of an uninterrupted run, bit for bit"
    return stops(given, "interrupts", "SIGINT of a training run", condition)


def writers(given: argparse.Namespace) -> Tables:
    """Start two training runs of one folder, at once or one after the other."""
    condition = "one run is refused in one line, or starts after the other; the losses are right"
    return stops(given, "writers", "two runs of one folder", condition)


def stops(given: argparse.Namespace, kind: str, name: str, condition: str) -> Tables:
    """Return the summary of tries of `tests.faults.stops`."""
    tries, number = logged(given), given.number or 200
    if len(tries) < number:
        tries += run_into(given.log, "tests.faults.stops", kind, str(number - len(tries)), str(len(tries)))
    return summary_of(tries, name, condition)


def process_kills(given: argparse.Namespace) -> Tables:
    """End one of two and of four processes that have joined by SIGKILL."""
    condition = "all others end in one line that names it"
    return of_processes(given, "kills", 100, "SIGKILL of one process of several", condition)


def training_kills(given: argparse.Namespace) -> Tables:
    """End one of two and of four training processes by SIGKILL, then resume the run."""
    name = "SIGKILL of one training process of several"
    condition = (
        "all others name it in one line, and the resumed run has the losses of an uninterrupted one, bit for bit"
    )
    return of_processes(given, "trainings", 100, name, condition)


def stalls(given: argparse.Namespace) -> Tables:
    """Stop each of two and of four processes by SIGSTOP, before the first training step and later."""
    condition = (
        "all others name it in 30 s; the run continues, or ends in one line and is resumed; its losses are right"
    )
    # A process is stopped in two phases.
    return of_processes(given, "stalls", 1, "SIGSTOP of one process of several", condition)


def of_processes(given: argparse.Namespace, kind: str, number: int, name: str, condition: str) -> Tables:
    """Return the tables of tries of `tests.faults.processes` with two and with four processes."""
    tries, number = logged(given), given.number or number
    for processes in (2, 4):
        done = sum(one["processes"] == processes for one in tries)
        total = 2 * processes * number if kind == "stalls" else number
        if done < total:
            tries += run_into(given.log, "tests.faults.processes", kind, *map(str, (processes, total - done, done)))
    keys = ("processes", "phase", "stopped") if kind == "stalls" else ("processes",)
    return summary_of(tries, name, condition) | {"processes": longest(tries, keys)}


def longest(tries: Tries, keys: Sequence[str]) -> Table:
    """Return the longest time until the others have named a process, for each value of some keys."""
    rows: list[list[Value]] = []
    for key in sorted({tuple(str(one[name]) for name in keys) for one in tries}):
        of_key = [one for one in tries if tuple(str(one[name]) for name in keys) == key]
        rows.append([*key, len(of_key), max(one["seconds"] for one in of_key)])
    return Table({**dict.fromkeys(keys, ""), "tried": "d", "longest until named, s": ".1f"}, rows)
