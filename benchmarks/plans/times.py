"""Planning times: `exact` on a CPU and estimated as a kernel, and all balancers where they plan."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.plans import recorded
from benchmarks.render.documents import RESULTS
from benchmarks.render.results import Table, Value, load, spread
from benchmarks.render.timing import interleaved_s
from jax_moe_lb import Topology, _planning
from jax_moe_lb.balancers import EPLB, FEPLB, EPLBPlus, Exact, FasterMoE, Greedy, RailS, UltraEP
from jax_moe_lb.balancers.base import Balancer, LayerCost
from jax_moe_lb.contrib import ECHO, EPIC, LLEP, LPLB, MoonEP
from jax_moe_lb.core import plain_plan
from jax_moe_lb.core.types import Counts
from jax_moe_lb.planners import exact as exact_planner
from jax_moe_lb.planners.exact_search import exact_in_jax
from jax_moe_lb.sim import planner_times

# ranks, experts, replica slots
SHAPES = ((8, 128, 4), (8, 256, 2), (32, 256, 2), (64, 256, 1), (64, 256, 2), (256, 256, 2))
OPTIONS = {"eps = 0": (0.0, False), "eps = 0.01, localize": (0.01, True)}
AIMS_US = {(8, 128, 4): (20, 20), (8, 256, 2): (500, 500), (64, 256, 2): (20, 35), (256, 256, 2): (400, 400)}
"""Times on a CPU of each of OPTIONS."""

CLOCK_GHZ = 1.7
"""Clock of an H100 under load, assumed."""

MOST_KERNEL = 128
"""Ranks of the largest domain that is planned in a kernel."""


def least_s(call: Callable[[], object], repeats: int) -> float:
    """Return the least processor seconds of a call, which other load on the machine hardly increases."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


# ---- `exact` on recorded loads -----------------------------------------------------


def exact_row(layers: np.ndarray, shape: tuple[int, int, int], name: str) -> list[Value]:
    """Return the row of a shape and options: times in C++ and in jit, and those estimated for a kernel, in us."""
    num_ranks, num_experts, spare = shape
    eps, localize = OPTIONS[name]
    counts = recorded.scattered(layers[:, :num_experts], num_ranks)
    slots = num_experts // num_ranks + spare
    module = partial(_planning.exact, num_slots=slots, domain=num_ranks, eps=eps, localize=localize)
    program = jax.jit(partial(exact_planner.exact, num_slots=slots, domain=num_ranks, eps=eps, localize=localize))
    us = {"C++": [], "jit": []}
    for layer in counts:
        on_device = jnp.asarray(layer)
        ways = {"C++": partial(module, layer), "jit": partial(program, on_device)}
        for way, times_s in interleaved_s(ways, repeats=7).items():
            us[way].append(1e6 * times_s.min())
    kernel: list[Value] = [None, None]
    if num_ranks <= MOST_KERNEL:
        *_, paths = _planning.exact_kernel(counts, slots, num_ranks, eps=eps, localize=localize)
        kernel = [spread(np.array(paths)[:, at] / (1e3 * CLOCK_GHZ)) for at in (1, 0)]
    return [spread(np.array(us["C++"])), spread(np.array(us["jit"])), *kernel]


def exact_times(layers: np.ndarray) -> Table:
    columns = {"ranks x experts": "", "S - L": "d", "options": ""}
    columns |= dict.fromkeys(("C++", "aim", "in jit", "kernel, loads overlap", "kernel, no loads overlap"), ".0f")
    rows: list[list[Value]] = []
    for shape in SHAPES:
        for name, aim in zip(OPTIONS, AIMS_US.get(shape, (None, None)), strict=True):
            cpp, *others = exact_row(layers, shape, name)
            rows.append([f"{shape[0]} x {shape[1]}", shape[2], name, cpp, aim, *others])
    return Table(columns, rows, "us of a layer; UltraEP's planner on a GPU, as published: 56-111 us")


# ---- All balancers, for the simulator ----------------------------------------------

