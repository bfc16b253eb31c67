"""The plan of one layer and microbatch: who serves which tokens, as integers."""

from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import AnyArray, Counts, Load, Quota, host_iota

if TYPE_CHECKING:
    Scalar = Any
    IntScalar = Any
else:
    Scalar = Float[AnyArray, ""] | float
    IntScalar = Int[AnyArray, ""] | np.integer
    """An array in a jitted program, a NumPy number on a host."""


@pytree
class Plan:
    """Placement and quota, all that a balancer decides. Static shapes: one compilation serves every plan.

    Args:
        placement: expert held by each slot, -1 for an empty one. The first `L` slots of a
            rank hold its home experts: home owns parameters and optimizer state, slots serve.
        quota: token copies of an expert that a rank serves (UltraEP's `U`).
        relay: the rank from which a slot copies its weights; `None`: from home.
        rails: token copies from rank to rank on each rail; `None`: the destination's own rail.
        domain: `M` of this plan: slots are filled only from inside blocks of `M` ranks.
    """

    placement: Int[AnyArray, "*B R S"]
    quota: Int[AnyArray, "*B E R"]
    relay: Int[AnyArray, "*B R S"] | None = None
    rails: Int[AnyArray, "*B R R N"] | None = None
    domain: int = field(default=0, metadata={"static": True})

    @property
    def num_ranks(self) -> int:
        """`R`."""
        return self.placement.shape[0]

    @property
    def num_experts(self) -> int:
        """`E`."""
        return self.quota.shape[0]

    @property
    def num_home(self) -> int:
        """`L`."""
        return self.num_experts // self.num_ranks

    @property
    def slots(self) -> int:
        """`S`."""
        return self.placement.shape[1]


def home_experts_per_rank(num_experts: int, num_ranks: int) -> int:
    """`L = E / R`.

    Raises:
        ValueError: `E` is not a positive multiple of `R`.
    """
    if num_experts < 1 or num_experts % num_ranks:
        raise ValueError(f"num_experts is {num_experts}; expected a positive multiple of the {num_ranks} ranks")
    return num_experts // num_ranks


def plain_plan(counts: Counts, topology: Topology, slots: int | None = None) -> Plan:
    """Every expert served at home: plain expert parallelism, and what balancers start from.

    Args:
        counts: `[R, E]`.
        topology: its `ranks_per_domain` becomes the plan's domain.
        slots: `S`, slots per rank; `L`, no replicas, by default.

    Raises:
        ValueError: `counts` of another shape, `E` no multiple of `R`, or `slots < L`.
    """
    if counts.ndim != 2 or counts.shape[0] != topology.num_ranks:
        raise ValueError(f"counts has shape {counts.shape}; expected [R, E] with R = {topology.num_ranks}")
    num_ranks, num_experts = counts.shape
    home = home_experts_per_rank(num_experts, num_ranks)
    slots = home if slots is None else slots
    if slots < home:
        raise ValueError(f"slots is {slots}; expected at least the {home} home experts of a rank")
    placement = np.full((num_ranks, slots), -1, np.int32)
    placement[:, :home] = host_iota(num_experts).reshape(num_ranks, home)
    at_home = host_iota(num_experts)[:, None] // home == host_iota(num_ranks)
    xp = _namespace(counts)
    quota = xp.where(xp.asarray(at_home), counts.sum(0, dtype=np.int32)[:, None], xp.int32(0))
    # The zero gives the constant the manual axes of counts, so that loops may carry the plan.
    zero = counts[0, 0].astype(np.int32) * 0
    return Plan(xp.asarray(placement) + zero, quota, domain=topology.ranks_per_domain)


def nearest_first(counts: Counts, quota: Quota, rank: Int[AnyArray, ""] | int, domain: int) -> Quota:
    """Which rank serves how many of one rank's token copies.

    The split rule of every plan: tokens stay on their own rank as far as its quota
    reaches, then go to their own domain, then to ranks of equal offset in other domains,
    then anywhere; within each tier, lower ranks first. Each tier matches supply (counts)
    and demand (quota) in rank order, the northwest-corner rule, whose entries are overlaps
    of intervals of two cumulative sums: no loop, and only this rank's `[E, R]` row exists.

    Args:
        counts: `[R, E]`, token copies by source.
        quota: `[E, R]`, token copies by serving rank, with `quota.sum(1) == counts.sum(0)`.
        rank: the source whose row is wanted.
        domain: `M`.

    Returns:
        `[E, R]`: copies of each expert that `rank` sends to each rank; sums to `counts[rank]`.
    """
    return _split(counts.T, quota, rank, domain)


