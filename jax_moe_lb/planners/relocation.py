"""Relocation: new homes of experts, planned on the host from the loads of many steps.

It is not a `Balancer`: it changes the homes, which are fixed inputs of a plan, and does not use the load of a
microbatch.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jax_moe_lb.core.topology import Topology, home_experts_per_rank
from jax_moe_lb.core.types import host_iota
from jax_moe_lb.core.validation import checked_permutation

Loads = Float[np.ndarray, "X layers E"]

Bins = Int[np.ndarray, "..."]
Features = Float[np.ndarray, "..."]

SPREAD_SQUARES, SPREAD_GROUPS = 0.1, 0.3
"""Weights of squared loads and group loads in the balanced features; loads have weight 1."""

MAX_PASSES = 12
"""Maximum number of passes of the local search over all experts."""


def plan_relocation(
    loads: Any, topology: Topology, homes: Any = None, *, num_groups: int = 1, min_gain: float = 0.0
) -> Int[np.ndarray, "layers E"]:
    """Plan a permutation of each layer's places, balancing the load of domains, then of ranks inside them.

    Call it at intervals during training if replicas inside domains cannot balance the load, and pass the result to
    `nn.relocate`. Place `p` is slot `p % L` of rank `p // L`. The number of experts per domain and per rank stays
    equal.

    Future loads differ from past loads, so two further features are balanced. Squares of loads are balanced because hot
    experts change most. The load per expert group (`GroupLimit`) is balanced over domains because experts of a
    group become hot together. Experts are placed by longest processing time first. They are then swapped while a swap
    lowers the sum of squares over domains.

    Args:
        loads: `[layers, E]`, the load of each *expert*, or `[X, layers, E]` for several workloads, balanced together.
            Usually the running loads of the layer, `MoE.loads`.
        topology: topology of the group, with the domains.
        homes: `[layers, E]` integers, the current place per expert; `None` (default) puts expert `e` at place `e`.
        num_groups: number of equal, contiguous expert groups of the router's group limit; 1 (default) for none.
        min_gain: minimum relative reduction of the busiest domain's load over the mean; with one domain, of the busiest
            rank's. Layers with a smaller gain are unchanged. 0 (default) moves experts for any gain; usually 0.02.

    Returns:
        `[layers, E]` int32: place `p` receives the contents of place `permutation[layer, p]`. Equal loads give equal
        results on all hosts, if their processors round equally.

    Raises:
        ValueError: loads have a wrong shape, are negative or not finite, `homes` is not a permutation, or an option is
            out of range.

    Examples:
        Experts 0 and 1 are hot and share a domain. Afterwards each domain has one of them:

        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.planners import apply_relocation, domain_lower_bound, plan_relocation
        >>> loads, topology = np.array([[8.0, 8.0, 1.0, 1.0]]), Topology.flat(4, ranks_per_domain=2)
        >>> permutation = plan_relocation(loads, topology)
        >>> homes = apply_relocation(np.arange(4)[None], permutation)
        >>> domain_lower_bound(loads, np.arange(4)[None], topology).round(2), domain_lower_bound(loads, homes, topology)
        (array([1.78]), array([1.]))
    """
    loads = _checked_loads(loads)
    num_layers, num_experts = loads.shape[1:]
    home_experts_per_rank(num_experts, topology.num_ranks)
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups is {num_groups}; expected a divisor of the {num_experts} experts")
    if not 0 <= min_gain < 1:
        raise ValueError(f"min_gain is {min_gain}; expected at least 0 and less than 1")
    stay = np.broadcast_to(host_iota(num_experts), (num_layers, num_experts))
    now = stay if homes is None else checked_permutation("homes", homes, (num_layers, num_experts))
    then = _planned(loads, topology, num_groups)
    before, after = (_busiest(loads, places, topology) for places in (now, then))
    # Strictly less: without a gain no expert moves, even with `min_gain=0`.
    moves = (after < before * (1 - min_gain))[:, None]
    permutation = np.empty((num_layers, num_experts), np.int32)
    # Place `then[e]` receives the contents of place `now[e]`, which is expert `e`.
    np.put_along_axis(permutation, then, now, 1)
    return np.where(moves, permutation, stay).astype(np.int32)


def apply_relocation(homes: Any, permutation: Any) -> Any:
    """Return the place per expert after permuting its layer's places.

    Use it to compute the new homes without moving weights; `nn.relocate` updates a layer's homes in the same way.

    Args:
        homes: `[layers, E]` integers, the current place per expert.
        permutation: `[layers, E]` integers, the result of `plan_relocation`.

    Returns:
        `[layers, E]` int32, the new place per expert.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.planners import apply_relocation
        >>> apply_relocation(np.array([[0, 1, 2, 3]]), np.array([[0, 2, 1, 3]]))
        array([[0, 2, 1, 3]], dtype=int32)
    """
    homes, permutation = np.asarray(homes), np.asarray(permutation)
    return np.take_along_axis(np.argsort(permutation, 1), homes, 1).astype(np.int32)


def moved_experts(permutation: Any, topology: Topology) -> Int[np.ndarray, "layers"]:
    """Count the experts per layer changing ranks, with the parameters and optimizer state.

    Multiply by `nn.expert_bytes` for the cost of a relocation. If all counts are 0, there is no relocation.

    Args:
        permutation: `[layers, E]` integers, the result of `plan_relocation`.
        topology: topology of the group; only the number of ranks is read.

    Returns:
        `[layers]` integers, numbers of experts.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.planners import moved_experts
        >>> moved_experts(np.array([[0, 2, 1, 3]]), Topology.flat(2))
        array([2])
    """
    permutation = np.asarray(permutation)
    num_home = home_experts_per_rank(permutation.shape[1], topology.num_ranks)
    return (permutation // num_home != host_iota(permutation.shape[1])[None] // num_home).sum(1)


def domain_lower_bound(loads: Any, homes: Any, topology: Topology) -> Float[np.ndarray, "layers"]:
    """Return the load of the busiest domain over the mean, a lower bound on the imbalance with replicas.

    The bound holds for replicas inside domains. If the imbalance after balancing is near the bound, only a relocation
    helps.

    Args:
        loads: `[layers, E]`, the load per expert.
        homes: `[layers, E]` integers, the place per expert.
        topology: topology of the group, with the domains.

    Returns:
        `[layers]`, an imbalance from 1 to the number of domains; 0 for a layer without load.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.planners import domain_lower_bound
        >>> domain_lower_bound(np.array([[9, 9, 3, 3]]), np.array([[0, 1, 2, 3]]), Topology.flat(4, ranks_per_domain=2))
        array([1.5])
    """
    return _over_mean(_checked_loads(loads)[0], np.asarray(homes), topology.num_domains)


def _checked_loads(loads: Any) -> Loads:
    loads = np.asarray(loads, np.float64)
    if loads.ndim not in (2, 3) or 0 in loads.shape:
        raise ValueError(f"loads has shape {list(loads.shape)}; expected [layers, E] or [X, layers, E], none 0")
    loads = loads.reshape(-1, *loads.shape[-2:])
    bad = ~np.isfinite(loads) | (loads < 0)
    if bad.any():
        sample, layer, expert = np.argwhere(bad)[0]
        raise ValueError(
            f"loads of layer {layer}, expert {expert} is {loads[sample, layer, expert]}; "
            "expected a finite number, at least 0"
        )
    return loads


def _planned(loads: Loads, topology: Topology, num_groups: int) -> Bins:
    """Return the planned place per expert, `[layers, E]`."""
    _, num_layers, num_experts = loads.shape
    # Normalize, so that workloads of different size have equal weight. A layer without load is balanced.
    mean = loads.mean(2, keepdims=True)
    shares = (loads / np.where(mean > 0, mean, 1)).transpose(1, 0, 2)
    domain = _levelled(shares, topology.num_domains, num_groups)
    # The stable sort keeps the order of experts in a domain, so all hosts plan the same.
    members = np.argsort(domain, 1, kind="stable").reshape(num_layers * topology.num_domains, -1)
    layer = np.repeat(np.arange(num_layers), topology.num_domains)
    rank = _levelled(shares[layer[:, None], :, members].transpose(0, 2, 1), topology.ranks_per_domain, 1)
    expert = np.take_along_axis(members, np.argsort(rank, 1, kind="stable"), 1).reshape(num_layers, num_experts)
    places = np.empty((num_layers, num_experts), np.int32)
    np.put_along_axis(places, expert, np.broadcast_to(host_iota(num_experts), places.shape), 1)
    return places


def _levelled(shares: Features, num_bins: int, num_groups: int) -> Bins:
    """Return the bin per expert; all bins have equally many experts."""
    bins = _lpt(shares.mean(1), num_bins)
    return bins if num_bins == 1 else _swapped(_features(shares, num_groups), bins, num_bins)


def _features(shares: Features, num_groups: int) -> Features:
    """Return the features balanced over bins."""
    squares = shares**2
    squares = SPREAD_SQUARES * squares / np.maximum(squares.mean(2, keepdims=True), np.finfo(float).tiny)
    features = [shares, squares]
    if num_groups > 1:
        group = np.arange(shares.shape[2]) * num_groups // shares.shape[2]
        member = group[None] == np.arange(num_groups)[:, None]
        features.append(SPREAD_GROUPS * shares.mean(1)[:, None] * member[None])
    # Round to integers: their sums are exact, independent of the order of summation.
    return np.rint(np.concatenate(features, 1) * 2**16)


def _lpt(loads: Float[np.ndarray, "..."], num_bins: int) -> Bins:
    """Assign the heaviest remaining expert to the lightest bin with space, in all layers at once."""
    # The first of equal experts and bins wins, so all hosts plan the same.
    num_layers, num_experts = loads.shape
    layer, bins = np.arange(num_layers), np.zeros((num_layers, num_experts), np.int64)
    filled, held = np.zeros((num_layers, num_bins)), np.zeros((num_layers, num_bins), np.int64)
    for item in np.argsort(-loads, 1, kind="stable").T:
        best = np.where(held < num_experts // num_bins, filled, math.inf).argmin(1)
        bins[layer, item] = best
        filled[layer, best] += loads[layer, item]
        held[layer, best] += 1
    return bins


def _swapped(features: Features, bins: Bins, num_bins: int) -> Bins:
    """Swap each expert with the best partner while this lowers the sum of squares over bins."""
    bins, layer = bins.copy(), np.arange(len(bins))
    sums = np.stack([(features * (bins == b)[:, None]).sum(2) for b in range(num_bins)], 2)
    for _ in range(MAX_PASSES):
        moved = False
        # Process all layers at once, because NumPy is efficient only on large arrays.
        for i in range(bins.shape[1]):
            mine, gain = bins[:, i], features - features[:, :, i : i + 1]
            here = sums[layer, :, mine][:, :, None]
            there = np.take_along_axis(sums, bins[:, None], 2)
            # Half the change of the sum of squares: `here` gains and `there` loses the same amount.
            change = (gain * (here - there + gain)).sum(1)
            j = change.argmin(1)
            better = np.flatnonzero(change[layer, j] < 0)
            if len(better):
                moved = True
                partner, own, other = j[better], mine[better], bins[better, j[better]]
                sums[better, :, own] += gain[better, :, partner]
                sums[better, :, other] -= gain[better, :, partner]
                bins[better, i], bins[better, partner] = other, own
        if not moved:
            break
    return bins


def _busiest(loads: Loads, homes: Bins, topology: Topology) -> Float[np.ndarray, "layers"]:
    """Return the imbalance of domains, or of ranks with one domain, averaged over workloads."""
    num_bins = topology.num_domains if topology.num_domains > 1 else topology.num_ranks
    return np.mean([_over_mean(load, homes, num_bins) for load in loads], axis=0)


def _over_mean(load: Float[np.ndarray, "..."], homes: Bins, num_bins: int) -> Float[np.ndarray, "layers"]:
    placed = np.zeros_like(load)
    np.put_along_axis(placed, homes, load, 1)
    sums = placed.reshape(len(load), num_bins, -1).sum(2)
    # A layer without load gets 0 instead of NaN, which no relocation improves.
    return sums.max(1) / np.maximum(sums.mean(1), np.finfo(float).tiny)
