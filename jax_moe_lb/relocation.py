"""The slow tier: which rank is home to which expert, planned on the host from the loads of many steps.

No `Balancer`: it edits no plan and does not see the microbatch. It moves what a plan takes for granted.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jax_moe_lb.checks import home_experts_per_rank
from jax_moe_lb.legality import checked_permutation
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import host_iota

Loads = Float[np.ndarray, "X layers E"]

Bins = Int[np.ndarray, "..."]
Features = Float[np.ndarray, "..."]

SPREAD_SQUARES, SPREAD_GROUPS = 0.1, 0.3
"""Weights of what is levelled besides the load, which has weight 1."""

MAX_PASSES = 12
"""Of the local search, over all experts."""


def plan_relocation(
    loads: Any, topology: Topology, homes: Any = None, *, num_groups: int = 1, min_gain: float = 0.0
) -> Int[np.ndarray, "layers E"]:
    """A permutation of each layer's places that levels the load of domains, then that of ranks inside them.

    Place `p` is slot `p % L` of rank `p // L`. Every domain keeps `E / D` experts and every rank `L`.

    Loads of tomorrow are not those of today: so what is levelled is not the load alone. Hot experts are the ones
    that change most, therefore the squares of loads are levelled, too; and experts of one group (`GroupLimit`) become
    hot together, therefore each group's load is levelled over domains.
    Longest processing time first, then swaps while any lowers the sum of squares over domains.

    Args:
        loads: load of each *expert*, `[layers, E]`, or several workloads' `[X, layers, E]`, which are all levelled.
        topology: its domains and ranks.
        homes: place of each expert now, `[layers, E]`; `None`: expert `e` at place `e`.
        num_groups: equal, contiguous groups of experts that the router limits tokens to; 1: none.
        min_gain: a layer stays as it is unless its busiest domain's load (with one domain: its busiest rank's),
            over the mean, falls by this fraction.

    Returns:
        `[layers, E]` int32: to place `p` comes what is at place `permutation[layer, p]`. All hosts get the same
        from the same loads, if their processors round alike.

    Raises:
        ValueError: loads of another shape, negative or not finite; homes that are no permutation;
            an option out of range.
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
    moves = (after < before * (1 - min_gain))[:, None]
    permutation = np.empty((num_layers, num_experts), np.int32)
    np.put_along_axis(permutation, then, now, 1)
    return np.where(moves, permutation, stay).astype(np.int32)


def homes_after(homes: Any, permutation: Any) -> Any:
    """The place of each expert once its layer's places have been permuted, `[layers, E]`."""
    homes, permutation = np.asarray(homes), np.asarray(permutation)
    return np.take_along_axis(np.argsort(permutation, 1), homes, 1).astype(np.int32)


def moved_experts(permutation: Any, topology: Topology) -> Int[np.ndarray, "layers"]:
    """How many experts of each layer change ranks: their parameters and optimizer state cross the network."""
    permutation = np.asarray(permutation)
    num_home = home_experts_per_rank(permutation.shape[1], topology.num_ranks)
    return (permutation // num_home != host_iota(permutation.shape[1])[None] // num_home).sum(1)


def domain_floor(loads: Any, homes: Any, topology: Topology) -> Float[np.ndarray, "layers"]:
    """Load of the busiest domain over the mean: no replicas inside domains bring a layer's imbalance below it."""
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
    """The place of each expert, `[layers, E]`."""
    _, num_layers, num_experts = loads.shape
    # Equal shares of workloads of different size; a layer without load is level as it is.
    mean = loads.mean(2, keepdims=True)
    shares = (loads / np.where(mean > 0, mean, 1)).transpose(1, 0, 2)
    domain = _levelled(shares, topology.num_domains, num_groups)
    members = np.argsort(domain, 1, kind="stable").reshape(num_layers * topology.num_domains, -1)
    layer = np.repeat(np.arange(num_layers), topology.num_domains)
    rank = _levelled(shares[layer[:, None], :, members].transpose(0, 2, 1), topology.ranks_per_domain, 1)
    expert = np.take_along_axis(members, np.argsort(rank, 1, kind="stable"), 1).reshape(num_layers, num_experts)
    places = np.empty((num_layers, num_experts), np.int32)
    np.put_along_axis(places, expert, np.broadcast_to(host_iota(num_experts), places.shape), 1)
    return places


def _levelled(shares: Features, num_bins: int, num_groups: int) -> Bins:
    """The bin of each expert; bins hold equally many."""
    bins = _lpt(shares.mean(1), num_bins)
    return bins if num_bins == 1 else _swapped(_features(shares, num_groups), bins, num_bins)


def _features(shares: Features, num_groups: int) -> Features:
    """What bins should have equally much of."""
    squares = shares**2
    squares = SPREAD_SQUARES * squares / np.maximum(squares.mean(2, keepdims=True), np.finfo(float).tiny)
    features = [shares, squares]
    if num_groups > 1:
        group = np.arange(shares.shape[2]) * num_groups // shares.shape[2]
        member = group[None] == np.arange(num_groups)[:, None]
        features.append(SPREAD_GROUPS * shares.mean(1)[:, None] * member[None])
    # To whole numbers: their sums are exact, so that the order in which a processor adds does not matter.
    return np.rint(np.concatenate(features, 1) * 2**16)


def _lpt(loads: Float[np.ndarray, "..."], num_bins: int) -> Bins:
    """`ops.lpt` for all layers at once: heaviest first to the lightest bin that is not full."""
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
    """Expert after expert changes bins with its best partner, while that lowers the sum of squares over bins."""
    bins, layer = bins.copy(), np.arange(len(bins))
    sums = np.stack([(features * (bins == b)[:, None]).sum(2) for b in range(num_bins)], 2)
    for _ in range(MAX_PASSES):
        moved = False
        for i in range(bins.shape[1]):
            mine, gain = bins[:, i], features - features[:, :, i : i + 1]
            here = sums[layer, :, mine][:, :, None]
            there = np.take_along_axis(sums, bins[:, None], 2)
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
    """Load over the mean of the busiest domain, or rank if there is one domain, averaged over workloads."""
    num_bins = topology.num_domains if topology.num_domains > 1 else topology.num_ranks
    return np.mean([_over_mean(load, homes, num_bins) for load in loads], axis=0)


def _over_mean(load: Float[np.ndarray, "..."], homes: Bins, num_bins: int) -> Float[np.ndarray, "layers"]:
    placed = np.zeros_like(load)
    np.put_along_axis(placed, homes, load, 1)
    sums = placed.reshape(len(load), num_bins, -1).sum(2)
    return sums.max(1) / np.maximum(sums.mean(1), np.finfo(float).tiny)
