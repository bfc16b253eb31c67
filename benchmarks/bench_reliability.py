"""Inputs and faults tried on plans, layers, readers of files, training runs and a layer in a long loop.

    python -m benchmarks.bench_reliability plans --number 20000    # plans of every balancer for random counts
    python -m benchmarks.bench_reliability layers --number 10000   # random layers against a float64 reference
    python -m benchmarks.bench_reliability files --number 100000   # mutated files of every kind
    python -m benchmarks.bench_reliability kills --number 200      # SIGKILL at random times, then --resume
    python -m benchmarks.bench_reliability signatures --number 160 # layers drawn from signatures, 64 inputs each
    python -m benchmarks.bench_reliability calls --number 1        # failed system calls of commands, every one
    python -m benchmarks.bench_reliability sockets --log PROGRAM   # the same of peer copies, by the C++ sockets_test
    python -m benchmarks.bench_reliability interrupts              # SIGINT at random times, then --resume
    python -m benchmarks.bench_reliability writers                 # two training runs of one folder
    python -m benchmarks.bench_reliability process_kills --number 100  # SIGKILL of one of two and of four processes
    python -m benchmarks.bench_reliability training_kills --number 20  # the same of training, then --resume
    python -m benchmarks.bench_reliability stalls --number 1       # SIGSTOP of each of two and of four processes
    python -m benchmarks.bench_reliability mutants --log FILE      # mutants with wrong operands, recorded in a file
    python -m benchmarks.bench_reliability soak --steps 2000       # memory, threads and files of a layer on 64 devices

Each run has a table `summary` with the same columns: the input or fault, the number tried, the number held, and the
condition for holding. `--log FILE` appends the results to a file, and continues after those in it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reliability_tries import (
    calls,
    mutants,
    process_kills,
    signatures,
    sockets,
    stalls,
    stops,
    summary,
    training_kills,
)
from benchmarks.render.results import Table, Value, out_option, report
from tests.fuzz.run import by_kind, failures, fuzzed
from tests.fuzz.worker import HELD, MOST_BYTES, MOST_S

ROOT = Path(__file__).parents[1]


def files(number: int, seed: int) -> dict[str, Table]:
    """Read mutated files in one worker process."""
    results = fuzzed(seed, number)
    kinds = by_kind(results)
    rows: list[list[Value]] = []
    for kind, outcomes in sorted(kinds.items()):
        held = [outcomes[outcome] for outcome in HELD]
        rows.append([kind, outcomes.total(), *held, outcomes.total() - sum(held)])
    condition = f"legal data or one line, in {MOST_S:g} CPU s and {MOST_BYTES // 2**20} MiB"
    bad = failures(results)
    notes = [f"Seed {seed}.", *(f"File {one.index}: {one.kind}, {one.outcome}: {one.detail[:100]}." for one in bad[:9])]
    return {
        "summary": summary("mutated files", len(results), len(results) - len(bad), condition, notes),
        "kinds": Table({"kind": "", "files": "d", **dict.fromkeys((*HELD, "failed"), "d")}, rows),
    }


def plans(number: int, seed: int) -> dict[str, Table]:
    """Plan for random counts with every balancer."""
    from tests.stress.plans import random_plans

    tried: Counter[str] = Counter()
    held: Counter[str] = Counter()
    notes = [f"Seed {seed}; plans on the host, for up to 32 ranks and 128 experts."]
    for case in random_plans(seed, number):
        tried[case.balancer] += 1
        held[case.balancer] += not case.fault
        notes += [f"{case.balancer}, {case.fault[:200]}."] if case.fault else []
    rows: list[list[Value]] = [[name, tried[name], held[name]] for name in sorted(tried)]
    condition = "legal plan: all tokens are served, by slots with their expert, inside the domain"
    return {
        "summary": summary("random plans", tried.total(), held.total(), condition, notes[:9]),
        "balancers": Table({"balancer": "", "plans": "d", "legal": "d"}, rows),
    }


PER_PROCESS = 4
"""Programs of one process."""

AXES = ("system", "layout", "router", "losses", "dtype", "transformation", "transfer", "saved", "chunks")
"""Fields of a program in the table of a recorded run."""


def layers(number: int, per_program: int, log: Path | None) -> dict[str, Table]:
    """Compare random layers with a float64 reference, in processes of `PER_PROCESS` programs."""
    from tests.stress.programs import SEED, draw_programs

    with tempfile.TemporaryDirectory() as folder:
        log = log or Path(folder) / "layers.jsonl"
        log.touch()
        total = number // per_program
        left = [at for at in range(total) if at not in logged(log, per_program)]
        for at in range(0, len(left), PER_PROCESS):
            run_layers(per_program, left[at : at + PER_PROCESS], log)
        done = logged(log, per_program)
    programs = draw_programs(total)
    rows: list[list[Value]] = []
    bad: list[str] = []
    for at, faults in sorted(done.items()):
        fields = [str(getattr(programs[at], name)) for name in AXES]
        rows.append([at, *fields, per_program, per_program - len(faults)])
        bad += faults
    tried = per_program * len(done)
    condition = "values and all gradients equal those of a dense float64 layer, counts exactly"
    notes = [f"Seed {SEED}; {len(done)} compiled layers of {per_program} inputs each.", *bad[:9]]
    columns = {"layer": "d", **dict.fromkeys(AXES, ""), "cases": "d", "held": "d"}
    return {
        "summary": summary("random layers", tried, tried - len(bad), condition, notes),
        "layers": Table(columns, rows),
    }


def logged(log: Path, per_program: int) -> dict[int, list[str]]:
    """Return the failed cases of each finished program of a log, one line each."""
    cases: dict[int, dict[int, dict[str, Any]]] = {}
    for line in log.read_text().splitlines():
        case = json.loads(line)
        # The last result counts: an interrupted program starts again.
        cases.setdefault(case["program"], {})[case["number"]] = case
    found = {}
    for program, ended in cases.items():
        if len(ended) >= per_program:
            failed = [case for case in ended.values() if case["faults"]]
            found[program] = [f"Case {program}.{case['number']}: {case['faults'][0][:200]}." for case in failed]
    return found


def run_layers(per_program: int, numbers: list[int], log: Path) -> None:
    """Run programs in one process and append the results to a log; all cases of a program that ends it have failed."""
    command = [sys.executable, "-m", "tests.stress.worker", str(per_program), *map(str, numbers)]
    with log.open("ab") as file:
        process = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.PIPE)
        if process.returncode == 0:
            return
        done = logged(log, per_program)
        fault = process.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
        broken = next(number for number in numbers if number not in done)
        for number in range(per_program):
            case = {"program": broken, "number": number, "pattern": "", "faults": [fault]}
            file.write(json.dumps(case).encode() + b"\n")
    run_layers(per_program, numbers[numbers.index(broken) + 1 :], log)


STEPS_PER_KILL = 10
"""Mean number of training steps between two kills; a checkpoint is written every two steps."""


def kills(number: int, seed: int, per_run: int, log: Path | None) -> dict[str, Table]:
    """Kill training runs, `per_run` times each, and compare their losses with those of uninterrupted runs."""
    from tests.models.kill_training import kill_and_compare

    with tempfile.TemporaryDirectory() as folder:
        # Starts take most of the time. Resumed runs load the program compiled by the uninterrupted one.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder) / "compiled")
        log = log or Path(folder) / "kills.jsonl"
        log.touch()
        ended = [json.loads(line) for line in log.read_text().splitlines()]
        for run in range(len(ended), number // per_run):
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


INPUTS = 64
"""Inputs of each layer drawn from signatures."""

WARM_UP = 200
"""Steps before the first measurement of a soak."""

MOST_GROWTH = 0.01
"""Largest relative growth of the resident memory."""


TUNABLES = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=2"
"""Allocator without caches of freed memory for each thread, which grow until every thread has freed every size."""


def without_caches() -> None:
    """Start this command in place of the process, with `TUNABLES`."""
    if os.environ.get("GLIBC_TUNABLES") != TUNABLES:
        command = [sys.executable, "-m", "benchmarks.bench_reliability", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"GLIBC_TUNABLES": TUNABLES})


def resources() -> dict[str, float]:
    """Return resident memory in MB, open file descriptors and threads of this process."""
    status = Path("/proc/self/status").read_text().split("\n")
    fields = dict(line.split(":", 1) for line in status if ":" in line)
    return {
        # Pages of files come and go with the page cache of the system.
        "resident memory without files, MB": int(fields["RssAnon"].split()[0]) * 1024 / 1e6,
        "file descriptors": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(fields["Threads"]),
    }


def soak(num_steps: int, num_devices: int) -> dict[str, Table]:
    """Take training steps of a small layer on virtual devices; Ctrl-C ends them early."""
    without_caches()
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jax_moe_lb as lb

    lb.use_virtual_cpu_devices(num_devices)
    mesh = jax.make_mesh((num_devices,), ("expert",))
    experts = lb.ExpertConfig(8)
    layer = lb.MoE(16, 2 * num_devices, lb.TopK(2), mesh=mesh, system="exact", experts=experts, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    @jax.jit
    def step(params: nnx.State, key: jax.Array) -> tuple[nnx.State, jax.Array]:
        x = jax.random.normal(key, (num_devices * 4, 16)) + 1.0

        def loss(params: nnx.State) -> jax.Array:
            y, stats = nnx.merge(graph, params, rest)(x)
            return jnp.square(y - jnp.roll(x, 1, axis=1)).mean() + lb.router_loss(stats)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    found: list[dict[str, float]] = []
    with suppress(KeyboardInterrupt):
        for number in range(num_steps):
            params, value = step(params, jax.random.key(number))
            if not np.isfinite(float(value)):
                raise RuntimeError(f"the loss of step {number} is {float(value)}; expected a finite number")
            if number >= WARM_UP and number % 50 == 49:
                found.append(resources())
                print(f"step {number + 1}: {found[-1]}", flush=True)
    num_steps = WARM_UP + 50 * len(found)
    rows: list[list[Value]] = []
    held = 0
    for name, first in found[0].items():
        last = found[-1][name]
        most = first * (1 + MOST_GROWTH) if name.startswith("resident") else first
        held += last <= most
        rows.append([name, first, max(one[name] for one in found), last, most])
    condition = f"memory, file descriptors and threads do not grow after {WARM_UP} steps; memory by at most 1 %"
    note = f"Training steps of a layer on {num_devices} virtual devices, with GLIBC_TUNABLES={TUNABLES}."
    columns = {"resource": "", "first": ".1f", "maximum": ".1f", "last": ".1f", "largest last": ".1f"}
    return {
        "summary": summary(
            "training steps in one process", num_steps, num_steps * (held == len(rows)), condition, [note]
        ),
        "resources": Table(columns, rows),
    }


PARTS = ("plans", "layers", "files", "kills", "soak", "signatures", "calls", "interrupts", "writers", "mutants")
PARTS += ("sockets", "process_kills", "training_kills", "stalls")


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--number", type=int, default=200, help="Plans, layers or cases, files, kills or other tries.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of plans and mutations, or of the first run to kill.")
    parser.add_argument("--per-program", type=int, default=40, help="Cases of each compiled layer.")
    parser.add_argument("--per-run", type=int, default=5, help="Kills of each training run.")
    parser.add_argument("--log", type=Path, help="File of finished layers or runs, appended to and not repeated.")
    parser.add_argument("--steps", type=int, default=2000, help="Steps of the soak.")
    parser.add_argument("--devices", type=int, default=64, help="Virtual devices of the soak.")
    out_option(parser)
    given = parser.parse_args()
    parts = {
        "plans": lambda: plans(given.number, given.seed),
        "layers": lambda: layers(given.number, given.per_program, given.log),
        "files": lambda: files(given.number, given.seed),
        "kills": lambda: kills(given.number, given.seed, given.per_run, given.log),
        "soak": lambda: soak(given.steps, given.devices),
        "signatures": lambda: signatures(given.number, INPUTS, given.log),
        "calls": lambda: calls(given.number, given.log),
        "interrupts": lambda: stops("interrupts", given.number, given.log),
        "writers": lambda: stops("writers", given.number, given.log),
        "sockets": lambda: sockets(given.log or ROOT / "build" / "cpp" / "sockets_test"),
        "process_kills": lambda: process_kills(given.number, given.log),
        "training_kills": lambda: training_kills(given.number, given.log),
        "stalls": lambda: stalls(given.number, given.log),
        "mutants": lambda: mutants(given.log or ROOT / "tests" / "mutation" / "operands.json"),
    }
    report(parts[given.part](), given.out)


if __name__ == "__main__":
    main()
