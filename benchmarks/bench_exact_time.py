"""Planning time of `Exact` on a CPU: one layer, many layers in one call, and inside a jitted program.

    python -m benchmarks.bench_exact_time --loads FILE.npy ...

One layer: minimum wall time of 7 calls. All layers in one call, and EPLB's Python on the same layers: CPU time.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import recorded
from benchmarks.results import Table, Value, out_option, report, spread
from benchmarks.timing import interleaved_s
from jax_moe_lb import _planning
from jax_moe_lb.planners import rebalance_experts
from jax_moe_lb.planners.exact import exact

NAMES = ("eps", "max_fan_out", "localize")
# ranks, experts, replica slots
SHAPES = ((8, 128, 4), (8, 256, 2), (64, 256, 2), (64, 256, 1), (256, 256, 2))
# of each of OPTIONS
AIMS_US = {(8, 128, 4): (20, 20), (8, 256, 2): (500, 500), (64, 256, 2): (20, 35), (256, 256, 2): (400, 400)}
OPTIONS = {"eps = 0": (0.0, None, False), "eps = 0.01, localize": (0.01, None, True)}


def measure(layers: np.ndarray, num_ranks: int, replica_slots: int, options: tuple) -> dict[str, np.ndarray]:
    """Return microseconds per layer, `[layers]`; for all layers in one call, the average per layer."""
    counts = recorded.scattered(layers, num_ranks)
    slots = layers.shape[1] // num_ranks + replica_slots
    module = partial(_planning.exact, num_slots=slots, domain=num_ranks, **dict(zip(NAMES, options, strict=True)))
    op = partial(exact, num_slots=slots, domain=num_ranks, **dict(zip(NAMES, options, strict=True)))
    one, every = jax.jit(op), jax.jit(jax.vmap(op))
    rows = []
    for layer in counts:
        on_device = jnp.asarray(layer)
        ways = {"C++": partial(module, layer), "jit": partial(one, on_device)}
        rows.append([least_us(times_s) for times_s in interleaved_s(ways, repeats=7).values()])
    on_device = jnp.asarray(counts)
    at_once = {"C++ at once": lambda: module(counts), "jit at once": lambda: every(on_device)}
    return dict(zip(("C++", "jit"), np.array(rows).T, strict=True)) | {
        way: np.array(least_cpu_us(plan) / len(counts)) for way, plan in at_once.items()
    }


def least_us(times_s: np.ndarray) -> float:
    """Return the minimum time in us, as other load on the machine only increases it."""
    return float(times_s.min() * 1e6)


def least_cpu_us(plan: Callable[[], object], repeats: int = 5) -> float:
    """Return the minimum CPU time of the process in us; wall time of long calls includes other processes."""
    times_s = []
    for _ in range(repeats + 1):
        start_s = time.process_time()
        jax.block_until_ready(plan())
        times_s.append(time.process_time() - start_s)
    return min(times_s[1:]) * 1e6


def eplb_s(layers: np.ndarray, num_ranks: int, replica_slots: int) -> float:
    """Return the time of EPLB's Python for all layers in seconds, with one group and one node."""
    start_s = time.thread_time()
    rebalance_experts(layers, layers.shape[1] + num_ranks * replica_slots, 1, 1, num_ranks)
    return time.thread_time() - start_s


COLUMNS = {
    "ranks x experts": "",
    "S - L": "d",
    "options": "",
    "loads": "",
    "C++": ".0f",
    "aim": ".0f",
    "C++, all layers in one call": ".0f",
    "in jit": ".0f",
    "all layers in one jitted program": ".0f",
    "EPLB's Python, all layers, s": ".2f",
}
"""Times of single layers: median, minimum and maximum over layers."""


def main() -> None:
    """Report the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded.add_arguments(parser)
    out_option(parser)
    given = parser.parse_args()
    loads = recorded.read(given)
    rows: list[list[Value]] = []
    for ranks, experts, slots in SHAPES:
        aims = AIMS_US.get((ranks, experts, slots), (None, None))
        for name, layers in loads.items():
            layers = layers[:, :experts]
            theirs_s = eplb_s(layers, ranks, slots)
            for (label, options), aim in zip(OPTIONS.items(), aims, strict=True):
                us = measure(layers, ranks, slots, options)
                cpp, jit = (spread(us[way]) for way in ("C++", "jit"))
                at_once = (float(us[f"{way} at once"]) for way in ("C++", "jit"))
                numbers = [cpp, aim, next(at_once), jit, next(at_once), theirs_s]
                rows.append([f"{ranks} x {experts}", slots, label, name, *numbers])
    title = "us for a layer; UltraEP's planner on a GPU, as published: 56-111 us"
    report({"times": Table(COLUMNS, rows, title)}, given.out)


if __name__ == "__main__":
    main()
