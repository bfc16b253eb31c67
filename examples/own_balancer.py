"""Define a balancer in a few lines of NumPy, and show the error for a plan that loses a token."""

from dataclasses import replace

import numpy as np

from jax_moe_lb import HostCallback, Plan, Topology
from jax_moe_lb.core import check_plan, imbalance, load, plain_plan


def share_hottest(counts: np.ndarray, plan: Plan, topology: Topology) -> Plan:
    """Move half of the tokens of the busiest rank's hottest expert to the least loaded rank with a free slot."""
    placement, quota = plan.placement.copy(), plan.quota.copy()
    busiest = load(plan).argmax()
    expert = quota[:, busiest].argmax()
    free = (placement == -1).any(1)
    idlest = np.where(free, load(plan), np.iinfo(np.int32).max).argmin()
    slot = placement[idlest].tolist().index(-1)
    placement[idlest, slot] = expert
    half = quota[expert, busiest] // 2
    quota[expert, busiest] -= half
    quota[expert, idlest] += half
    return replace(plan, placement=placement, quota=quota)


def careless(counts: np.ndarray, plan: Plan, topology: Topology) -> Plan:
    """Balance as `share_hottest`, but lose one token of expert 3."""
    plan = share_hottest(counts, plan, topology)
    quota = plan.quota.copy()
    quota[3, quota[3].argmax()] -= 1
    return replace(plan, quota=quota)


def main() -> None:
    """Plan for skewed counts of 8 ranks and 16 experts, with one free slot per rank."""
    counts = np.random.default_rng(0).multinomial(1024, np.arange(1, 17) / 136, size=8).astype(np.int32)
    topology = Topology.flat(8)
    before = plain_plan(counts, topology, slots=3)

    # Use it as any other balancer: System(HostCallback(share_hottest), replica_slots=1) trains with it.
    after, _ = HostCallback(share_hottest).rebalance(counts, before, topology, ())
    check_plan(after, counts)
    print(f"imbalance {imbalance(load(before)):.3f} -> {imbalance(load(after)):.3f}")

    try:
        check_plan(careless(counts, before, topology), counts)
    except ValueError as refusal:
        print(f"refused: {refusal}")


if __name__ == "__main__":
    main()
