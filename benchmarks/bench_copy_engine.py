"""Slowdown of a GEMM by concurrent copies of expert weights and planning: copy engines against kernels.

    python -m benchmarks.bench_copy_engine            # needs a GPU
    python -m benchmarks.bench_copy_engine --smoke    # tiny sizes on any device

The ranks are simulated: one device holds the arrays of all ranks, so the numbers describe its memory and not a link
between devices. Not run on a GPU yet.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter

import jax
import jax.numpy as jnp

from benchmarks.results import Table, out_option, report
from jax_moe_lb.collectives.peer_copy import Route, copy_expert_weights, join, start
from jax_moe_lb.collectives.plan_and_copy import plan_and_copy, post
from jax_moe_lb.planners.greedy import greedy, greedy_planner

RANKS = 8


def seconds(function: Callable, *args: jax.Array, repeats: int) -> float:
    """Return the median wall time of a compiled call, in seconds."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        jax.block_until_ready(function(*args))
        times.append(perf_counter() - begin)
    return sorted(times)[repeats // 2]


def gemm(x: jax.Array, home: jax.Array) -> jax.Array:
    """Compute ten pairs of products, long enough for concurrent copies."""
    for _ in range(10):
        x = (x @ home[0]) @ home[0].T / x.shape[1]
    return x


def measure(width: int, inner: int, rows: int, slots: int, repeats: int) -> dict[str, float]:
    """Return times in seconds of the GEMM and of copies of `slots` experts per rank, alone and concurrent."""
    route = Route(())
    home = jax.random.normal(jax.random.key(0), (RANKS, width, inner), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (rows, width), jnp.bfloat16)
    # Every rank gets the experts of the next ranks.
    wanted = (jnp.arange(RANKS, dtype=jnp.int32)[:, None] + 1 + jnp.arange(slots, dtype=jnp.int32)[None]) % RANKS

    @jax.jit
    def beside_copy_engines(x: jax.Array, home: jax.Array) -> tuple[jax.Array, jax.Array]:
        pending = start(home, wanted, route=route)
        y = gemm(x, home)
        return y, join(pending, after=y)

    @jax.jit
    def beside_kernels(x: jax.Array, home: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gemm(x, home), home[wanted.reshape(-1)]

    copied = 2 * RANKS * slots * width * inner
    copies = seconds(jax.jit(lambda h: copy_expert_weights(h, wanted, route=route)), home, repeats=repeats)
    ceiling = seconds(jax.jit(lambda h: jnp.tile(h, (slots, 1, 1))), home, repeats=repeats)
    return {
        "copied_bytes": copied,
        "gemm_s": seconds(jax.jit(gemm), x, home, repeats=repeats),
        "copies_s": copies,
        "copies_bytes_per_s": copied / copies,
        "kernel_copy_bytes_per_s": copied / ceiling,
        "gemm_beside_copy_engines_s": seconds(beside_copy_engines, x, home, repeats=repeats),
        "gemm_beside_kernels_s": seconds(beside_kernels, x, home, repeats=repeats),
    }


def measure_planned(width: int, inner: int, rows: int, slots: int, repeats: int) -> dict[str, float]:
    """Return the seconds added to the GEMM by planning for the exact load and its copies, concurrent and sequential."""
    route = Route(())
    home = jax.random.normal(jax.random.key(0), (RANKS, width, inner), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (rows, width), jnp.bfloat16)
    placement = jnp.full((RANKS, 1 + slots), -1, jnp.int32).at[:, 0].set(jnp.arange(RANKS, dtype=jnp.int32))
    # Every second rank has load, so all others take replicas.
    quota = jnp.diag(jnp.arange(RANKS, dtype=jnp.int32) % 2 * 1000)

    @jax.jit
    def beside(x: jax.Array, home: jax.Array, quota: jax.Array) -> tuple:
        x, posted = post(placement, quota, home, x, planner=greedy_planner(RANKS, 1), route=route)
        y, plan, pending = plan_and_copy(posted, gemm(x, home))
        return y, plan, join(pending, after=y)

    @jax.jit
    def planned_before(x: jax.Array, home: jax.Array, quota: jax.Array) -> tuple:
        plan = greedy(placement, quota, domain=RANKS, min_tokens=1)
        slots = copy_expert_weights(home, plan[0][:, 1:], route=route)
        x, slots = jax.lax.optimization_barrier((x, slots))
        return gemm(x, home), plan, slots

    gemm_alone = seconds(jax.jit(gemm), x, home, repeats=repeats)
    planner = jax.jit(lambda quota: greedy(placement, quota, domain=RANKS, min_tokens=1))
    return {
        "exposed_s": seconds(beside, x, home, quota, repeats=repeats) - gemm_alone,
        "exposed_if_before_s": seconds(planned_before, x, home, quota, repeats=repeats) - gemm_alone,
        "planner_round_trip_s": seconds(planner, quota, repeats=repeats),
        "empty_program_s": seconds(jax.jit(lambda quota: quota + 1), quota, repeats=repeats),
    }


def measure_all(width: int, inner: int, rows: int, slots: int, repeats: int) -> dict[str, float]:
    """Return the results of both measurements."""
    return {**measure(width, inner, rows, slots, repeats), **measure_planned(width, inner, rows, slots, repeats)}


def gpu() -> str:
    """Return name and driver version of the GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def table(found: dict[str, dict[str, float]]) -> Table:
    """Return a table with one row per quantity and one column per case."""
    names = next(iter(found.values()))
    rows = [[name, *(of_case[name] for of_case in found.values())] for name in names]
    return Table({"": ""} | dict.fromkeys(found, ".4g"), rows, f"{RANKS} ranks on one device; GPU: {gpu()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="Use tiny sizes on any device.")
    out_option(parser)
    given = parser.parse_args()
    if given.smoke:
        found = {"smoke": measure_all(64, 32, 16, 1, repeats=2)}
    elif jax.default_backend() == "gpu":
        found = {f"{slots} slots": measure_all(6144, 2048, 4096, slots, repeats=20) for slots in (1, 2, 4)}
    else:
        sys.exit(f"bench_copy_engine needs a GPU; this is {jax.default_backend()}. Try --smoke.")
    report({"copies": table(found)}, given.out)


if __name__ == "__main__":
    main()
