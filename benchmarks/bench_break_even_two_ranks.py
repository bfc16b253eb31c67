"""Whether balancing pays on two ranks with a core each: measured as `bench_two_ranks` does it, and simulated.

    python -m benchmarks.bench_break_even_two_ranks [--repeats 15] [--out FILE.json]

Forward and backward of one layer of width 256, 8 experts, top-2, float32; `ultraep` with one replica slot beside plain,
taken in turn. Nothing else may run meanwhile. It is simulated on the preset `cpu_2_cores`, whose rates were measured
between the devices of one process, not between processes over loopback: compare on which side of 1 a point is.
"""

import argparse
import os
from collections.abc import Iterator

from benchmarks.bench_break_even import cluster_of, step_s
from benchmarks.bench_two_ranks import NUM_RANKS, PLAN, REPLICA_SLOTS, Point, measure, slowest_s
from benchmarks.results import Table, Value, out_option, report, spread
from jax_moe_lb import plain, ultraep
from jax_moe_lb.sim import LoadShape, ModelShape
from jax_moe_lb.sim.choice import Candidate
from jax_moe_lb.sim.workloads import drawn_workloads

POINTS = (
    Point(256, 1024, 1.8),
    Point(2048, 64, 1.8),
    Point(2048, 1024, 1.2),
    Point(2048, 1024, 1.8),
    Point(16384, 64, 1.8),
    Point(16384, 1024, 1.8),
)


def measured(repeats: int) -> Iterator[list[Value]]:
    """Time of `ultraep` over that of plain on two ranks: measured, and simulated."""
    cluster = cluster_of("cpu_2_cores")
    for point in POINTS:
        times_s = slowest_s(measure(repeats, point))
        base, ours = times_s["plain"], times_s[PLAN]
        sizes = point.sizes
        model = ModelShape(
            1, sizes.width, sizes.inner, sizes.num_experts, sizes.per_tok, sizes.num_tokens, itemsize=4, pre_expert_s=0
        )
        candidate = Candidate(PLAN, ultraep(REPLICA_SLOTS))
        workload = drawn_workloads(model, NUM_RANKS, point.imbalance, 1, [LoadShape.HOT], draws=1, seed=0)[0]
        expected = step_s(candidate, model, cluster, workload)
        expected /= step_s(Candidate("plain", plain()), model, cluster, workload)
        yield [sizes.num_tokens, sizes.inner, point.imbalance, spread(base * 1e3), spread(ours / base), expected]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="of each point")
    out_option(parser)
    given = parser.parse_args()
    columns = {"tokens per rank": "d", "inner width": "d", "skew asked for": ".2f", "plain ms": ".1f"}
    columns |= {"ultraep / plain, measured": ".2f", "simulated": ".2f"}
    table = Table(columns, list(measured(given.repeats)))
    report({"two_ranks": table}, given.out)
    print(f"Load averages at the end: {os.getloadavg()}.")


if __name__ == "__main__":
    main()
