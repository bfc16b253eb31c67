"""Effect of a straggler on wall time: one layer on two ranks, each a process with its own core.

Run it with `python -m benchmarks.bench_two_ranks` on an idle machine with two cores. The ranks communicate over
loopback TCP. 95 % of the token copies go to experts of rank 0, 1.9 x the mean load. The bound is the same layer with
the same tokens and force-balanced routing.
"""

import argparse
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType

from benchmarks.local_gloo import bind_gloo
from benchmarks.popular_ranks import Case, popularity
from benchmarks.results import Table, out_option, report, spread
from benchmarks.skewed_layer import Sizes, jitted_step, logits_by_popularity, tokens_of, weights_of
from jax_moe_lb import Buffers, Stats, TopK, plain, ultraep, use_virtual_cpu_devices
from jax_moe_lb.routing import ForceBalanced
from jax_moe_lb.routing.routers import Router
from jax_moe_lb.sim import measure as calibrate
from jax_moe_lb.sim.machine_profile import to_yaml

NUM_RANKS, REPLICA_SLOTS = 2, 1

BOUND, PLAN = "plain, force-balanced routing", "ultraep"
FLAGS = "--xla_cpu_multi_thread_eigen=false"
KEEP_MEMORY = ":".join(
    f"glibc.malloc.{option}" for option in ("mmap_max=0", f"trim_threshold={2**36}", "arena_max=1", "hugetlb=1")
)
"""Make the allocator keep large buffers, as on accelerators; otherwise every step faults their pages again."""

START_S, STEP_S = 180, 30
"""Time limits for startup and compilation, and for one step, in seconds."""


