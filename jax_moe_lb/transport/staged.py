"""Two waves of tokens over one plan: those of static experts do not wait for it.

FEPLB's Two-Phase Dispatch (arXiv 2604.19654, section 3.3). Which experts are *static* follows from the load alone
(`Balancer.dynamic`), and all their tokens go home; so wave 1 runs while the plan is made and weights are copied.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.plan import Plan, plain_plan
from jax_moe_lb.routing import NO_EXPERT
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.direct import Direct, Receipt
from jax_moe_lb.types import Counts, iota

Dynamic = Bool[Array, "E"]
"""False for static experts: only their homes serve them."""


@pytree
class Waves:
    """Which copies went where, of both waves. In the sending order static copies stand in front of dynamic ones.

    Args:
        static: of wave 1. Of its order only the places of static copies count.
        dynamic: of wave 2; its order and places are those of all copies.
    """

    static: Receipt
    dynamic: Receipt

    @property
    def rounds(self) -> Int[Array, ""]:
        """How often the receive buffer is filled."""
        return self.static.rounds + self.dynamic.rounds


@dataclass(frozen=True)
class Staged:
    """Tokens of static experts go home at once, those of dynamic experts follow when there is a plan.

    Wave 1 needs neither plan nor copies of weights, and where the copies need no compute (`PeerCopy`), they run beside
    it. With a balancer that is a planner in C++ (`Balancer.native_planner`) and `PeerCopy`, so does the planner: see
    `ops/plan_and_copy.py`. That is so in the compiled program; on a CPU nothing overlaps. A balancer whose experts are
    all dynamic makes wave 1 empty, and then this is `Direct`.

    Deviates from the paper: its phase 1 brings all tokens home, and phase 2 those of moved experts from there to their
    new rank. Here tokens of dynamic experts travel once, from their source to the rank that serves them. A row that is
    served away from home then crosses once instead of twice, and no rank holds rows of others that it does not serve;
    in return, rows of dynamic experts leave their source only when the plan is there.

    Both waves use the same receive buffer, one after the other, so each takes at least a round if it has rows.

    Args:
        headroom: of `Direct`, for each wave.
    """

    headroom: float = 1.05

    def __post_init__(self) -> None:
        Direct(self.headroom)  # refuses what is out of range

    @property
    def direct(self) -> Direct:
        """How the copies of one wave travel."""
        return Direct(self.headroom)

    def address_static(
        self, experts: Int[Array, "T K"], counts: Counts, dynamic: Dynamic, topology: Topology
    ) -> Receipt:
        """Decides for every static copy of this rank where it goes, without a plan.

        Args:
            experts: expert of each copy, `NO_EXPERT` for one that goes nowhere.
            counts: `[R, E]`, the load of all ranks.
            dynamic: equal on all ranks.
            topology: its expert axes.
        """
        counts = jnp.where(dynamic[None], 0, counts)
        return self.direct.address(_only(experts, ~dynamic), counts, plain_plan(counts, topology), topology)

    def address(
        self,
        experts: Int[Array, "T K"],
        counts: Counts,
        dynamic: Dynamic,
        plan: Plan,
        static: Receipt,
        topology: Topology,
    ) -> Waves:
        """Decides where the other copies go.

        Args:
            experts: see `address_static`, likewise `counts` and `dynamic`.
            counts: see above.
            dynamic: see above.
            plan: legal for `counts`, and with all static experts at home.
            static: of `address_static`.
            topology: its expert axes.
        """
        of_dynamic = jnp.where(dynamic[None], counts, 0)
        moving = replace(plan, quota=jnp.where(dynamic[:, None], plan.quota, 0))
        receipt = self.direct.address(_only(experts, dynamic), of_dynamic, moving, topology)
        # Of every rank: static copies stand in front.
        front = (counts - of_dynamic).sum(1, dtype=jnp.int32)
        flat = experts.reshape(-1)
        of_copy = dynamic[jnp.maximum(flat, 0)]
        nowhere = flat < 0
        end = static.sent.sum(dtype=jnp.int32)
        last = end + receipt.sent.sum(dtype=jnp.int32) + nowhere.cumsum(dtype=jnp.int32) - 1
        place = jnp.where(nowhere, last, jnp.where(of_copy, end + receipt.place, static.place))
        order = jnp.zeros_like(place).at[place].set(iota(place.size))
        shifted = replace(
            receipt,
            order=order,
            place=place,
            first_sent=receipt.first_sent + end,
            first_at_source=receipt.first_at_source + front,
        )
        return Waves(static, shifted)


def _only(experts: Int[Array, "T K"], wanted: Dynamic) -> Int[Array, "T K"]:
    """The expert of each copy; `NO_EXPERT` for those of other experts."""
    return jnp.where(wanted[jnp.maximum(experts, 0)], experts, NO_EXPERT)
