"""GEMM straggler of FEPLB's paper: time of the ranks' grouped products for the loads of each plan.

Run it with `python -m benchmarks.bench_straggler`; it takes one to two minutes on an idle machine.

On the loads of `benchmarks/stragglers.py`, it runs the three grouped products of every rank's experts, forward, as in
the paper. Ranks run one after the other on one core, so no rank waits for another; the time is the minimum CPU time of
several turns. The groups of a rank are those of the plan, so plans with many small groups are slower. As the width is
reduced, only the relative reduction of the straggler is comparable, not milliseconds. The token straggler of the same
microbatches is given for comparison. "Equal" is the lower bound with equal loads; its straggler is noise.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bench_feplb import SLOTS, fastermoe, feplb, plain
from benchmarks.results import Table, Value, out_option, report
from benchmarks.stragglers import CASES, Case, counts
from jax_moe_lb import _planning
from jax_moe_lb.balancers import FEPLB
from jax_moe_lb.kernels.grouped_matmul import grouped_matmul

WIDTH, INNER = 64, 128
ROWS = 1024
"""Row buffers are multiples of this size, to limit compilations."""
PUBLISHED = {2: (46, 50), 4: (42, 62), 8: (44, 68)}
"""Published reduction of the GEMM straggler by FasterMoE and FEPLB, in percent, by ranks."""

Quota = np.ndarray
"""`[E, R]`."""


def ultraep(loads: np.ndarray) -> np.ndarray:
    """Return UltraEP's quotas of all microbatches, `[N, E, R]`."""
    placement, quota = plain(loads)
    return np.stack([_planning.ultraep(placement, one, loads.shape[1], min_tokens=1)[1] for one in quota])


def exact(loads: np.ndarray) -> np.ndarray:
    """Return `Exact`'s quotas of all microbatches, `[N, E, R]`."""
    _, num_ranks, num_experts = loads.shape
    slots = num_experts // num_ranks + SLOTS
    return np.stack([_planning.exact(one, slots, num_ranks)[1] for one in loads])


def equal(loads: np.ndarray) -> np.ndarray:
    """Return quotas `[N, E, R]` with the mean load for every expert."""
    _, quota = plain(loads)
    mean = quota.sum((1, 2), keepdims=True, dtype=np.int32) // quota.shape[1]
    return np.where(plain(np.ones_like(loads))[1] > 0, mean, 0).astype(np.int32)


SYSTEMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "before": lambda loads: plain(loads)[1],
    "FasterMoE": lambda loads: fastermoe(loads)[1],
    "FEPLB": lambda loads: feplb(loads)[1],
    "FEPLB, skip": lambda loads: feplb(loads, FEPLB(skip=True))[1],
    "UltraEP": ultraep,
    "Exact": exact,
    "equal": equal,
}


@partial(jax.jit, static_argnames="num_rows")
def products(sizes: jax.Array, num_rows: int) -> jax.Array:
    """Compute the products of one rank's groups; the values do not affect the time."""
    rows = jnp.full((num_rows, WIDTH), 0.5)
    up, down = jnp.full((len(sizes), WIDTH, INNER), 0.25), jnp.full((len(sizes), INNER, WIDTH), 0.25)
    rows, up, down = jax.lax.optimization_barrier((rows, up, down))
    hidden = grouped_matmul(rows, up, sizes), grouped_matmul(rows, up * 2, sizes)
    return grouped_matmul(hidden[0], down, sizes).sum() + hidden[1].sum()


def processor_s(quota: Quota, rank: int) -> float:
    """Return the CPU time of one run of one rank; the first run of a size includes compilation."""
    sizes = quota[:, rank][quota[:, rank] > 0]
    groups = np.zeros(quota.shape[0] // quota.shape[1] + SLOTS, np.int32)
    groups[: len(sizes)] = sizes
    num_rows = -(-int(sizes.sum()) // ROWS) * ROWS
    args = jnp.asarray(groups), num_rows
    start_s = time.process_time()
    jax.block_until_ready(products(*args))
    return time.process_time() - start_s


def stragglers(quotas: dict[str, np.ndarray], turns: int) -> dict[str, tuple[float, float, float]]:
    """Return for each system: straggler in tokens and in ms, and the mean time of a rank in ms."""
    number, _, num_ranks = quotas["before"].shape
    least = {name: np.full((number, num_ranks), np.inf) for name in quotas}
    for _ in range(turns):
        for batch, rank in np.ndindex(number, num_ranks):
            for name, quota in quotas.items():
                least[name][batch, rank] = min(least[name][batch, rank], processor_s(quota[batch], rank))
    return {
        name: (_straggler(quota.sum(1)), 1e3 * _straggler(least[name]), 1e3 * float(least[name].mean()))
        for name, quota in quotas.items()
    }


def _straggler(by_rank: np.ndarray) -> float:
    return float((by_rank.max(1) - by_rank.mean(1)).mean())


def table(case: Case, seed: int, number: int, turns: int) -> Table:
    """Return the table for one number of ranks."""
    loads = counts(case, seed, number)
    found = stragglers({name: plan(loads) for name, plan in SYSTEMS.items()}, turns)
    columns = {f"{case.num_ranks} ranks": "", "tokens": ".0f", "tokens, % less": ".0f", "products ms": ".2f"}
    columns |= {"products, % less": ".0f", "published, % less": ".0f", "mean ms": ".1f"}
    rows: list[list[Value]] = []
    before = found["before"]
    published = dict(zip(("FasterMoE", "FEPLB"), PUBLISHED[case.num_ranks], strict=True))
    for name, (tokens, time_ms, mean_ms) in found.items():
        cut = [100 * (1 - after / first) for after, first in zip((tokens, time_ms), before[:2], strict=True)]
        rows.append([name, tokens, cut[0], time_ms, cut[1], published.get(name), mean_ms])
    return Table(columns, rows)


def main() -> None:
    """Report a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=3, help="Number of microbatches.")
    parser.add_argument("--turns", type=int, default=12, help="Repetitions, of which the minimum counts.")
    parser.add_argument("--seed", type=int, default=0)
    out_option(parser)
    args = parser.parse_args()
    # Set the affinity before the backend starts its threads.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tables = {f"{case.num_ranks}_ranks": table(case, args.seed, args.number, args.turns) for case in CASES}
    report(tables, args.out)


if __name__ == "__main__":
    main()
