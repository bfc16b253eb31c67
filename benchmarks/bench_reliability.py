"""Inputs and faults tried on readers of files, training runs and a layer in a long loop.

    python -m benchmarks.bench_reliability files --number 100000   # mutated files of every kind
    python -m benchmarks.bench_reliability kills --number 200      # SIGKILL at random times, then --resume
    python -m benchmarks.bench_reliability soak --steps 2000       # memory, threads and files of a layer on 64 devices

Each run has a table `summary` with the same columns: the input or fault, the number tried, the number held, and the
condition for holding.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.results import Table, Value, out_option, report
from tests.fuzz.run import by_kind, failures, fuzzed
from tests.fuzz.worker import HELD, MOST_BYTES, MOST_S

COLUMNS = {"input or fault": "", "tried": "d", "held": "d", "condition": ""}
"""Columns of every table `summary`."""


def summary(name: str, tried: int, held: int, condition: str, notes: Sequence[str] = ()) -> Table:
    """Return the summary of a run."""
    return Table(COLUMNS, [[name, tried, held, condition]], notes=notes)


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


def kills(number: int, seed: int, per_run: int) -> dict[str, Table]:
    """Kill training runs, `per_run` times each, and compare their losses with those of uninterrupted runs."""
    from tests.models.kill_training import kill_and_compare

    held, notes = 0, [f"Seeds from {seed}; {per_run} kills of each run."]
    for run in range(number // per_run):
        with tempfile.TemporaryDirectory() as folder:
            try:
                kill_and_compare(Path(folder), per_run, seed + run)
                held += per_run
            except (AssertionError, RuntimeError) as error:
                notes.append(f"Seed {seed + run}: {' '.join(str(error).split())[:100]}.")
    condition = "all losses equal those of an uninterrupted run, bit for bit"
    return {"summary": summary("SIGKILL of a training run", number // per_run * per_run, held, condition, notes)}


WARM_UP = 200
"""Steps before the first measurement of a soak."""

MOST_GROWTH = 0.01
"""Largest relative growth of the resident memory."""


def resources() -> dict[str, float]:
    """Return resident memory in MB, open file descriptors and threads of this process."""
    status = Path("/proc/self/status").read_text().split("\n")
    fields = dict(line.split(":", 1) for line in status if ":" in line)
    return {
        "resident memory, MB": int(fields["VmRSS"].split()[0]) * 1024 / 1e6,
        "file descriptors": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(fields["Threads"]),
    }


def soak(num_steps: int, num_devices: int) -> dict[str, Table]:
    """Take training steps of a small layer on virtual devices."""
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
    for number in range(num_steps):
        params, value = step(params, jax.random.key(number))
        if not np.isfinite(float(value)):
            raise RuntimeError(f"the loss of step {number} is {float(value)}; expected a finite number")
        if number >= WARM_UP and number % 50 == 49:
            found.append(resources())
            print(f"step {number + 1}: {found[-1]}", flush=True)
    rows: list[list[Value]] = []
    held = 0
    for name, first in found[0].items():
        last = found[-1][name]
        most = first * (1 + MOST_GROWTH) if name.startswith("resident") else first
        held += last <= most
        rows.append([name, first, max(one[name] for one in found), last, most])
    condition = f"memory, file descriptors and threads do not grow after {WARM_UP} steps; memory by at most 1 %"
    note = f"Resources of {num_steps} training steps of a layer on {num_devices} virtual devices."
    columns = {"resource": "", "first": ".1f", "maximum": ".1f", "last": ".1f", "largest last": ".1f"}
    return {
        "summary": summary(
            "training steps in one process", num_steps, num_steps * (held == len(rows)), condition, [note]
        ),
        "resources": Table(columns, rows),
    }


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["files", "kills", "soak"])
    parser.add_argument("--number", type=int, default=200, help="Files or kills.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of mutations, or of the first run to kill.")
    parser.add_argument("--per-run", type=int, default=5, help="Kills of each training run.")
    parser.add_argument("--steps", type=int, default=2000, help="Steps of the soak.")
    parser.add_argument("--devices", type=int, default=64, help="Virtual devices of the soak.")
    out_option(parser)
    given = parser.parse_args()
    parts = {
        "files": lambda: files(given.number, given.seed),
        "kills": lambda: kills(given.number, given.seed, given.per_run),
        "soak": lambda: soak(given.steps, given.devices),
    }
    report(parts[given.part](), given.out)


if __name__ == "__main__":
    main()
