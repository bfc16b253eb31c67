"""EPLB's own algorithm on NumPy arrays, with its signature: all copies of all experts are packed afresh."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

Weights = Float[np.ndarray, "N"]
Indices = Int[np.ndarray, "..."]


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int, *, distinct: bool = False
) -> tuple[Indices, Indices, Indices]:
    """Says which expert each physical expert is, as DeepSeek's `eplb.rebalance_experts` computes it.

    Use it to compare with EPLB, or to place experts of a serving system that may move all of them. It moves home
    experts too, so that a `Plan` cannot express it: `EPLB` keeps homes.

    It is hierarchical if the groups divide evenly into nodes: groups are packed onto nodes, each node's experts are
    replicated there, and its copies packed onto its GPUs. Else it is global: all experts are one group on one node. To
    pack is to put items, heaviest first, into the lightest bin that is not full; where a bin holds one item, items keep
    their order. To replicate is to give one copy more to the expert of the highest load per copy. Arithmetic is
    float32, and ties go to the lower index.

    Args:
        weight: `[layers, E]`, the load of each expert in each layer, finite and at least 0.
        num_replicas: how many physical experts a layer has, copies included; a multiple of `num_gpus`.
        num_groups: how many expert groups there are, as the router has them; divides `E`.
        num_nodes: how many nodes there are.
        num_gpus: how many GPUs all nodes have; a multiple of `num_nodes` in the hierarchical case.
        distinct: whether no GPU may get two copies of one expert, which EPLB allows although the second one is wasted.
            An expert then has at most one copy per GPU of its node, and where only GPUs that have the expert are left,
            it changes places with the item of a full GPU that comes nearest in load.

    Returns:
        The expert of each physical expert, `[layers, num_replicas]`; the physical experts of each expert, `[layers, E,
        X]`, -1 where it has fewer than `X` copies; and their number, `[layers, E]`. All are int64.

    Raises:
        ValueError: a load or a number that does not fit; the message names it.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import rebalance_experts
        >>> weight = np.array([[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]])
        >>> experts, _, copies = rebalance_experts(weight, num_replicas=16, num_groups=4, num_nodes=2, num_gpus=8)
        >>> print(experts[0])
        [ 5  6  5  7  8  4  3  4 10  9 10  2  0  1 11  1]
        >>> print(copies[0])
        [1 2 1 1 2 2 1 1 1 1 2 1]
    """
    weight = _checked_weight(weight)
    if num_nodes >= 1 and num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    _check_numbers(weight.shape[1], num_replicas, num_groups, num_nodes, num_gpus, distinct)
    layers = [_layer(load, num_replicas, num_groups, num_nodes, num_gpus, distinct) for load in weight]
    phy2log = np.stack([expert for expert, _ in layers])
    logcnt = np.stack([np.bincount(expert, minlength=weight.shape[1]) for expert in phy2log])
    log2phy = np.full((*weight.shape, int(np.max(logcnt))), -1)
    for layer, (expert, copy) in enumerate(layers):
        log2phy[layer, expert, copy] = np.arange(num_replicas)
    return phy2log, log2phy, logcnt


def _checked_weight(weight: Any) -> np.ndarray:
    weight = np.asarray(weight)
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"weight has shape {weight.shape}; expected [layers, E], both at least 1")
    # As EPLB computes: in float64 other ties would be ties.
    weight = weight.astype(np.float32)
    bad = ~np.isfinite(weight) | (weight < 0)
    if bad.any():
        layer, expert = np.argwhere(bad)[0]
        raise ValueError(
            f"weight of layer {layer}, expert {expert} is {weight[layer, expert]}; expected a finite load, at least 0"
        )
    return weight


def _check_numbers(
    num_experts: int, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int, distinct: bool
) -> None:
    for name, number in (("num_groups", num_groups), ("num_nodes", num_nodes), ("num_gpus", num_gpus)):
        if number < 1:
            raise ValueError(f"{name} is {number}; expected at least 1")
    if num_experts % num_groups:
        raise ValueError(f"num_groups is {num_groups}; expected a divisor of the {num_experts} experts")
    if num_gpus % num_nodes:
        raise ValueError(f"num_gpus is {num_gpus}; expected a multiple of the {num_nodes} nodes")
    if num_replicas < num_experts or num_replicas % num_gpus:
        raise ValueError(
            f"num_replicas is {num_replicas}; expected a multiple of the {num_gpus} GPUs, at least {num_experts}"
        )
    most = num_experts * (num_gpus // num_nodes)
    if distinct and num_replicas > most:
        raise ValueError(f"num_replicas is {num_replicas}; expected at most {most}, one copy of an expert per GPU")


def _layer(
    load: np.ndarray, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int, distinct: bool
) -> tuple[Indices, Indices]:
    """Expert of each physical expert, and which of its copies it is."""
    groups = np.arange(len(load)).reshape(num_groups, -1)
    node, place = _pack(load[groups].sum(1), num_nodes)
    expert, copy = np.empty(num_replicas, np.int64), np.empty(num_replicas, np.int64)
    per_node, gpus = num_replicas // num_nodes, num_gpus // num_nodes
    for number in range(num_nodes):
        members = np.flatnonzero(node == number)
        experts = groups[members[np.argsort(place[members])]].reshape(-1)
        item, item_copy, copies = _replicate(load[experts], per_node, gpus if distinct else per_node)
        gpu, slot = _pack(load[experts[item]] / copies[item].astype(np.float32), gpus, item if distinct else None)
        position = number * per_node + gpu * (per_node // gpus) + slot
        expert[position], copy[position] = experts[item], item_copy
    return expert, copy


def _replicate(load: Weights, num_items: int, limit: int) -> tuple[Indices, Indices, Indices]:
    """Expert and copy number of each item, the first copies before all others; and the copies of each expert."""
    item, item_copy = np.arange(num_items), np.zeros(num_items, np.int64)
    copies = np.ones(len(load), np.int64)
    for i in range(len(load), num_items):
        heaviest = int(np.argmax(np.where(copies < limit, load / copies.astype(np.float32), -1)))
        item[i], item_copy[i] = heaviest, copies[heaviest]
        copies[heaviest] += 1
    return item, item_copy, copies


def _pack(weight: Weights, num_bins: int, label: Indices | None = None) -> tuple[Indices, Indices]:
    """Bin of each item and its place there; every bin gets as many items, no label twice."""
    capacity = len(weight) // num_bins
    # EPLB returns here before it sorts, and its results are what callers compare with.
    if capacity == 1:
        return np.arange(num_bins), np.zeros(num_bins, np.int64)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = np.zeros(num_bins, np.float32)
    for item in np.argsort(-weight, kind="stable").tolist():
        full = np.array([len(held) == capacity for held in bins])
        taken = np.zeros(num_bins, bool) if label is None else _having(bins, label, int(label[item]))
        # The first of equal ones, as EPLB takes it.
        best = int(np.argmin(np.where(full | taken, np.inf, load)))
        if full[best] or taken[best]:
            _exchange(bins, load, weight, label, item, ~full, taken)
            continue
        bins[best].append(item)
        load[best] += weight[item]
    index, place = np.empty(len(weight), np.int64), np.empty(len(weight), np.int64)
    for number, held in enumerate(bins):
        index[held], place[held] = number, np.arange(capacity)
    return index, place


def _having(bins: list[list[int]], label: Indices, wanted: int) -> np.ndarray:
    return np.array([any(label[item] == wanted for item in held) for held in bins])


def _exchange(
    bins: list[list[int]],
    load: np.ndarray,
    weight: Weights,
    label: Any,
    item: int,
    has_room: np.ndarray,
    taken: np.ndarray,
) -> None:
    """Puts the item into a full bin, whose item nearest in weight goes to a bin with room.

    There is one: labels have no more copies than there are bins, so that a bin without this one is left, and that
    bin is full of different labels, more than any bin with room has.
    """
    target = int(np.argmin(np.where(has_room, load, np.inf)))
    known = {label[other] for other in bins[target]}
    moves = [
        (abs(weight[other] - weight[item]), number, other)
        for number in np.flatnonzero(~taken & ~has_room).tolist()
        for other in bins[number]
        if label[other] not in known
    ]
    _, source, other = min(moves)
    bins[source][bins[source].index(other)] = item
    bins[target].append(other)
    load[source] += weight[item] - weight[other]
    load[target] += weight[other]