def arrivals(counts: Counts, quota: Quota, rank: Int[AnyArray, ""] | int, domain: int) -> Quota:
    """The other side of `nearest_first`: copies of each expert that `rank` gets from each rank, `[E, R]`."""
    return _split(quota, counts.T, rank, domain)


def _split(supply: Quota, demand: Quota, rank: Int[AnyArray, ""] | int, domain: int) -> Quota:
    num_experts, num_ranks = supply.shape
    xp = _namespace(supply)
    own = host_iota(num_ranks)[None] == rank
    kept = xp.minimum(supply, demand)
    row = xp.where(own, kept, 0)
    supply, demand = supply - kept, demand - kept
    for shape, member_axis in _tiers(num_ranks, domain):
        tiers = (num_experts, *shape)
        part, supply, demand = _tier(supply.reshape(tiers), demand.reshape(tiers), own.reshape(1, *shape), member_axis)
        row = row + part.reshape(num_experts, num_ranks)
    return row


def _tiers(num_ranks: int, domain: int) -> list[tuple[tuple[int, int], int]]:
    """Rank grids whose lines are the groups to match within; trivial tiers are left out."""
    grid = (num_ranks // domain, domain)
    own_domain, own_offset, anywhere = (grid, 2), (grid, 1), ((1, num_ranks), 2)
    if 1 in grid:
        return [anywhere]
    return [own_domain, own_offset, anywhere]


def _tier(
    supply: Int[AnyArray, "E G1 G2"],
    demand: Int[AnyArray, "E G1 G2"],
    own: Bool[AnyArray, "1 G1 G2"],
    axis: int,
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Matches supply and demand along `axis`; the row of the one member marked in `own`, and what is left."""
    xp = _namespace(supply)
    supply_end, demand_end = supply.cumsum(axis, dtype=np.int32), demand.cumsum(axis, dtype=np.int32)
    supply_start, demand_start = supply_end - supply, demand_end - demand
    last = [slice(None)] * 3
    last[axis] = slice(-1, None)
    matched = xp.minimum(supply_end[tuple(last)], demand_end[tuple(last)])
    # Only the group of `own` has a non-empty interval, so the overlap vanishes elsewhere.
    start = xp.where(own, supply_start, 0).sum(axis, dtype=np.int32, keepdims=True)
    length = xp.where(own, supply, 0).sum(axis, dtype=np.int32, keepdims=True)
    end = xp.minimum(start + length, matched)
    part = xp.maximum(xp.minimum(end, demand_end) - xp.maximum(start, demand_start), 0)
    return (
        part,
        supply - xp.clip(matched - supply_start, 0, supply),
        demand - xp.clip(matched - demand_start, 0, demand),
    )


def load(plan: Plan) -> Load:
    """Token copies that each rank serves, `[R]`."""
    return plan.quota.sum(0, dtype=np.int32)


def straggler(load: Load) -> Scalar:
    """`max(load) - mean(load)`, in token copies (FEPLB, token straggler)."""
    load = _as_float(load)
    return load.max() - load.mean()


def imbalance(load: Load) -> Scalar:
    """`max(load) / mean(load)` (UltraEP, section 4.3); 1 where there is no load."""
    load = _as_float(load)
    xp = _namespace(load)
    mean = load.mean()
    return xp.where(mean > 0, load.max() / xp.where(mean > 0, mean, 1), xp.ones_like(mean))


class Traffic(NamedTuple):
    """What a plan moves between ranks.

    Args:
        rows: token copies served by another rank than their own, counted once for dispatch.
        replicas: slots that hold an expert of another rank.
        fan_out: copies of expert weights that each rank sends, `[R]`.
    """

    rows: IntScalar
    replicas: IntScalar
    fan_out: Int[AnyArray, "R"]


def traffic(plan: Plan, counts: Counts) -> Traffic:
    """Token copies and expert copies that cross between ranks under `plan`."""
    xp = _namespace(plan.quota)
    stay = xp.minimum(counts.T, plan.quota).sum(dtype=np.int32)
    replicas = plan.placement[:, plan.num_home :]
    senders = xp.where(replicas >= 0, replicas // plan.num_home, plan.num_ranks)
    fan_out = (senders[..., None] == host_iota(plan.num_ranks)[None, None]).sum((0, 1), dtype=np.int32)
    return Traffic(counts.sum(dtype=np.int32) - stay, fan_out.sum(dtype=np.int32), fan_out)


def _namespace(array: AnyArray) -> Any:
    return np if isinstance(array, np.ndarray | np.generic) else jnp


def _as_float(array: AnyArray) -> AnyArray:
    return array.astype(np.float64 if _namespace(array) is np else jnp.float32)
