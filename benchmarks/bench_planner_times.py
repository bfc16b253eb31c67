"""Planning times of all balancers where they plan, for the simulator.

    python -m benchmarks.bench_planner_times [--quick] [--write] [--only PLANNER ...] [--out FILE.json]

A row is the median over six synthetic loads, and the least of 40 calls for each, with NumPy arrays and two replica
slots per rank in one domain. `--write` writes the rows to `sim/planner_times.yaml`. Rows of `exact` in jnp are
jitted programs on a CPU. Rows of kernels are those of the results of `python -m benchmarks.gpu`, of other loads. `EPLB`
plans in every third step; its time is the mean over three steps. With `--only`, the other planners keep their rows of
`planner_times.yaml`, as plans of `exact` with a cost depend on its own.
"""

import argparse
import time
from collections.abc import Callable, Container, Iterator
from importlib import resources
from pathlib import Path

import jax
import numpy as np

from benchmarks.render import RESULTS
from benchmarks.results import Table, Value, load, out_option, report
from jax_moe_lb import Topology
from jax_moe_lb.balancers import EPLB, FEPLB, EPLBPlus, Exact, FasterMoE, Greedy, RailS, UltraEP
from jax_moe_lb.balancers.base import Balancer, LayerCost
from jax_moe_lb.contrib import ECHO, EPIC, LLEP, LPLB, MoonEP
from jax_moe_lb.core import plain_plan
from jax_moe_lb.core.types import Counts
from jax_moe_lb.planners.exact_search import exact_in_jax
from jax_moe_lb.sim import planner_times
from jax_moe_lb.sim.planner_times import Place

SIZES = ((8, 8), (8, 64), (8, 256), (32, 128), (64, 256), (128, 256), (256, 256))
JNP_SIZES = ((8, 64), (32, 128))
KERNEL_OPTIONS = "eps = 0.01, localize"
"""The defaults of `exact`, in the results of `benchmarks.gpu`."""
PLANNERS: tuple[Balancer, ...] = (
    Exact(),
    Greedy(),
    UltraEP(),
    EPLBPlus(),
    EPLB(),
    FasterMoE(),
    FEPLB(),
    RailS(),
    LPLB(),
    MoonEP(),
    LLEP(),
    ECHO(),
    EPIC(),
)
BALANCERS = {type(balancer).__name__: balancer for balancer in PLANNERS}
SLOTS, LOADS, REPEATS, TOKENS = 2, 6, 40, 8192
SPREAD = 0.8
"""Standard deviation of the logarithm of the popularity of experts."""

Row = tuple[str, Place, int, int, float]
"""Planner, place, ranks, experts and seconds."""


def loads(num_ranks: int, num_experts: int) -> Iterator[Counts]:
    """Yield counts of lognormal popularity."""
    for seed in range(LOADS):
        rng = np.random.default_rng(seed)
        chances = np.exp(SPREAD * rng.standard_normal(num_experts))
        yield rng.multinomial(TOKENS, chances / chances.sum(), num_ranks).astype(np.int32)


