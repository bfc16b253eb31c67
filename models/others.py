"""What other systems would have made of the loads of a run: their planners, on its last recorded steps."""

import numpy as np

from jax_moe_lb import EPLBPlus, Exact, Greedy, LayerSizes, Topology, UltraEP, imbalance, load, plain_plan

PLANNERS = {"greedy": Greedy(), "ultraep": UltraEP(), "exact": Exact(), "eplb_plus": EPLBPlus()}

STEPS = 5
"""So many last steps are planned again: planners of an installation without binaries take their time."""


def other_systems(counts: np.ndarray, ranks_per_domain: int | None, replica_slots: int) -> dict[str, float]:
    """Computes the mean imbalance over layers and the last steps, by system, the run's own topology and slots given.

    Args:
        counts: `[steps, layers, R, E]` integers, what the ranks of one group routed to each place.
        ranks_per_domain: the ranks among which experts may move; `None` for all.
        replica_slots: the slots of a rank beyond its home experts.
    """
    num_ranks, num_experts = counts.shape[-2:]
    topology = Topology.flat(num_ranks, ranks_per_domain)
    slots = min(num_experts // num_ranks + replica_slots, num_experts)
    layers = counts[-STEPS:].reshape(-1, num_ranks, num_experts).astype(np.int32)
    sizes = LayerSizes(num_copies=max(1, round(float(layers.sum((1, 2)).mean()) / num_ranks)))
    found = {"plain": float(np.mean([imbalance(load(plain_plan(one, topology))) for one in layers]))}
    for name, planner in PLANNERS.items():
        after = []
        for one in layers:
            plan, _ = planner.sized(sizes).rebalance(one, plain_plan(one, topology, slots), topology, ())
            after.append(float(imbalance(load(plan))))
        found[name] = float(np.mean(after))
    return found