SIZES = ((8, 8), (8, 64), (8, 256), (32, 128), (64, 256), (128, 256), (256, 256))
JNP_SIZES = ((8, 64), (32, 128))
PLANNERS: tuple[Balancer, ...] = (Exact(), Greedy(), UltraEP(), EPLBPlus(), EPLB(), FasterMoE(), FEPLB(), RailS())
PLANNERS += (LPLB(), MoonEP(), LLEP(), ECHO(), EPIC())
LOADS, REPEATS, TOKENS, SLOTS = 6, 40, 8192, 2
SPREAD = 0.8
"""Standard deviation of the logarithm of the popularity of experts."""

Row = tuple[str, str, int, int, float]
"""Planner, place, ranks, experts and seconds."""


def lognormal(num_ranks: int, num_experts: int) -> Iterator[Counts]:
    for seed in range(LOADS):
        rng = np.random.default_rng(seed)
        chances = np.exp(SPREAD * rng.standard_normal(num_experts))
        yield rng.multinomial(TOKENS, chances / chances.sum(), num_ranks).astype(np.int32)


def on_host_s(balancer: Balancer, counts: Counts) -> float:
    """Return the seconds of a plan on NumPy arrays; of several steps the mean, if plans are kept for some."""
    num_ranks, num_experts = counts.shape
    # Rails need several nodes.
    topology = Topology.flat(num_ranks) if not isinstance(balancer, RailS) else Topology.flat(num_ranks, 4)
    start = plain_plan(counts, topology, min(num_experts // num_ranks + SLOTS, num_experts))
    sized, state = balancer.sized(LayerCost(TOKENS, 10**7, 2 * 10**7, 10**4, 10**7)), balancer.init(counts.shape)
    for _ in range(3):
        _, state = sized.rebalance(counts, start, topology, state)
    every = getattr(balancer, "every", 1) if not isinstance(balancer, LPLB) else 1

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
    """Yield the rows of the kernel of `exact` with its default options, measured on a GPU."""
    for row in load(RESULTS / "gpu.json")["planner-time"].dicts():
        if row["options"] == "eps = 0.01, localize":
            ranks, experts = map(int, row["ranks x experts"].split(" x "))
            yield "Exact", "one kernel", ranks, experts, 1e-6 * row["kernel us"]


def planner_rows(sizes: tuple[tuple[int, int], ...]) -> Iterator[Row]:
    for balancer in PLANNERS:
        name = type(balancer).__name__
        for ranks, experts in sizes:
            seconds = float(np.median([on_host_s(balancer, counts) for counts in lognormal(ranks, experts)]))
            yield name, planner_times.place_of(balancer).value, ranks, experts, seconds
        if name == "Exact":
            for ranks, experts in JNP_SIZES:
                yield name, "jnp", ranks, experts, in_jnp_s(next(lognormal(ranks, experts)))
            yield from kernel_rows()


def write(found: list[Row]) -> None:
    head = "# Written by `python -m benchmarks.plans plans planners --write`; see sim/planner_times.py.\nrows:\n"
    lines = (
        f"  - {{planner: {name}, place: {place}, ranks: {ranks}, experts: {experts}, "
        f"slots: {SLOTS}, time: {seconds * 1e6:.3g} us}}\n"
        for name, place, ranks, experts, seconds in found
    )
    Path(str(resources.files(planner_times.__package__) / planner_times.FILE)).write_text(head + "".join(lines))


def planner_table(found: list[Row]) -> Table:
    """Return one row per planner and place, with a column per size, and the exponent of the ranks from 64 on."""
    sizes = sorted({(ranks, experts) for _, _, ranks, experts, _ in found})
    by_size: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    for name, place, ranks, experts, seconds in found:
        by_size.setdefault((name, place), {})[ranks, experts] = seconds * 1e6
    columns = {"planner": "", "where": ""} | {f"{ranks} x {experts}": ".0f" for ranks, experts in sizes}
    lines: list[list[Value]] = []
    for key, times in by_size.items():
        large = [(ranks, us) for (ranks, _), us in times.items() if ranks >= 64]
        lines.append(
            [*key, *(times.get(size) for size in sizes), exponent(*zip(*large, strict=True)) if large[1:] else None]
        )
    return Table(columns | {"growth with ranks": ".2f"}, lines, "processor us of a plan, two replica slots per rank")


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Return the exponent of the power law through times at some sizes, by least squares of logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])