def least_s(call: Callable[[], object], repeats: int) -> float:
    """Return the least seconds of a call."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def on_host_s(balancer: Balancer, counts: Counts) -> float:
    """Return the seconds of a plan on NumPy arrays; of several steps the mean, if plans are kept for some."""
    num_ranks, num_experts = counts.shape
    # Rails need several nodes.
    topology = Topology.flat(num_ranks) if not isinstance(balancer, RailS) else Topology.flat(num_ranks, 4)
    start = plain_plan(counts, topology, min(num_experts // num_ranks + SLOTS, num_experts))
    sized, state = balancer.sized(LayerCost(TOKENS, 10**7, 2 * 10**7, 10**4, 10**7)), balancer.init(counts.shape)
    for _ in range(3):
        _, state = sized.rebalance(counts, start, topology, state)
    every = getattr(balancer, "every", 1) if planner_times.place_of(balancer) is Place.NATIVE else 1

    def steps() -> None:
        after = state
        for _ in range(every):
            _, after = sized.rebalance(counts, start, topology, after)

    return least_s(steps, REPEATS) / every


def in_jnp_s(counts: Counts) -> float:
    """Return the seconds of `exact` in jnp, jitted on a CPU."""
    num_ranks, num_experts = counts.shape
    run = jax.jit(lambda c: exact_in_jax(c, num_experts // num_ranks + SLOTS, num_ranks, 0.01, 2**31, True))
    jax.block_until_ready(run(counts))
    return least_s(lambda: jax.block_until_ready(run(counts)), 10)


def kernel_rows() -> Iterator[Row]:
    """Yield the rows of the kernel of `exact`, measured on a GPU."""
    table = load(RESULTS / "gpu.json")["planner-time"]
    for row in (dict(zip(table.columns, values, strict=True)) for values in table.rows):
        if row["options"] == KERNEL_OPTIONS:
            ranks, experts = map(int, row["ranks x experts"].split(" x "))
            yield "Exact", Place.KERNEL, ranks, experts, 1e-6 * row["kernel us"]


def rows(sizes: tuple[tuple[int, int], ...], names: Container[str]) -> Iterator[Row]:
    """Yield the rows of the named planners."""
    for name, balancer in BALANCERS.items():
        for ranks, experts in sizes if name in names else ():
            seconds = float(np.median([on_host_s(balancer, counts) for counts in loads(ranks, experts)]))
            yield name, planner_times.place_of(balancer), ranks, experts, seconds
    for ranks, experts in JNP_SIZES:
        if (ranks, experts) in sizes and "Exact" in names:
            yield "Exact", Place.JNP, ranks, experts, in_jnp_s(next(loads(ranks, experts)))


def kept(names: Container[str]) -> Iterator[Row]:
    """Yield the rows of the package without kernels and the named planners."""
    for row in planner_times.planner_times():
        if row.planner not in names and row.place is not Place.KERNEL:
            yield row.planner, row.place, row.ranks, row.experts, row.time


def written(found: list[Row]) -> str:
    """Return the rows as YAML."""
    head = "# Written by `python -m benchmarks.bench_planner_times --write`; see sim/planner_times.py.\nrows:\n"
    lines = (
        f"  - {{planner: {name}, place: {place.value}, ranks: {ranks}, experts: {experts}, "
        f"slots: {SLOTS}, time: {seconds * 1e6:.3g} us}}\n"
        for name, place, ranks, experts, seconds in found
    )
    return head + "".join(lines)


def table(found: list[Row]) -> Table:
    """Return one row per planner and place, with a column per size."""
    sizes = sorted({(ranks, experts) for _, _, ranks, experts, _ in found})
    by_size: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    for name, place, ranks, experts, seconds in found:
        by_size.setdefault((name, place.value), {})[ranks, experts] = seconds * 1e6
    columns = {"planner": "", "where": ""} | {f"{ranks} x {experts}": ".0f" for ranks, experts in sizes}
    lines: list[list[Value]] = [[*key, *(times.get(size) for size in sizes)] for key, times in by_size.items()]
    return Table(columns, lines, "us of a plan, ranks x experts, two replica slots per rank")


def main() -> None:
    """Print the table, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Use few sizes.")
    parser.add_argument("--write", action="store_true", help="Write the rows to the package.")
    parser.add_argument("--only", nargs="+", choices=BALANCERS, help="Planners to time; all by default.")
    out_option(parser)
    given = parser.parse_args()
    sizes, names = SIZES[1:2] if given.quick else SIZES, given.only or tuple(BALANCERS)
    found = [*(kept(names) if given.only else ()), *rows(sizes, names), *kernel_rows()]
    found.sort(key=lambda row: list(BALANCERS).index(row[0]))
    if given.write:
        Path(str(resources.files(planner_times.__package__) / planner_times.FILE)).write_text(written(found))
    report({"planners": table(found)}, given.out)


if __name__ == "__main__":
    main()
