"""Estimated time of `Exact` as one kernel of an H100, beside the round trip of a planner on the host.

    python -m benchmarks.bench_exact_kernel --loads FILE.npy ...

The kernel runs on the CPU, where fibers count the operations of each thread. The time of a plan is the sum of latencies
on the longest path: barriers, operations of a warp and loads from shared memory, of which no two overlap (upper
estimate) or all between two operations of a warp do (lower estimate). `ffi/planning/device/fibers.h` has the latencies.
Arithmetic and the launch are not counted.
"""

import argparse

import numpy as np

from benchmarks import recorded
from benchmarks.results import Table, Value, out_option, report, spread
from jax_moe_lb import _planning
from jax_moe_lb.recordings.device_rates import device_rates

# ranks, experts, replica slots
SHAPES = ((8, 128, 4), (32, 256, 2), (64, 256, 2))
OPTIONS = {"eps = 0": (0.0, None, False), "eps = 0.01, localize": (0.01, None, True)}
AIM_US = 40
CLOCK_GHZ = 1.7
"""Clock of an H100 under load, assumed."""

COLUMNS = {
    "ranks x experts": "",
    "S - L": "d",
    "options": "",
    "loads": "",
    "loads overlap": ".0f",
    "no loads overlap": ".0f",
    "aim": ".0f",
    "round trip of the host": ".0f",
    "barriers of the block": ".0f",
    "operations of a warp": ".0f",
    "shared loads": ".0f",
}


def measure(layers: np.ndarray, num_ranks: int, replica_slots: int, options: tuple) -> np.ndarray:
    """Return the paths of the layers, `[layers, 5]`: cycles without and with overlap, and three counts."""
    counts = recorded.scattered(layers, num_ranks)
    slots = layers.shape[1] // num_ranks + replica_slots
    *_, paths = _planning.exact_kernel(counts, slots, num_ranks, *options)
    return np.array(paths)


def main() -> None:
    """Report the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded.add_arguments(parser)
    out_option(parser)
    given = parser.parse_args()
    host_us = 1e6 * device_rates("h100", "cuda").planner
    rows: list[list[Value]] = []
    for ranks, experts, slots in SHAPES:
        for name, layers in recorded.read(given).items():
            for label, options in OPTIONS.items():
                paths = measure(layers[:, :experts], ranks, slots, options)
                upper, lower = (spread(paths[:, i] / (1e3 * CLOCK_GHZ)) for i in (0, 1))
                aim = AIM_US if ranks == 64 else None
                counted = [float(np.median(paths[:, i])) for i in (2, 3, 4)]
                rows.append([f"{ranks} x {experts}", slots, label, name, lower, upper, aim, host_us, *counted])
    report({"estimated": Table(COLUMNS, rows, "us for a layer, estimated for an H100")}, given.out)


if __name__ == "__main__":
    main()
