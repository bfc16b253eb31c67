"""Greedy planner: the surplus of busy ranks goes to replicas on idle ranks, one expert at a time."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb.core.native_planner import NativePlanner, alike
from jax_moe_lb.core.topology import check_domain, home_experts_per_rank
from jax_moe_lb.core.types import Placement, Quota, iota, pytree
from jax_moe_lb.planners.base import edit, first_argmax, within_int32


def greedy(placement: Placement, quota: Quota, domain: int, min_tokens: int) -> tuple[Placement, Quota]:
    """Make the moves of `Greedy`."""
    # Call it to plan on NumPy arrays or in a custom balancer; `Greedy` applies the equivalent `greedy_planner`.
    # While a rank of a domain exceeds the domain's mean, rounded up, the busiest rank gives tokens to one of two slots:
    # - `kept`: the existing slot able to take most tokens of its expert.
    # - `new`: the first empty slot of the rank with most room among the ranks with an empty slot. It takes, of the
    #   domain's experts without a slot on this rank, the expert with the most tokens served by the giver.
    # Either takes at most its rank's distance below the mean. `new` wins if it can take more than `kept` and the move
    # reaches `min_tokens`. No move exceeds the giver's surplus. A giver without a possible move is skipped from then
    # on. Ties go to the lower rank, slot and expert.
    # Returns the placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays for NumPy inputs. For an illegal plan,
    # the custom call stops the program on a CPU, and returns -1 in all entries on a GPU.
    return edit(greedy_planner(domain, min_tokens), placement, quota)


def greedy_planner(domain: int, min_tokens: int) -> NativePlanner:
    """Return `greedy` as a value, for concurrent execution (`collectives/plan_and_copy.py`)."""
    return NativePlanner("greedy", (("domain", domain), ("min_tokens", min_tokens)), greedy_reference, check_greedy)


def greedy_reference(placement: Placement, quota: Quota, domain: int, min_tokens: int) -> tuple[Placement, Quota]:
    """Compute `greedy` in jnp as a loop over moves, all domains side by side."""
    placement, quota = alike(placement, quota)
    min_tokens = within_int32(min_tokens)
    num_home = quota.shape[0] // quota.shape[1]
    end = jax.lax.while_loop(
        lambda s: (s.surplus > 0).any(), lambda s: _move(s, min_tokens, num_home), _start(placement, quota, domain)
    )
    return end.placement.reshape(placement.shape), end.quota.swapaxes(0, 1).reshape(quota.shape)


def check_greedy(placement: tuple[int, ...], quota: tuple[int, ...], domain: int, min_tokens: int) -> None:
    """Check the shapes of a plan and the options of `greedy`."""
    num_experts, num_ranks = quota
    home_experts_per_rank(num_experts, num_ranks, "quota")
    if placement[0] != num_ranks or placement[1] < 1:
        raise ValueError(f"placement has shape {placement}; expected [{num_ranks}, S] with S at least 1")
    check_domain(domain, num_ranks)
    if min_tokens < 1:
        raise ValueError(f"min_tokens is {min_tokens}; expected at least 1")


@pytree
class _Moves:
    quota: Int[Array, "B E M"]  # token copies of each expert served by each rank
    placement: Int[Array, "B M S"]  # expert in each slot; -1 for an empty slot
    holds: Bool[Array, "B E M"]  # true if the rank has a slot for the expert
    surplus: Int[Array, "B M"]  # token copies of a rank above the domain's mean; 0 once no further move is possible
    room: Int[Array, "B M"]  # token copies of a rank below the domain's mean


def _start(placement: Placement, quota: Quota, members: int) -> _Moves:
    num_experts, num_ranks = quota.shape
    quota = quota.reshape(num_experts, num_ranks // members, members).swapaxes(0, 1)
    placement = placement.reshape(num_ranks // members, members, -1)
    domain, member, _ = np.indices(placement.shape)
    # An empty slot (-1) gets an index past the end, dropped by the scatter.
    expert = jnp.where(placement < 0, num_experts, placement)
    holds = jnp.zeros(quota.shape, bool).at[domain, expert, member].set(True, mode="drop")
    load = quota.sum(1, dtype=jnp.int32)
    # Round the mean up, without an overflowing sum, so that the room below it is at least the surplus above it.
    target = -(-load.sum(1, keepdims=True, dtype=jnp.int32) // members)
    return _Moves(quota, placement, holds, jnp.maximum(load - target, 0), jnp.maximum(target - load, 0))


def _move(s: _Moves, min_tokens: int, num_home: int) -> _Moves:
    """Make one move in every domain with a surplus left, and leave the others unchanged."""
    b = iota(s.surplus.shape[0])
    source = first_argmax(s.surplus)
    served = s.quota[b, :, source]
    # A tie goes to the existing slot, which moves no weights.
    kept_expert, kept_rank, kept = _best_replica(s, served)
    new_expert, new_rank, new_slot, new = _best_new(s, served, num_home)
    make = (new > kept) & (jnp.minimum(new, s.surplus[b, source]) >= min_tokens)
    expert, target = jnp.where(make, new_expert, kept_expert), jnp.where(make, new_rank, kept_rank)
    tokens = jnp.minimum(jnp.where(make, new, kept), s.surplus[b, source])
    held = s.placement[b, new_rank, new_slot]
    # Skip a giver without a move, even if another rank could take tokens later, so that the loop ends.
    left = jnp.where(tokens > 0, s.surplus[b, source] - tokens, 0)
    return _Moves(
        quota=s.quota.at[b, expert, source].add(-tokens).at[b, expert, target].add(tokens),
        placement=s.placement.at[b, new_rank, new_slot].set(jnp.where(make, new_expert, held)),
        holds=s.holds.at[b, expert, target].max(make),
        surplus=s.surplus.at[b, source].set(left),
        room=s.room.at[b, target].add(-tokens),
    )


def _best_replica(s: _Moves, served: Int[Array, "B E"]) -> tuple[Array, Array, Array]:
    """Return expert, rank and tokens of the existing slot able to take most; the source has no room."""
    num_domains, _, slots = s.placement.shape
    expert = s.placement.reshape(num_domains, -1)
    # Read the -1 of an empty slot as expert 0, and mask its tokens.
    tokens = jnp.where(expert >= 0, jnp.take_along_axis(served, jnp.maximum(expert, 0), axis=1), 0)
    tokens = jnp.minimum(tokens, jnp.repeat(s.room, slots, axis=1))
    best = first_argmax(tokens)[:, None]
    chosen = jnp.maximum(jnp.take_along_axis(expert, best, axis=1), 0)
    return chosen[:, 0], (best // slots)[:, 0], jnp.take_along_axis(tokens, best, axis=1)[:, 0]


def _best_new(s: _Moves, served: Int[Array, "B E"], num_home: int) -> tuple[Array, Array, Array, Array]:
    """Return expert, rank, slot and tokens of the new replica able to take most."""
    num_domains, members, _ = s.placement.shape
    b = iota(num_domains)
    free = (s.placement < 0).any(2)
    rank = first_argmax(jnp.where(free, s.room, 0))
    slot = first_argmax(s.placement[b, rank] < 0)
    home_domain = iota(served.shape[1]) // num_home // members
    # Exclude experts of other domains, because weights do not cross domains, and experts already on the rank, because a
    # second slot adds no capacity.
    allowed = (home_domain[None] == b[:, None]) & ~s.holds[b, :, rank]
    tokens = jnp.where(allowed & free[b, rank][:, None], served, 0)
    expert = first_argmax(tokens)
    return expert, rank, slot, jnp.minimum(tokens[b, expert], s.room[b, rank])
