"""The plan of one layer and microbatch: who serves which tokens, as integers."""

from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.split import Split, kept, nearest_first
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import AnyArray, Counts, Load, host_iota, iota, namespace

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
        split: which source sends which of its tokens to which rank; follows from the quota.
    """

    placement: Int[AnyArray, "*B R S"]
    quota: Int[AnyArray, "*B E R"]
    relay: Int[AnyArray, "*B R S"] | None = None
    rails: Int[AnyArray, "*B R R N"] | None = None
    domain: int = field(default=0, metadata={"static": True})
    split: Split = field(default=Split(), metadata={"static": True})

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
        ValueError: `counts` of another shape, `E` no multiple of `R`, `slots < L` or `slots > E`.
    """
    if counts.ndim != 2 or counts.shape[0] != topology.num_ranks:
        raise ValueError(f"counts has shape {counts.shape}; expected [R, E] with R = {topology.num_ranks}")
    num_ranks, num_experts = counts.shape
    home = home_experts_per_rank(num_experts, num_ranks)
    slots = home if slots is None else slots
    if not home <= slots <= num_experts:
        raise ValueError(f"slots is {slots}; expected {home}, a rank's home experts, to {num_experts}, all experts")
    placement = np.full((num_ranks, slots), -1, np.int32)
    placement[:, :home] = host_iota(num_experts).reshape(num_ranks, home)
    at_home = host_iota(num_experts)[:, None] // home == host_iota(num_ranks)
    xp = namespace(counts)
    quota = xp.where(xp.asarray(at_home), counts.sum(0, dtype=np.int32)[:, None], xp.int32(0))
    # The zero gives the constant the manual axes of counts, so that loops may carry the plan.
    zero = counts[0, 0].astype(np.int32) * 0
    return Plan(xp.asarray(placement) + zero, quota, domain=topology.ranks_per_domain)


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
    xp = namespace(load)
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
    xp = namespace(plan.quota)
    stay = kept(counts, plan.quota, plan.domain, plan.split).sum(dtype=np.int32)
    replicas = plan.placement[:, plan.num_home :]
    senders = replicas // plan.num_home
    if plan.relay is not None:
        relay = plan.relay[:, plan.num_home :]
        senders = xp.where(relay >= 0, relay, senders)
    senders = xp.where(replicas >= 0, senders, plan.num_ranks)
    fan_out = (senders[..., None] == host_iota(plan.num_ranks)[None, None]).sum((0, 1), dtype=np.int32)
    return Traffic(counts.sum(dtype=np.int32) - stay, fan_out.sum(dtype=np.int32), fan_out)


def rows_between(counts: Counts, plan: Plan) -> Int[AnyArray, "R R"]:
    """Token copies from rank to rank, by the plan's split rule; on the diagonal those that stay.

    Args:
        counts: `[R, E]`.
        plan: legal for them.
    """
    if isinstance(counts, np.ndarray) and isinstance(plan.quota, np.ndarray):
        return _rows_on_host(counts, plan)

    def row(rank: AnyArray) -> AnyArray:
        return nearest_first(counts, plan.quota, rank, plan.domain, plan.split).sum(0, dtype=np.int32)

    return jax.lax.map(row, iota(plan.num_ranks), batch_size=min(plan.num_ranks, 8))


def _rows_on_host(counts: Counts, plan: Plan) -> Int[AnyArray, "R R"]:
    """An expert that one rank alone serves leaves nothing to split: the rule is asked for the others only."""
    shared = (plan.quota > 0).sum(1) > 1
    rows = np.zeros((plan.num_ranks, plan.num_ranks), np.int32)
    np.add.at(rows.T, plan.quota.argmax(1)[~shared], counts.T[~shared])
    if shared.any():
        some, quota = counts[:, shared], plan.quota[shared]
        for rank in range(plan.num_ranks):
            rows[rank] += nearest_first(some, quota, rank, plan.domain, plan.split).sum(0, dtype=np.int32)
    return rows


def _as_float(array: AnyArray) -> AnyArray:
    return array.astype(np.float64 if namespace(array) is np else jnp.float32)
