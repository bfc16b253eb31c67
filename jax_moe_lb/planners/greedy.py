"""`greedy` gives the surplus of busy ranks to replicas on idle ones, one expert at a time."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb.core.topology import check_domain, home_experts_per_rank
from jax_moe_lb.core.types import Placement, Quota, iota, pytree
from jax_moe_lb.planners.base import NativePlanner, alike, edit


def greedy(placement: Placement, quota: Quota, domain: int, min_tokens: int) -> tuple[Placement, Quota]:
    """Makes the moves that `Greedy` describes.

    Call it to plan on NumPy arrays, or in a balancer of your own; `Greedy` applies `greedy_planner`, which is the same.

    Until no rank of a domain has more than the domain's mean, rounded up, the one with most
    gives tokens away. `kept`: to the existing slot that can take most tokens of the expert it
    holds. `new`: to the first empty slot of the rank with most room among those that have
    one; it takes, of the domain's experts that have no slot on that rank, the one that the
    giver serves most of. Either takes at most what its rank has below the mean. `new` wins if
    it could take more than `kept` and the move reaches `min_tokens`. No move exceeds the
    giver's surplus; a giver that can give nothing is left alone. Ties go to the lower rank,
    slot and expert.

    Args:
        placement: `[R, S]` integers, the expert in each slot, -1 for an empty one.
        quota: `[E, R]` integers, the token copies of each expert that each rank serves, at least 0; their sum must stay
            below `2**31`.
        domain: how many ranks a domain has; it divides `R`.
        min_tokens: the least token copies that a new replica takes, at least 1; 1 is usual.

    Returns:
        The placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays give NumPy arrays. A plan that breaks the
        rules above stops the program on a CPU with the custom call; on a GPU with it all entries are then -1.

    Raises:
        ValueError: shapes that do not fit, or an option out of range.
    """
    return edit(greedy_planner(domain, min_tokens), placement, quota)


def greedy_planner(domain: int, min_tokens: int) -> NativePlanner:
    """Returns `greedy` as a value, which can run beside other work (`collectives/plan_and_copy.py`).

    Args:
        domain: how many ranks a domain has.
        min_tokens: the least token copies that a new replica takes, at least 1.
    """
    return NativePlanner("greedy", (("domain", domain), ("min_tokens", min_tokens)), greedy_reference, check_greedy)


def greedy_reference(placement: Placement, quota: Quota, domain: int, min_tokens: int) -> tuple[Placement, Quota]:
    """Computes `greedy` as a loop over moves, all domains side by side; it runs where no custom call does."""
    placement, quota = alike(placement, quota)
    num_home = quota.shape[0] // quota.shape[1]
    end = jax.lax.while_loop(
        lambda s: (s.surplus > 0).any(), lambda s: _move(s, min_tokens, num_home), _start(placement, quota, domain)
    )
    return end.placement.reshape(placement.shape), end.quota.swapaxes(0, 1).reshape(quota.shape)


def check_greedy(placement: tuple[int, ...], quota: tuple[int, ...], domain: int, min_tokens: int) -> None:
    """Refuses shapes that do not fit, and options of `greedy` that are out of range.

    Args:
        placement: the shape of the placement, `(R, S)`.
        quota: the shape of the quota, `(E, R)`.
        domain: how many ranks a domain has.
        min_tokens: the least token copies that a new replica takes.

    Raises:
        ValueError: names the argument, and says what was expected.
    """
    num_experts, num_ranks = quota
    home_experts_per_rank(num_experts, num_ranks, "quota")
    if placement[0] != num_ranks or placement[1] < 1:
        raise ValueError(f"placement has shape {placement}; expected [{num_ranks}, S] with S at least 1")
    check_domain(domain, num_ranks)
    if min_tokens < 1:
        raise ValueError(f"min_tokens is {min_tokens}; expected at least 1")


@pytree
class _Moves:
    """Carries the loop, over all `B = R / M` domains.

    Args:
        quota: the token copies of each expert that each rank serves.
        placement: the expert in each slot, -1 for an empty one.
        holds: whether a rank has a slot for an expert.
        surplus: the token copies of a rank above the domain's mean; 0 once it can give no more.
        room: the token copies of a rank below the domain's mean.
    """

    quota: Int[Array, "B E M"]
    placement: Int[Array, "B M S"]
    holds: Bool[Array, "B E M"]
    surplus: Int[Array, "B M"]
    room: Int[Array, "B M"]


def _start(placement: Placement, quota: Quota, members: int) -> _Moves:
    num_experts, num_ranks = quota.shape
    quota = quota.reshape(num_experts, num_ranks // members, members).swapaxes(0, 1)
    placement = placement.reshape(num_ranks // members, members, -1)
    domain, member, _ = np.indices(placement.shape)
    # An empty slot's -1 becomes an expert past the end, which the scatter drops.
    expert = jnp.where(placement < 0, num_experts, placement)
    holds = jnp.zeros(quota.shape, bool).at[domain, expert, member].set(True, mode="drop")
    load = quota.sum(1, dtype=jnp.int32)
    # The mean is rounded up so that there is always as much room below it as surplus above it.
    target = (load.sum(1, keepdims=True, dtype=jnp.int32) + members - 1) // members
    return _Moves(quota, placement, holds, jnp.maximum(load - target, 0), jnp.maximum(target - load, 0))


def _move(s: _Moves, min_tokens: int, num_home: int) -> _Moves:
    """Makes one move in every domain that has a surplus left, and changes nothing in the others."""
    b = iota(s.surplus.shape[0])
    source = _argmax(s.surplus)
    served = s.quota[b, :, source]
    # A tie goes to the slot that exists, which moves no weights.
    kept_expert, kept_rank, kept = _best_replica(s, served)
    new_expert, new_rank, new_slot, new = _best_new(s, served, num_home)
    make = (new > kept) & (jnp.minimum(new, s.surplus[b, source]) >= min_tokens)
    expert, target = jnp.where(make, new_expert, kept_expert), jnp.where(make, new_rank, kept_rank)
    tokens = jnp.minimum(jnp.where(make, new, kept), s.surplus[b, source])
    held = s.placement[b, new_rank, new_slot]
    # A giver that cannot give now is left alone, even if another rank could take some later: so the loop ends.
    left = jnp.where(tokens > 0, s.surplus[b, source] - tokens, 0)
    return _Moves(
        quota=s.quota.at[b, expert, source].add(-tokens).at[b, expert, target].add(tokens),
        placement=s.placement.at[b, new_rank, new_slot].set(jnp.where(make, new_expert, held)),
        holds=s.holds.at[b, expert, target].max(make),
        surplus=s.surplus.at[b, source].set(left),
        room=s.room.at[b, target].add(-tokens),
    )


def _best_replica(s: _Moves, served: Int[Array, "B E"]) -> tuple[Array, Array, Array]:
    """Returns expert, rank and tokens of the existing slot that can take most; the source itself has no room."""
    num_domains, _, slots = s.placement.shape
    expert = s.placement.reshape(num_domains, -1)
    # An empty slot's -1 is read as expert 0, and its tokens are then masked.
    tokens = jnp.where(expert >= 0, jnp.take_along_axis(served, jnp.maximum(expert, 0), axis=1), 0)
    tokens = jnp.minimum(tokens, jnp.repeat(s.room, slots, axis=1))
    best = _argmax(tokens)[:, None]
    chosen = jnp.maximum(jnp.take_along_axis(expert, best, axis=1), 0)
    return chosen[:, 0], (best // slots)[:, 0], jnp.take_along_axis(tokens, best, axis=1)[:, 0]


def _best_new(s: _Moves, served: Int[Array, "B E"], num_home: int) -> tuple[Array, Array, Array, Array]:
    """Returns expert, rank, slot and tokens of the new replica that could take most."""
    num_domains, members, _ = s.placement.shape
    b = iota(num_domains)
    free = (s.placement < 0).any(2)
    rank = _argmax(jnp.where(free, s.room, 0))
    slot = _argmax(s.placement[b, rank] < 0)
    home_domain = iota(served.shape[1]) // num_home // members
    # An expert of another domain gets no replica here, since its weights would have to cross domains; a second slot on
    # a rank would serve nothing that the first could not.
    allowed = (home_domain[None] == b[:, None]) & ~s.holds[b, :, rank]
    tokens = jnp.where(allowed & free[b, rank][:, None], served, 0)
    expert = _argmax(tokens)
    return expert, rank, slot, jnp.minimum(tokens[b, expert], s.room[b, rank])


def _argmax(values: Array) -> Int[Array, "B"]:
    """Returns the lowest index of each line's maximum: ties go to the lower rank, slot and expert, as in C++."""
    return jax.lax.argmax(values, 1, jnp.int32)
