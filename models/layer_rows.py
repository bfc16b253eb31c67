"""`layer_row` says of each layer what a step's line says of their mean: load, imbalance, rounds, what moved."""

import time

import numpy as np

from jax_moe_lb import LayerFacts, Stats, System, Topology, plain_plan

MEANS = ("imbalance_before", "imbalance_after", "straggler_before", "straggler_after")
SUMS = ("rows_moved", "weight_bytes_moved")


def layer_row(step: int, stats: Stats, system: System, topology: Topology) -> dict:
    """Makes the line of `metrics.jsonl` about the layers of a step.

    Args:
        step: the number of the step.
        stats: its statistics, `[layers, D, ...]`, on the host.
        system: what balanced the load.
        topology: that of the layers.

    Returns:
        Lists with a number for each layer, over its `D` groups: their mean, the sum of what moved, the most rounds and
        the highest load of a rank. `planner_s` are the seconds that the planner takes on the host for the first layer.
    """
    row: dict = {"kind": "layers", "step": step}
    row |= {name: np.asarray(getattr(stats, name)).mean(1).tolist() for name in MEANS}
    row |= {name: np.asarray(getattr(stats, name)).sum(1).tolist() for name in SUMS}
    row["rounds"] = np.asarray(stats.rounds).max(1).tolist()
    row["load_before_max"] = np.asarray(stats.load_before).max((1, 2)).tolist()
    row["load_after_max"] = np.asarray(stats.load_after).max((1, 2)).tolist()
    return row | {"planner_s": planner_s(np.asarray(stats.counts)[0, 0], system, topology)}


def planner_s(counts: np.ndarray, system: System, topology: Topology) -> float:
    """Times the planner of a system on the host.

    Args:
        counts: `[R, E]`, what the ranks of a group routed to each place.
        system: the system.
        topology: that of the group.
    """
    num_ranks, num_experts = counts.shape
    counts = counts.astype(np.int32)
    balancer = system.balancer.sized(LayerFacts(num_copies=max(1, round(float(counts.sum()) / num_ranks))))
    start = plain_plan(counts, topology, num_experts // num_ranks + system.replica_slots)
    state = balancer.init(counts.shape)
    began = time.perf_counter()
    balancer.rebalance(counts, start, topology, state)
    return time.perf_counter() - began
