"""Plans of `Exact` beside those of every other balancer on families of loads that are hard to level.

    python -m benchmarks.bench_plans [--quick] [--out FILE.json]

A loss is a load on which another balancer has a lower maximum than `Exact(eps=0)`, whose search ends within 1/4096 of
the mean. A plan of the default is dominated if another balancer's is no worse in maximum, replicas and replicas sent by
the busiest rank, and better in one. Balancers that plan from earlier counts
and LPLB, which solves a linear program for each plan, are left out.
"""

import argparse
import time
from typing import NamedTuple

import numpy as np

from benchmarks.load_families import families, spread
from benchmarks.results import Table, Value, out_option, report
from jax_moe_lb import Balancer, Topology
from jax_moe_lb.balancers import FEPLB, EPLBPlus, Exact, Greedy, UltraEP
from jax_moe_lb.balancers.exact import SEARCH_ENDS
from jax_moe_lb.contrib import ECHO, EPIC, LLEP, MoonEP
from jax_moe_lb.core import Plan, load, plain_plan, traffic

# ranks, home experts
SHAPES = ((8, 8), (16, 8), (32, 4), (64, 4), (72, 4), (72, 8), (96, 4), (128, 2), (128, 8), (256, 1))
SLOTS = (1, 2, 4)
OTHERS: dict[str, Balancer] = {
    "Greedy": Greedy(),
    "UltraEP": UltraEP(min_tokens=64),
    "UltraEP, eps 0": UltraEP(eps=0.0, min_tokens=1),
    "MoonEP": MoonEP(),
    "LLEP": LLEP(capacity=1.0, min_tokens=1, min_imbalance=1.0),
    "ECHO": ECHO(),
    "EPIC": EPIC(),
    "EPLB+": EPLBPlus(),
    "FEPLB": FEPLB(),
}


def plan(balancer: Balancer, counts: np.ndarray, slots: int) -> Plan:
    """Return the plan of a balancer with all ranks in one domain."""
    topology = Topology.flat(len(counts))
    start = plain_plan(counts, topology, counts.shape[1] // len(counts) + slots)
    return balancer.rebalance(counts, start, topology, balancer.init(counts.shape))[0]


class Outcome(NamedTuple):
    """Maximum load, replicas, and replicas sent by the busiest rank."""

    most: int
    replicas: int
    sent: int

    def dominates(self, other: "Outcome") -> bool:
        """Return whether no number is higher and one is lower."""
        return self != other and all(own <= its for own, its in zip(self, other, strict=True))


def outcome(balancer: Balancer, counts: np.ndarray, slots: int) -> Outcome:
    """Return the numbers of a balancer's plan."""
    found = plan(balancer, counts, slots)
    moved = traffic(found, counts)
    return Outcome(int(load(found).max()), int(moved.replicas), int(moved.fan_out.max()))


def row_of(num_ranks: int, num_home: int, slots: int, seeds: int) -> list[Value]:
    """Return the row of a shape: loads, losses, least lead over the best other, dominated plans, and times in us."""
    leads, dominated, times_us = [], 0, []
    for seed in range(seeds):
        for tokens in families(num_ranks, num_home, seed).values():
            counts = spread(tokens, num_ranks)
            others = [outcome(balancer, counts, slots) for balancer in OTHERS.values()]
            started_s = time.perf_counter()
            own = outcome(Exact(eps=0.0, localize=False), counts, slots)
            times_us.append(1e6 * (time.perf_counter() - started_s))
            enough = int(counts.sum() / num_ranks * (1 + SEARCH_ENDS))
            leads.append(max(min(other.most for other in others), enough) / max(own.most, enough) - 1)
            default = outcome(Exact(), counts, slots)
            dominated += any(other.dominates(default) for other in others)
    losses = sum(lead < 0 for lead in leads)
    shape: list[Value] = [num_ranks, num_home, slots, len(leads), losses]
    return [*shape, 100 * float(np.mean(leads)), dominated, float(np.median(times_us)), float(np.max(times_us))]


def main() -> None:
    """Report the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Use three shapes and one seed.")
    out_option(parser)
    given = parser.parse_args()
    shapes, seeds = (SHAPES[:3], 1) if given.quick else (SHAPES, 2)
    columns = {"ranks": "d", "L": "d", "S - L": "d", "loads": "d", "losses": "d", "mean lead, %": ".2f"}
    columns |= {"dominated": "d", "median us": ".0f", "most us": ".0f"}
    rows = [row_of(*shape, slots, seeds) for shape in shapes for slots in SLOTS]
    report({"losses": Table(columns, rows, "Exact beside nine other settings of balancers")}, given.out)


if __name__ == "__main__":
    main()
