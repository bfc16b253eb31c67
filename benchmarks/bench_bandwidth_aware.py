"""Plans selected by the simulated time of a layer, against `Exact(eps=0.01)`.

    python -m benchmarks.bench_bandwidth_aware --loads DIR/*.npy --step 12 --out FILE.json

For every layer of each recording and every machine, the fastest plan of a family is selected. The family varies `eps`,
the fan-out of a home rank and relays, inside domains and with the whole machine as one domain. Replicas are then
dropped one at a time while the simulated time falls, with new quotas from a linear program. The result is an upper
bound on the gain of such a planner, as the same simulator selects and evaluates. Layers are independent: those of
DeepSeek-V3, forward and backward. Without `--loads` they are synthetic. Homes are unchanged, or relocated according to
the other recordings.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import jax
import numpy as np

from benchmarks import recorded
from benchmarks.results import Table, out_option, report, spread
from jax_moe_lb import Plan, System, Topology
from jax_moe_lb.balancers import Exact
from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.contrib.lplb import spread as best_quota
from jax_moe_lb.core import check_plan, plain_plan
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.planners import plan_relocation
from jax_moe_lb.sim import Cluster, ModelShape, simulate
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.transport import Gather, Relay

MACHINES = ("h100_node", "h100_16_nodes", "dc4_10gbit")
EPS, FAN_OUTS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.4), (None, 1, 2)
SLOTS, RANK_STD = 2, 0.2
"""Standard deviation of the log popularity between ranks, about as in `benchmarks/traces`."""

MOST_DROPS = 12
"""Maximum number of replicas to try per plan, those of the busiest senders first."""


@dataclass(frozen=True, eq=False)
class Fixed(Balancer):
    """Balancer returning a given plan."""

    plan: Plan

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Return the given plan."""
        return self.plan, state


@dataclass(frozen=True)
class Case:
    """One layer on one machine."""

    model: ModelShape
    cluster: Cluster
    counts: np.ndarray

    def time_s(self, system: System, cluster: Cluster | None = None) -> float:
        """Return the time of the layer in seconds, forward and backward."""
        return simulate(system, self.model, cluster or self.cluster, self.counts).step_s

    def family(self, cluster: Cluster) -> dict[System, float]:
        """Return the time of every plan of the family, in seconds."""
        found = {}
        for eps, most, copies in product(EPS, FAN_OUTS, (Gather(), Relay())):
            system = System(Exact(eps=eps, max_fan_out=most), copies, replica_slots=SLOTS)
            found[system] = self.time_s(system, cluster)
        return found

    def dropped(self, system: System, cluster: Cluster, time_s: float) -> float:
        """Return the time in seconds after dropping replicas that cost more than they save."""
        topology, num_home = cluster.topology(), self.model.experts // cluster.num_ranks
        start = plain_plan(self.counts, topology, num_home + SLOTS)
        plan = jax.tree.map(np.asarray, system.balancer.rebalance(self.counts, start, topology, ())[0])
        for rank, slot in busiest_first(plan)[:MOST_DROPS]:
            placement = plan.placement.copy()
            placement[rank, slot] = -1
            other = best_quota(self.counts, replace(plan, placement=placement), topology)
            check_plan(other, self.counts)
            after_s = self.time_s(replace(system, balancer=Fixed(other)), cluster)
            if after_s < time_s:
                plan, time_s = other, after_s
        return time_s


def busiest_first(plan: Plan) -> list[tuple[int, int]]:
    """Return rank and slot of all replicas, ordered by the fan-out of their expert's home rank, largest first."""
    found = [
        (int(rank), int(slot) + plan.num_home) for rank, slot in np.argwhere(plan.placement[:, plan.num_home :] >= 0)
    ]
    homes = [int(plan.placement[at]) // plan.num_home for at in found]
    sent = np.bincount(homes, minlength=plan.num_ranks)
    return [at for _, at in sorted(zip(-sent[homes], found, strict=True))]


def counts_of(tokens: np.ndarray, model: ModelShape, num_ranks: int) -> np.ndarray:
    """Sample counts [R, E] of a microbatch with the expert popularity of a recording, varied per rank."""
    rng = np.random.default_rng(0)
    own = tokens * np.exp(RANK_STD * rng.standard_normal((num_ranks, len(tokens))))
    chances = np.minimum(own * model.per_token / own.sum(1, keepdims=True), 1.0)
    return rng.binomial(model.tokens, chances).astype(np.int32)


def cases(layers: recorded.Layers, machine: str) -> Iterator[tuple[str, str, list[Case]]]:
    """Yield recording, kind of homes, and their layers."""
    model = replace(load_config("", "deepseek_v3").model.build(), layers=1)
    cluster = load_config("", machine).cluster.build()
    for name, tokens in layers.items():
        stay = [Case(model, cluster, counts_of(layer, model, cluster.num_ranks)) for layer in tokens]
        yield name, "as they are", stay
        others = [other / other.sum(1, keepdims=True) for key, other in layers.items() if key != name]
        if others and cluster.topology().num_domains > 1:
            places = plan_relocation(sum(others), cluster.topology())
            yield name, "relocated", [replace(c, counts=c.counts[:, at]) for c, at in zip(stay, places, strict=True)]


def ratios(case: Case) -> tuple[float, float, float]:
    """Return time ratios to `Exact(eps=0.01)` inside domains: best inside domains, best of all, after dropping
    replicas.
    """
    base_s = case.time_s(System(Exact(eps=0.01), replica_slots=SLOTS))
    inside, whole = case.cluster, replace(case.cluster, domain_level=case.cluster.levels[0].name)
    found = {(system, inside): time_s for system, time_s in case.family(inside).items()}
    within_s = min(found.values())
    if whole.ranks_per_domain != inside.ranks_per_domain:
        found |= {(system, whole): time_s for system, time_s in case.family(whole).items()}
    (system, cluster), best_s = min(found.items(), key=lambda one: one[1])
    return within_s / base_s, best_s / base_s, case.dropped(system, cluster, best_s) / base_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded.add_arguments(parser)
    out_option(parser)
    given = parser.parse_args()
    layers, rows = recorded.read(given), []
    for machine in MACHINES:
        for name, homes, found in cases(layers, machine):
            of_layers = np.array([ratios(case) for case in found])
            rows.append([machine, name, homes, *(spread(column) for column in of_layers.T)])
            print(rows[-1], flush=True)
    columns = {"machine": "", "loads": "", "homes": "", "inside domains": ".3f", "or across": ".3f", "dropped": ".3f"}
    report({"bandwidth_aware": Table(columns, rows)}, given.out)


if __name__ == "__main__":
    main()
