"""EPLB's two rules for redundant experts.

`eplb_plus` keeps homes fixed: the experts with the highest load per copy get replicas on the ranks with the lowest
load. `rebalance_experts` is EPLB's own algorithm on NumPy arrays, with its signature: it packs all copies of all
experts anew.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.core.topology import check_domain, home_experts_per_rank
from jax_moe_lb.core.types import AnyArray, Placement, Quota, host_iota, iota, namespace, pytree
from jax_moe_lb.planners.base import alike, run_planner

TokensOfExperts = Int[AnyArray, "E"]


def eplb_plus(tokens: TokensOfExperts, placement: Placement, domain: int) -> tuple[Placement, Quota]:
    """Fills the empty slots with replicas, and splits every expert's tokens evenly over its copies.

    `EPLBPlus` calls it; its rule stands in `ffi/planning/eplb_plus.h` too.

    What the placement holds stays where it is. The share of an expert is its tokens over its
    copies (the ranks that hold it), rounded up. In every domain on its own:

    1. Replicate: as long as there are empty slots left, the expert of the highest share, of those
       at home in this domain, gets one copy more. Left out are experts whose share is at most
       1 and those with as many copies as there are ranks that hold it or could.
    2. Pack (longest processing time first): the new copies, highest share first, go to the rank with
       the lowest load of those that have an empty slot and do not hold the expert. The load of a
       rank is the sum of the shares of what it holds. A copy that fits on no rank is not made.
    3. Split: see `round_robin`.

    Ties go to the lower expert and rank.

    Args:
        tokens: `[E]` integers, the token copies of each expert, at least 0; their sum must stay below `2**31`.
        placement: `[R, S]` integers, the expert in each slot, -1 for an empty one; several slots of an expert on a rank
            count as one.
        domain: how many ranks a domain has; it divides `R`.

    Returns:
        The placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays give NumPy arrays. An expert with tokens and
        no slot stops the program on a CPU with the custom call, like every bad value; on a GPU with it all entries are
        then -1, and elsewhere that expert's row of the quota is 0.

    Raises:
        ValueError: shapes that do not fit, or a domain that does not divide the ranks.
    """
    _check(tokens.shape[0], placement.shape, domain)
    shapes = placement.shape, (tokens.shape[0], placement.shape[0])
    placement, quota = run_planner("eplb_plus", shapes, tokens, placement, reference=eplb_plus_reference, domain=domain)
    return placement, quota


def eplb_plus_reference(tokens: TokensOfExperts, placement: Placement, domain: int) -> tuple[Placement, Quota]:
    """Computes `eplb_plus` as two loops over copies, all domains side by side; it runs where no custom call does."""
    tokens, placement = alike(tokens, placement)
    held = holds(placement, tokens.shape[0]).T
    num_ranks, num_domains = placement.shape[0], placement.shape[0] // domain
    b = iota(num_domains)
    # Only the diagonal blocks, a domain's own experts on its own ranks, since no copy is packed into another domain.
    # Those that are there already still count as copies and in loads.
    inside = held.reshape(num_domains, -1, num_domains, domain)[b, :, b]
    blocks = placement.reshape(num_domains, domain, -1)
    copies = held.sum(1, dtype=jnp.int32).reshape(num_domains, -1)
    planned = _add_replicas(tokens.reshape(num_domains, -1), copies, inside, (blocks < 0).sum(2, dtype=jnp.int32))
    share = _share(tokens.reshape(num_domains, -1), planned)
    load = jnp.where(held, share.reshape(-1, 1), 0).sum(0, dtype=jnp.int32).reshape(num_domains, domain)
    start = _Packing(planned - copies, blocks, inside, load)
    packed = jax.lax.while_loop(lambda p: (p.pending > 0).any(), lambda p: _place(p, share), start)
    placement = packed.placement.reshape(num_ranks, -1)
    return placement, round_robin(tokens, placement)


def round_robin(tokens: TokensOfExperts, placement: Placement) -> Quota:
    """Splits evenly: each of an expert's `n` copies serves `tokens // n`, the first `tokens % n` by rank one more.

    Use it where a placement is given and says nothing about shares, as EPLB's does.

    Args:
        tokens: `[E]` integers, the token copies of each expert.
        placement: `[R, S]` integers, the expert in each slot, -1 for an empty one; several slots of an expert on a rank
            count as one copy.

    Returns:
        The quota, `[E, R]` int32; the row of an expert without a slot is 0.
    """
    xp = namespace(tokens)
    held = holds(placement, tokens.shape[0]).T.astype(np.int32)
    # At least 1, so that an expert without a slot divides by something; its row is 0 by `held`.
    copies = xp.maximum(held.sum(1, dtype=np.int32), 1)
    before = held.cumsum(1, dtype=np.int32) - held
    extra = before < (tokens % copies)[:, None]
    return held * ((tokens // copies)[:, None] + extra.astype(np.int32))


def holds(placement: Placement, num_experts: int) -> Bool[AnyArray, "R E"]:
    """Says whether a rank has a slot for an expert, `[R, E]`.

    Args:
        placement: `[R, S]` integers, the expert in each slot, -1 for an empty one.
        num_experts: `E`.
    """
    return (placement[:, :, None] == host_iota(num_experts)[None, None]).any(1)


def _check(num_experts: int, placement: tuple[int, ...], domain: int) -> None:
    num_ranks, slots = placement
    if num_ranks < 1 or slots < 1:
        raise ValueError(f"placement has shape {placement}; expected [R, S], both at least 1")
    home_experts_per_rank(num_experts, num_ranks, "tokens")
    check_domain(domain, num_ranks)


def _share(tokens: Int[Array, "B P"], copies: Int[Array, "B P"]) -> Int[Array, "B P"]:
    # At least 1, so that an expert without a slot divides by something.
    copies = jnp.maximum(copies, 1)
    return tokens // copies + (tokens % copies > 0).astype(jnp.int32)


def _add_replicas(
    tokens: Int[Array, "B P"], copies: Int[Array, "B P"], inside: Bool[Array, "B P M"], empty: Int[Array, "B M"]
) -> Int[Array, "B P"]:
    """Decides how many copies each of a domain's experts shall have."""
    b = iota(tokens.shape[0])
    # More copies than ranks that hold the expert or could would find no slot when they are packed.
    limit = copies + ((empty > 0)[:, None] & ~inside).sum(2, dtype=jnp.int32)

    def gains(planned: Array, left: Array) -> Array:
        return (planned < limit) & (_share(tokens, planned) > 1) & (left > 0)[:, None]

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        planned, left = carry
        able = gains(planned, left)
        # Where no expert gains, all lines are 0 and expert 0 is chosen, which then gets `more = 0`: domains that are
        # done wait for the others without a change.
        expert = _argmax(jnp.where(able, _share(tokens, planned), 0))
        more = able[b, expert].astype(jnp.int32)
        return planned.at[b, expert].add(more), left - more

    start = (copies, empty.sum(1, dtype=jnp.int32))
    return jax.lax.while_loop(lambda carry: gains(*carry).any(), step, start)[0]


