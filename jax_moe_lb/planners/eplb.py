"""EPLB's two rules for replicas.

`eplb_plus` keeps homes fixed: experts with the highest load per copy get replicas on the least loaded ranks.
`rebalance_experts` is the original EPLB on NumPy arrays, with its signature: it packs all copies of all experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.core.native_planner import alike
from jax_moe_lb.core.topology import check_domain, home_experts_per_rank
from jax_moe_lb.core.types import AnyArray, Placement, Quota, host_iota, iota, namespace, pytree
from jax_moe_lb.planners.base import first_argmax, run_planner

TokensOfExperts = Int[AnyArray, "E"]


def eplb_plus(tokens: TokensOfExperts, placement: Placement, domain: int) -> tuple[Placement, Quota]:
    """Fill the empty slots with replicas and split the tokens of every expert evenly over the copies."""
    # `EPLBPlus` calls it. `ffi/planning/eplb_plus.h` specifies the same rule.
    # Occupied slots keep their experts. The share of an expert is its number of tokens divided by its copies (the ranks
    # holding it), rounded up. Each domain is planned separately:
    # 1. Replicate: while there are empty slots, the home expert of the domain with the highest share gets another copy.
    #    Experts with a share of at most 1 are excluded. The number of copies is limited to the ranks with the expert or
    #    with an empty slot.
    # 2. Pack (longest processing time first): new copies, highest share first, go to the least loaded rank with an
    #    empty slot and without the expert. The load of a rank is the sum of the shares of its experts. A copy
    #    without such a rank is not made.
    # 3. Split: see `round_robin`.
    # Ties go to the lower expert and rank.
    # Returns the placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays for NumPy inputs. For invalid values,
    # such as an expert with tokens and without a slot, the custom call stops the program on a CPU. On a GPU it returns
    # -1 in all entries. The jnp form gives such an expert a quota row of 0.
    num_ranks, num_slots = placement.shape
    if num_ranks < 1 or num_slots < 1:
        raise ValueError(f"placement has shape {placement.shape}; expected [R, S], both at least 1")
    home_experts_per_rank(tokens.shape[0], num_ranks, "tokens")
    check_domain(domain, num_ranks)
    shapes = placement.shape, (tokens.shape[0], placement.shape[0])
    placement, quota = run_planner("eplb_plus", shapes, tokens, placement, reference=eplb_plus_reference, domain=domain)
    return placement, quota


def eplb_plus_reference(tokens: TokensOfExperts, placement: Placement, domain: int) -> tuple[Placement, Quota]:
    """Compute `eplb_plus` in jnp with two loops over copies, all domains side by side."""
    tokens, placement = alike(tokens, placement)
    held = holds(placement, tokens.shape[0]).T
    num_ranks, num_domains = placement.shape[0], placement.shape[0] // domain
    b = iota(num_domains)
    # Use only the diagonal blocks, a domain's own experts on its own ranks, because copies are packed inside their
    # domain. Existing copies elsewhere still count as copies and in loads.
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
    """Split tokens evenly: each of `n` copies serves `tokens // n`, and the first `tokens % n` by rank one more."""
    # Use it for placements without shares, as in EPLB.
    xp = namespace(tokens)
    held = holds(placement, tokens.shape[0]).T.astype(np.int32)
    # Avoid a division by zero for an expert without a slot; `held` makes its row 0.
    copies = xp.maximum(held.sum(1, dtype=np.int32), 1)
    before = held.cumsum(1, dtype=np.int32) - held
    extra = before < (tokens % copies)[:, None]
    return held * ((tokens // copies)[:, None] + extra.astype(np.int32))


def holds(placement: Placement, num_experts: int) -> Bool[AnyArray, "R E"]:
    """Return whether each rank has a slot for each expert, `[R, E]` bool."""
    return (placement[:, :, None] == host_iota(num_experts)[None, None]).any(1)


def _share(tokens: Int[Array, "B P"], copies: Int[Array, "B P"]) -> Int[Array, "B P"]:
    # Avoid a division by zero for an expert without a slot.
    copies = jnp.maximum(copies, 1)
    return tokens // copies + (tokens % copies > 0).astype(jnp.int32)


def _add_replicas(
    tokens: Int[Array, "B P"], copies: Int[Array, "B P"], inside: Bool[Array, "B P M"], empty: Int[Array, "B M"]
) -> Int[Array, "B P"]:
    """Return the planned number of copies per expert of a domain."""
    b = iota(tokens.shape[0])
    # Further copies would find no slot in packing.
    limit = copies + ((empty > 0)[:, None] & ~inside).sum(2, dtype=jnp.int32)

    def gains(planned: Array, left: Array) -> Array:
        return (planned < limit) & (_share(tokens, planned) > 1) & (left > 0)[:, None]

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        planned, left = carry
        able = gains(planned, left)
        # If no expert gains, all values are 0, and expert 0 is chosen with `more = 0`: finished domains wait for the
        # others unchanged.
        expert = first_argmax(jnp.where(able, _share(tokens, planned), 0))
        more = able[b, expert].astype(jnp.int32)
        return planned.at[b, expert].add(more), left - more

    start = (copies, empty.sum(1, dtype=jnp.int32))
    return jax.lax.while_loop(lambda carry: gains(*carry).any(), step, start)[0]


@pytree
class _Packing:
    """Carry of the second loop, over all `B = R / M` domains with `P` experts each."""

    pending: Int[Array, "B P"]  # copies of each expert without a slot so far
    placement: Int[Array, "B M S"]  # expert in each slot, numbered over all domains; -1 for an empty slot
    inside: Bool[Array, "B P M"]  # true if a rank of the domain holds an expert of it
    load: Int[Array, "B M"]  # sum of the shares of the experts on each rank, in token copies


def _place(p: _Packing, share: Int[Array, "B P"]) -> _Packing:
    """Pack one copy in every domain with copies left."""
    b = iota(share.shape[0])
    # -1 is below every share, so an expert without pending copies is chosen only if no expert has any.
    local = first_argmax(jnp.where(p.pending > 0, share, -1))
    fits = (p.placement < 0).any(2) & ~p.inside[b, local] & (p.pending[b, local] > 0)[:, None]
    # No load reaches the int32 maximum, because it excludes the tokens of the expert to place.
    rank = jax.lax.argmin(jnp.where(fits, p.load, jnp.iinfo(jnp.int32).max), 1, jnp.int32)
    placed = fits[b, rank]
    slot = first_argmax((p.placement[b, rank] < 0).astype(jnp.int32))
    expert = local + b * share.shape[1]
    held = p.placement[b, rank, slot]
    return _Packing(
        # An expert without a fitting rank never fits later, as slots only fill up. Set it to 0, so the loop continues
        # with the next.
        pending=p.pending.at[b, local].set(jnp.where(placed, p.pending[b, local] - 1, 0)),
        placement=p.placement.at[b, rank, slot].set(jnp.where(placed, expert, held)),
        inside=p.inside.at[b, local, rank].max(placed),
        load=p.load.at[b, rank].add(jnp.where(placed, share[b, local], 0)),
    )


ExpertWeights = Float[np.ndarray, "N"]
Indices = Int[np.ndarray, "..."]


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int, *, distinct: bool = False
) -> tuple[Indices, Indices, Indices]:
    """Return the expert per physical expert, as in DeepSeek's `eplb.rebalance_experts`.

    Use it to compare with EPLB, or to place experts of a serving system free to move all of them. It moves home
    experts, too, so its result is not a `Plan`; the balancer `EPLB` keeps homes.

    The policy is hierarchical if `num_groups` is a multiple of `num_nodes`. Groups are packed onto nodes, each node's
    experts are replicated inside it, and the copies are packed onto its GPUs. Otherwise the policy is global: all
    experts form one group on one node. Packing puts items, heaviest first, into the lightest bin with space; bins of
    one item keep the order of items. Replication gives one more copy to the expert of the highest load per copy. The
    arithmetic is float32, and ties go to the lower index.

    Args:
        weight: `[layers, E]`, the load of each expert in each layer, nonnegative and finite.
        num_replicas: number of physical experts per layer, including replicas; a multiple of `num_gpus`.
        num_groups: number of expert groups of the router; a divisor of `E`.
        num_nodes: number of nodes.
        num_gpus: number of GPUs of all nodes; a multiple of `num_nodes` in the hierarchical policy.
        distinct: if True, no GPU gets two copies of one expert; False (default) as in EPLB, although the second copy is
            wasted. An expert then has at most one copy per GPU of the node. If only GPUs with the expert have space,
            its copy is exchanged for the item of a full GPU nearest in load.

    Returns:
        The expert of each physical expert, `[layers, num_replicas]`; the physical experts of each expert, `[layers, E,
        X]`, padded with -1 to the maximum number of copies `X`; and their number, `[layers, E]`. All are int64.

    Raises:
        ValueError: a load or a number is invalid; the message names it.

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
    # float32 as in EPLB: float64 would have different ties.
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
    """Return the expert per physical expert of a layer, and the index of the copy."""
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
    """Return expert and copy index of each item, first copies before all others, and the copies of each expert."""
    item, item_copy = np.arange(num_items), np.zeros(num_items, np.int64)
    copies = np.ones(len(load), np.int64)
    for i in range(len(load), num_items):
        heaviest = int(np.argmax(np.where(copies < limit, load / copies.astype(np.float32), -1)))
        item[i], item_copy[i] = heaviest, copies[heaviest]
        copies[heaviest] += 1
    return item, item_copy, copies


def _pack(weight: ExpertWeights, num_bins: int, label: Indices | None = None) -> tuple[Indices, Indices]:
    """Return the bin per item and its position there, with equally full bins and distinct labels per bin."""
    capacity = len(weight) // num_bins
    # EPLB returns before sorting in this case, and results must match EPLB's.
    if capacity == 1:
        return np.arange(num_bins), np.zeros(num_bins, np.int64)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = np.zeros(num_bins, np.float32)
    for item in np.argsort(-weight, kind="stable").tolist():
        full = np.array([len(held) == capacity for held in bins])
        taken = np.zeros(num_bins, bool) if label is None else _having(bins, label, int(label[item]))
        # Take the first of equal loads, as EPLB does.
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
    """Put the item into a full bin, whose item nearest in weight moves to a bin with space."""
    # Such a bin exists: a label has at most as many copies as there are bins, so some bin lacks this label. This bin is
    # full of distinct labels, more than any bin with space has.
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
