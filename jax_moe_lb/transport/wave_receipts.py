"""Copies are addressed in two waves: those of static experts without a plan, the others when there is one.

FEPLB's Two-Phase Dispatch (arXiv 2604.19654, section 3.3). Which experts are *static* follows from the load alone
(`Balancer.dynamic`), and all their tokens go home; so wave 1 runs while the plan is made and weights are copied.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.plan import Plan, plain_plan
from jax_moe_lb.routing import NO_EXPERT
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.direct import Direct, DirectReceipt
from jax_moe_lb.transport.packing import inverse_order
from jax_moe_lb.types import Counts

Dynamic = Bool[Array, "E"]
"""Whether each expert may leave its home; false for static experts, which only their homes serve."""


@pytree
class Waves:
    """Holds the receipts of both waves. In the sending order static copies stand in front of dynamic ones.

    Both waves write into one array of outputs in that order, so that `combine` sees no difference.

    Args:
        static: the receipt of wave 1, of whose order only the places of static copies count.
        dynamic: the receipt of wave 2; its order and places are those of all copies.
    """

    static: DirectReceipt
    dynamic: DirectReceipt

    @property
    def rounds(self) -> Int[Array, ""]:
        """Counts how often the receive buffer is filled, int32: 2 times where both waves have rows that fit."""
        return self.static.rounds + self.dynamic.rounds


def address_static(
    direct: Direct, experts: Int[Array, "T K"], counts: Counts, dynamic: Dynamic, topology: Topology
) -> DirectReceipt:
    """Decides for every static copy of this rank where it goes, which needs no plan.

    Args:
        direct: the dispatch by which copies travel.
        experts: `[T, K]` int32, the expert of each copy, `NO_EXPERT` for one that goes nowhere.
        counts: `[R, E]` int32, the copies that each rank routes to each expert.
        dynamic: `[E]`, which experts may move; equal on all ranks.
        topology: its expert axes are the ranks that copies travel between.
    """
    # Dynamic experts are hidden, so that what is left is plain expert parallelism and needs no plan of a balancer.
    counts = jnp.where(dynamic[None], 0, counts)
    return direct.address(_only(experts, ~dynamic), counts, plain_plan(counts, topology), topology)


def address_dynamic(
    direct: Direct,
    experts: Int[Array, "T K"],
    counts: Counts,
    dynamic: Dynamic,
    plan: Plan,
    static: DirectReceipt,
    topology: Topology,
) -> Waves:
    """Decides where the other copies go.

    Args:
        direct: the dispatch by which copies travel.
        experts: `[T, K]` int32, the expert of each copy, `NO_EXPERT` for one that goes nowhere.
        counts: `[R, E]` int32, the copies that each rank routes to each expert.
        dynamic: `[E]`, which experts may move; equal on all ranks.
        plan: the plan, legal for `counts`, and with all static experts at home.
        static: what `address_static` returned.
        topology: its expert axes are the ranks that copies travel between.
    """
    of_dynamic = jnp.where(dynamic[None], counts, 0)
    moving = replace(plan, quota=jnp.where(dynamic[:, None], plan.quota, 0))
    receipt = direct.address(_only(experts, dynamic), of_dynamic, moving, topology)
    # Static copies stand in front, on every rank: what was addressed as if alone is shifted by them.
    front = (counts - of_dynamic).sum(1, dtype=jnp.int32)
    flat = experts.reshape(-1)
    # A copy that goes nowhere reads expert 0, and `nowhere` then decides.
    of_copy = dynamic[jnp.maximum(flat, 0)]
    nowhere = flat < 0
    # What goes nowhere stands last, in its own order, so that `place` stays a permutation.
    end = static.num_going
    last = end + receipt.num_going + nowhere.cumsum(dtype=jnp.int32) - 1
    place = jnp.where(nowhere, last, jnp.where(of_copy, end + receipt.place, static.place))
    shifted = replace(
        receipt,
        order=inverse_order(place),
        place=place,
        num_going=static.num_going + receipt.num_going,
        first_sent=receipt.first_sent + end,
        first_at_source=receipt.first_at_source + front[:, None],
    )
    return Waves(static, shifted)


def _only(experts: Int[Array, "T K"], wanted: Dynamic) -> Int[Array, "T K"]:
    """Keeps the expert of each wanted copy, and puts `NO_EXPERT` for those of other experts."""
    return jnp.where(wanted[jnp.maximum(experts, 0)], experts, NO_EXPERT)