@pytree
class _Packing:
    """Carries the second loop, over all `B = R / M` domains with `P` experts each.

    Args:
        pending: how many copies of each expert have no slot yet.
        placement: the expert in each slot, numbered over all domains; -1 for an empty one.
        inside: whether a rank of the domain holds an expert of it.
        load: the sum of the shares of what a rank holds, in token copies.
    """

    pending: Int[Array, "B P"]
    placement: Int[Array, "B M S"]
    inside: Bool[Array, "B P M"]
    load: Int[Array, "B M"]


def _place(p: _Packing, share: Int[Array, "B P"]) -> _Packing:
    """Packs one copy in every domain that has any left."""
    b = iota(share.shape[0])
    # -1 is below every share, so that an expert without copies to place is chosen only where no other has any.
    local = _argmax(jnp.where(p.pending > 0, share, -1))
    fits = (p.placement < 0).any(2) & ~p.inside[b, local] & (p.pending[b, local] > 0)[:, None]
    # No load reaches the largest integer, since the tokens of the expert to be placed are not yet part of it.
    rank = jax.lax.argmin(jnp.where(fits, p.load, jnp.iinfo(jnp.int32).max), 1, jnp.int32)
    placed = fits[b, rank]
    slot = _argmax((p.placement[b, rank] < 0).astype(jnp.int32))
    expert = local + b * share.shape[1]
    held = p.placement[b, rank, slot]
    return _Packing(
        # An expert that fits nowhere now never will, as slots only fill up; at 0 the loop goes on to the next one.
        pending=p.pending.at[b, local].set(jnp.where(placed, p.pending[b, local] - 1, 0)),
        placement=p.placement.at[b, rank, slot].set(jnp.where(placed, expert, held)),
        inside=p.inside.at[b, local, rank].max(placed),
        load=p.load.at[b, rank].add(jnp.where(placed, share[b, local], 0)),
    )


def _argmax(values: Int[Array, "B N"]) -> Int[Array, "B"]:
    """Returns the lowest index of each line's maximum: ties go to the lower expert and rank, as in C++."""
    return jax.lax.argmax(values, 1, jnp.int32)


ExpertWeights = Float[np.ndarray, "N"]
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
        >>> from jax_moe_lb.planners import rebalance_experts
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


def _replicate(load: ExpertWeights, num_items: int, limit: int) -> tuple[Indices, Indices, Indices]:
    """Expert and copy number of each item, the first copies before all others; and the copies of each expert."""
    item, item_copy = np.arange(num_items), np.zeros(num_items, np.int64)
    copies = np.ones(len(load), np.int64)
    for i in range(len(load), num_items):
        heaviest = int(np.argmax(np.where(copies < limit, load / copies.astype(np.float32), -1)))
        item[i], item_copy[i] = heaviest, copies[heaviest]
        copies[heaviest] += 1
    return item, item_copy, copies


def _pack(weight: ExpertWeights, num_bins: int, label: Indices | None = None) -> tuple[Indices, Indices]:
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
    weight: ExpertWeights,
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