@dataclass(frozen=True)
class Point:
    """One measured configuration.

    Args:
        num_tokens: `T`, tokens per rank.
        inner: `F`, inner width of an expert.
        imbalance: target of the fit of `popularity`; 1.87 gives a sampled imbalance of 1.90.
    """

    num_tokens: int = 16384
    inner: int = 1024
    imbalance: float = 1.87

    @property
    def sizes(self) -> Sizes:
        """Sizes of the layer."""
        return Sizes(NUM_RANKS, self.num_tokens, width=256, inner=self.inner, num_experts=8, per_tok=2)

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments of the point."""
        return ["--tokens", str(self.num_tokens), "--inner", str(self.inner), "--imbalance", str(self.imbalance)]


def configurations(router: Router) -> dict:
    """Return system and router of each row of the table."""
    return {
        BOUND: (plain(), ForceBalanced(router)),
        PLAN: (ultraep(REPLICA_SLOTS), router),
        "plain": (plain(), router),
        "plain, room for all in one round": (plain(Buffers(headroom=2.0)), router),
    }


# ---- a rank --------------------------------------------------------------------


def run_rank(rank: int, address: str, repeats: int, folder: Path, point: Point) -> None:
    """Calibrate, then time all configurations interleaved, and write the results into the folder."""
    faulthandler.dump_traceback_later(limit_s(repeats), exit=True)
    jax.config.update("jax_platforms", "cpu")
    use_virtual_cpu_devices(1)
    _join(rank, address)
    sizes = point.sizes
    mesh = jax.make_mesh((NUM_RANKS,), ("expert",), axis_types=(AxisType.Auto,))
    machine = to_yaml(calibrate.measure(NUM_RANKS), calibrate.HIDDEN, calibrate.INNER)
    weights = popularity(Case(sizes.num_experts, NUM_RANKS, REPLICA_SLOTS, point.imbalance), sizes.per_tok)
    args = (tokens_of(mesh, sizes, logits_by_popularity(weights, sizes, 0)), *weights_of(mesh, sizes))
    steps, rows = {}, {}
    for name, (system, router) in configurations(sizes.router).items():
        steps[name] = jitted_step(mesh, system, router).lower((), *args).compile()
        rows[name] = _statistics(steps[name]((), *args)[1])
    for _ in range(repeats):
        for name, step in steps.items():
            multihost_utils.sync_global_devices("step")
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            jax.block_until_ready(step((), *args))
            rows[name]["wall_s"].append(time.perf_counter() - start_s)
            rows[name]["cpu_s"].append(time.process_time() - start_cpu_s)
    dense = dense_flops_per_s(sizes)
    report = {"cores": sorted(os.sched_getaffinity(0)), "dense_flops_per_s": dense, "rows": rows, "machine": machine}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    jax.distributed.shutdown()


def _statistics(stats: Stats) -> dict:
    """Return the statistics of one step, with empty lists for its times."""
    stats = jax.device_get(stats)
    return {
        "counts": stats.counts.tolist(),
        "imbalance": float(stats.imbalance_after),
        "rounds": int(stats.rounds),
        "rows_moved": int(stats.rows_moved),
        "weight_bytes_moved": float(stats.weight_bytes_moved),
        "wall_s": [],
        "cpu_s": [],
    }


def dense_flops_per_s(sizes: Sizes) -> float:
    """Return the best rate of a product with an expert's mean load, on this process's core."""
    rows = sizes.num_tokens * sizes.per_tok * sizes.num_ranks // sizes.num_experts
    width, inner = sizes.width, sizes.inner
    x, w = jnp.ones((rows, width), jnp.float32), jnp.ones((width, inner), jnp.float32)
    multiply, times_s = jax.jit(jnp.matmul), []
    for _ in range(20):
        start_s = time.perf_counter()
        jax.block_until_ready(multiply(x, w))
        times_s.append(time.perf_counter() - start_s)
    return 2 * rows * width * inner / min(times_s)


def _join(rank: int, address: str) -> None:
    bind_gloo()
    jax.distributed.initialize(address, NUM_RANKS, rank, heartbeat_timeout_seconds=30)


# ---- the parent ----------------------------------------------------------------


def limit_s(repeats: int) -> float:
    """Return the time limit of a rank in seconds."""
    return START_S + STEP_S * (repeats + 1) * len(configurations(TopK(1)))


def measure(repeats: int, point: Point) -> list[dict]:
    """Return the reports of both ranks.

    Raises:
        RuntimeError: a rank failed or timed out; all ranks are terminated.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < NUM_RANKS:
        raise RuntimeError(f"this process may use cores {cores}; expected at least {NUM_RANKS}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(rank, cores, address, repeats, Path(folder), point) for rank in range(NUM_RANKS)]
        try:
            _wait(ranks, limit_s(repeats), Path(folder))
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def _start(rank: int, cores: list[int], address: str, repeats: int, folder: Path, point: Point) -> subprocess.Popen:
    """Start a process whose threads share one core."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"XLA_FLAGS": flags, "GLIBC_TUNABLES": KEEP_MEMORY}
    command = [sys.executable, "-m", "benchmarks.bench_two_ranks", "--repeats", str(repeats)]
    command += ["--rank", str(rank), "--address", address, "--folder", str(folder), *point.arguments]
    os.sched_setaffinity(0, {cores[rank]})
    try:
        with (folder / f"{rank}.log").open("w") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    finally:
        os.sched_setaffinity(0, cores)


def _wait(ranks: list[subprocess.Popen], limit_s: float, folder: Path) -> None:
    end_s = time.monotonic() + limit_s
    while any(rank.poll() is None for rank in ranks):
        failed = [i for i, rank in enumerate(ranks) if rank.poll()]
        if failed or time.monotonic() > end_s:
            break
        time.sleep(0.2)
    codes = [rank.poll() for rank in ranks]
    if any(code != 0 for code in codes):
        logs = "\n".join((folder / f"{i}.log").read_text()[-3000:] for i in range(len(ranks)))
        raise RuntimeError(f"ranks ended with {codes} (None: still running); expected 0 within {limit_s:.0f} s\n{logs}")


COLUMNS = {
    "system": "",
    "imbalance": ".3f",
    "rounds": "d",
    "rows moved": "d",
    "weights moved MB": ".1f",
    "step ms": ".0f",
    "over force-balanced": ".3f",
    "CPU ms of rank 0": ".0f",
    "of rank 1": ".0f",
}


def table_of(reports: list[dict], sizes: Sizes) -> Table:
    """Return one row for each system."""
    rows = []
    wall_s = slowest_s(reports)
    for name, row in reports[0]["rows"].items():
        counts = [row["imbalance"], row["rounds"], row["rows_moved"], row["weight_bytes_moved"] / 1e6]
        times = [spread(wall_s[name] * 1e3), spread(wall_s[name] / wall_s[BOUND])]
        cpu_ms = [float(np.median(cpu_s) * 1e3) for cpu_s in _of_ranks(reports, name, "cpu_s")]
        rows.append([name, *counts, *times, *cpu_ms])
    dense = min(one["dense_flops_per_s"] for one in reports)
    floor_s = sizes.flops_per_rank / dense
    notes = (
        f"Cores: {[one['cores'] for one in reports]}.",
        f"The experts' products are {sizes.flops_per_rank / 1e9:.0f} GFLOP per rank and step at the mean load, "
        f"{floor_s * 1e3:.0f} ms at the {dense / 1e9:.0f} GFLOP/s of a dense product on one core: "
        f"{floor_s / np.median(wall_s[BOUND]):.0%} of the force-balanced step.",
    )
    return Table(COLUMNS, rows, notes=notes)


def slowest_s(reports: list[dict]) -> dict[str, np.ndarray]:
    """Return the seconds of the slower rank, `[repeats]`, by row name."""
    return {name: _of_ranks(reports, name, "wall_s").max(0) for name in reports[0]["rows"]}


def _of_ranks(reports: list[dict], name: str, key: str) -> np.ndarray:
    """Return seconds `[R, repeats]`."""
    return np.asarray([one["rows"][name][key] for one in reports])


def main() -> None:
    """Parse the command line and run the benchmark or one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    out_option(parser)
    default = Point()
    parser.add_argument("--tokens", type=int, default=default.num_tokens, help="Tokens per rank.")
    parser.add_argument("--inner", type=int, default=default.inner, help="Inner width of an expert.")
    parser.add_argument("--imbalance", type=float, default=default.imbalance, help="Target imbalance, below 2.")
    args = parser.parse_args()
    point = Point(args.tokens, args.inner, args.imbalance)
    if args.rank is None:
        # Otherwise the ranks would outlive a terminated parent.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        report({"steps": table_of(measure(args.repeats, point), point.sizes)}, args.out)
    else:
        run_rank(args.rank, args.address, args.repeats, args.folder, point)


if __name__ == "__main__":
    main()
