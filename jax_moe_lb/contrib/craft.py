"""CRAFT: a budget of replica slots over the layers of a model, by the gain of each."""

import numpy as np
from jaxtyping import Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.plan import load, plain_plan
from jax_moe_lb.core.topology import Topology


def slots_by_layer(
    balancer: Balancer, counts: Int[np.ndarray, "X R E"], topology: Topology, budget: int, most: int
) -> tuple[int, ...]:
    """Return the replica slots per layer: a budget given to the layers whose maximum load falls most.

    Use it if layers differ in imbalance, with one system per layer. Starting from none, the layer with the largest gain
    per slot gets its slots, until the budget is used or no slot reduces a maximum load. A gain may need several slots.

    Args:
        balancer: balancer that plans each layer, from the initial state.
        counts: `[X, R, E]` int32, recorded token copies of `X` layers.
        topology: topology of the group.
        budget: replica slots per rank, summed over layers; at least 0.
        most: maximum replica slots per rank of a layer, from 0 to `E - E / R`.

    Returns:
        `X` numbers of replica slots per rank, `System.replica_slots` per layer.

    Raises:
        ValueError: `budget` or `most` is out of range.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import Exact
        >>> from jax_moe_lb.contrib import slots_by_layer
        >>> layers = np.array([np.diag([9, 9, 9, 9]), np.diag([30, 2, 2, 2]), np.diag([12, 8, 8, 8])], np.int32)
        >>> slots_by_layer(Exact(eps=0.0), layers, Topology.flat(num_ranks=4), budget=2, most=2)
        (0, 1, 1)

    Reference:
        CRAFT, arXiv 2603.28768, by its abstract: replicas per layer by estimated benefit. There each replica has
        memory of its own. Here layers share the memory of slots, so fewer slots save transfers of weights.
    """
    num_home = counts.shape[2] // counts.shape[1]
    if budget < 0:
        raise ValueError(f"budget is {budget}; expected at least 0")
    if not 0 <= most <= counts.shape[2] - num_home:
        raise ValueError(f"most is {most}; expected at least 0 and at most {counts.shape[2] - num_home}")
    loads = [[_max_load(balancer, one, topology, num_home + slots) for slots in range(most + 1)] for one in counts]
    found = [0] * len(loads)
    while left := budget - sum(found):
        gains = [
            ((loads[layer][at] - after) / more, layer, more)
            for layer, at in enumerate(found)
            for more, after in enumerate(loads[layer][at + 1 : at + 1 + left], 1)
        ]
        # Of equal gains, those of the first layer and of the most slots.
        gain, layer, more = max(gains, key=lambda one: (one[0], -one[1], one[2]), default=(0.0, 0, 0))
        if gain <= 0:
            break
        found[layer] += more
    return tuple(found)


def _max_load(balancer: Balancer, counts: Int[np.ndarray, "R E"], topology: Topology, slots: int) -> int:
    plan, _ = balancer.rebalance(counts, plain_plan(counts, topology, slots), topology, balancer.init(counts.shape))
    return int(load(plan).max())
