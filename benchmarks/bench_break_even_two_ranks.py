"""Predicted and measured steps on two ranks with one core each, from calibrated rates of this machine.

    python -m benchmarks.bench_break_even_two_ranks [--repeats 15] [--points 6] [--out FILE.json]

A step is forward and backward of one layer of width 256 with 8 experts, top-2, float32, between two processes as in
`bench_two_ranks`. `ultraep` with one replica slot and plain run alternately. The machine must be idle otherwise.

The prediction is not fitted to any step. Before its steps, each pair of processes runs the measurements of `jax-moe-lb
calibrate`: grouped FFNs, exchanges, copies of weights and a planner, each separately, and all but the first at one
size. `simulate` composes the step times from them, with the counts of the measured steps.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_two_ranks import PLAN, REPLICA_SLOTS, Point, measure, slowest_s
from benchmarks.results import Table, Value, out_option, report, spread
from jax_moe_lb import System, plain, ultraep
from jax_moe_lb.sim import Cluster, ModelShape, simulate
from jax_moe_lb.sim.config import load_config

POINTS = (
    Point(256, 1024, 1.8),
    Point(2048, 64, 1.8),
    Point(2048, 1024, 1.2),
    Point(2048, 1024, 1.8),
    Point(16384, 64, 1.8),
    Point(16384, 1024, 1.8),
)


def cluster_of(machine: str) -> Cluster:
    """Return the cluster of a machine file in the format of `jax-moe-lb calibrate`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.yaml"
        path.write_text(machine)
        found = load_config("machine", str(path)).cluster
    if found is None:
        raise RuntimeError("the file has no cluster; expected one")
    return found.build()


def predicted_s(found: dict[str, Any], name: str, system: System, point: Point) -> float:
    """Return the predicted time of a step in seconds, for the counts of one row of a rank's report."""
    sizes = point.sizes
    model = ModelShape(
        1, sizes.width, sizes.inner, sizes.num_experts, sizes.per_tok, sizes.num_tokens, itemsize=4, pre_expert_s=0.0
    )
    counts = np.asarray(found["rows"][name]["counts"], np.int32)
    return simulate(system, model, cluster_of(found["machine"]), counts).step_s


def measured(repeats: int, points: tuple[Point, ...]) -> Iterator[list[Value]]:
    """Yield predicted and measured times of both systems on two ranks, and their ratios."""
    for point in points:
        found = measure(repeats, point)
        times_s, systems = slowest_s(found), {"plain": plain(), PLAN: ultraep(REPLICA_SLOTS)}
        expected_s = {name: predicted_s(found[0], name, system, point) for name, system in systems.items()}
        row: list[Value] = [point.num_tokens, point.inner, point.imbalance]
        for name, expected in expected_s.items():
            median_s = float(np.median(times_s[name]))
            row += [expected * 1e3, spread(times_s[name] * 1e3), 100 * (expected / median_s - 1)]
        yield [*row, expected_s[PLAN] / expected_s["plain"], spread(times_s[PLAN] / times_s["plain"])]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="Repetitions per point.")
    parser.add_argument("--points", type=int, default=len(POINTS), help="Number of points, fastest first.")
    out_option(parser)
    given = parser.parse_args()
    columns = {"tokens per rank": "d", "inner width": "d", "requested skew": ".2f"}
    columns |= {"plain ms, predicted": ".1f", "plain ms, measured": ".1f", "plain deviation %": "+.0f"}
    columns |= {"ultraep ms, predicted": ".1f", "ultraep ms, measured": ".1f", "ultraep deviation %": "+.0f"}
    columns |= {"ultraep / plain, predicted": ".2f", "ultraep / plain, measured": ".2f"}
    report({"two_ranks": Table(columns, list(measured(given.repeats, POINTS[: given.points])))}, given.out)
    print(f"Load averages at the end: {os.getloadavg()}.")


if __name__ == "__main__":
    main()
