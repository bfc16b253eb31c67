"""In-graph quota balancer: surplus to deficit, one expert at a time."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import Counts, State, iota


@dataclass(frozen=True)
class Greedy(Balancer):
    """Moves the surplus of the busiest ranks to idle ones, inside each domain, until slots or surplus run out.

    A move takes from the busiest rank of a domain what it has above the domain's mean,
    rounded up. Either an existing replica takes it, or the idlest rank with a free slot
    gets a new replica of the hottest expert: whichever can take more, and on a tie the
    former, which moves no weights. A rank that can give nothing more is left alone.
    One pass, no search: at the mean when slots abound, above it when they are scarce.

    Args:
        min_tokens: a new replica must take at least so many tokens; bounds the weights that
            move for little. 1, the default, always moves.
    """

    min_tokens: int = 1

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens is {self.min_tokens}; expected at least 1")

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """One plan for all domains, which are balanced side by side."""
        del counts, topology
        start = _start(plan)
        end = jax.lax.while_loop(
            lambda s: (s.surplus > 0).any(), lambda s: _move(s, self.min_tokens, plan.num_home), start
        )
        quota = end.quota.swapaxes(0, 1).reshape(plan.quota.shape)
        placement = end.placement.reshape(plan.placement.shape)
        return Plan(placement, quota, plan.relay, plan.rails, plan.domain), state


@pytree
class _Domains:
    """All domains, `B = R / M` of them.

    Args:
        quota: tokens of each expert that each rank serves.
        placement: expert in each slot, -1 for an empty one.
        holds: whether a rank has a slot for an expert.
        surplus: tokens above the domain's mean; 0 once a rank can give no more.
        room: tokens below it.
    """

    quota: Int[Array, "B E M"]
    placement: Int[Array, "B M S"]
    holds: Bool[Array, "B E M"]
    surplus: Int[Array, "B M"]
    room: Int[Array, "B M"]


def _start(plan: Plan) -> _Domains:
    num_experts, members = plan.num_experts, plan.domain
    num_domains = plan.num_ranks // members
    quota = jnp.asarray(plan.quota).reshape(num_experts, num_domains, members).swapaxes(0, 1)
    placement = jnp.asarray(plan.placement).reshape(num_domains, members, plan.slots)
    domain, member, _ = np.indices(placement.shape)
    # An empty slot's -1 becomes an expert past the end, which the scatter drops.
    expert = jnp.where(placement < 0, num_experts, placement)
    holds = jnp.zeros(quota.shape, bool).at[domain, expert, member].set(True, mode="drop")
    load = quota.sum(1, dtype=jnp.int32)
    target = (load.sum(1, keepdims=True, dtype=jnp.int32) + members - 1) // members
    return _Domains(quota, placement, holds, jnp.maximum(load - target, 0), jnp.maximum(target - load, 0))


def _move(s: _Domains, min_tokens: int, num_home: int) -> _Domains:
    """One move in every domain that has a surplus left."""
    b = iota(s.surplus.shape[0])
    source = _argmax(s.surplus)
    served = s.quota[b, :, source]
    kept_expert, kept_rank, kept = _best_replica(s, served)
    new_expert, new_rank, new_slot, new = _best_new(s, served, num_home)
    make = (new > kept) & (jnp.minimum(new, s.surplus[b, source]) >= min_tokens)
    expert, target = jnp.where(make, new_expert, kept_expert), jnp.where(make, new_rank, kept_rank)
    tokens = jnp.minimum(jnp.where(make, new, kept), s.surplus[b, source])
    held = s.placement[b, new_rank, new_slot]
    left = jnp.where(tokens > 0, s.surplus[b, source] - tokens, 0)
    return _Domains(
        quota=s.quota.at[b, expert, source].add(-tokens).at[b, expert, target].add(tokens),
        placement=s.placement.at[b, new_rank, new_slot].set(jnp.where(make, new_expert, held)),
        holds=s.holds.at[b, expert, target].max(make),
        surplus=s.surplus.at[b, source].set(left),
        room=s.room.at[b, target].add(-tokens),
    )


def _best_replica(s: _Domains, served: Int[Array, "B E"]) -> tuple[Array, Array, Array]:
    """Expert, rank and tokens of the existing slot that can take most; the source itself has no room."""
    num_domains, _, slots = s.placement.shape
    expert = s.placement.reshape(num_domains, -1)
    tokens = jnp.where(expert >= 0, jnp.take_along_axis(served, jnp.maximum(expert, 0), axis=1), 0)
    tokens = jnp.minimum(tokens, jnp.repeat(s.room, slots, axis=1))
    best = _argmax(tokens)[:, None]
    chosen = jnp.maximum(jnp.take_along_axis(expert, best, axis=1), 0)
    return chosen[:, 0], (best // slots)[:, 0], jnp.take_along_axis(tokens, best, axis=1)[:, 0]


def _best_new(s: _Domains, served: Int[Array, "B E"], num_home: int) -> tuple[Array, Array, Array, Array]:
    """Expert, rank, slot and tokens of the new replica that could take most."""
    num_domains, members, _ = s.placement.shape
    b = iota(num_domains)
    free = (s.placement < 0).any(2)
    rank = _argmax(jnp.where(free, s.room, 0))
    slot = _argmax(s.placement[b, rank] < 0)
    home_domain = iota(served.shape[1]) // num_home // members
    allowed = (home_domain[None] == b[:, None]) & ~s.holds[b, :, rank]
    tokens = jnp.where(allowed & free[b, rank][:, None], served, 0)
    expert = _argmax(tokens)
    return expert, rank, slot, jnp.minimum(tokens[b, expert], s.room[b, rank])


def _argmax(values: Array) -> Int[Array, "B"]:
    """The lowest index of each line's maximum."""
    return jax.lax.argmax(values, 1, jnp.int32)
