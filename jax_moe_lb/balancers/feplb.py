"""FEPLB (arXiv 2604.19654): the busiest experts of overloaded ranks move, whole, to idle ranks of their domain."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Bool

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, Counts, State, iota
from jax_moe_lb.planners.base import NativePlanner, edit
from jax_moe_lb.planners.feplb import check_options, dynamic_experts, feplb_planner


@dataclass(frozen=True)
class FEPLB(Balancer):
    """Moves whole experts from the busiest rank of a domain to the idlest one, as long as that lowers the larger load.

    Use it with `PeerCopy` and `TwoPhase`, as `feplb()` does, where copy engines can move weights beside products and a
    rank has several experts, of which a few busy ones make it slow. One expert that makes its rank hot alone cannot
    move.

    The dynamic experts of a rank are the `num_dynamic` that it serves most of in this microbatch; the others are static
    and never move. The rank with the highest load gives its busiest dynamic expert to the rank with the lowest load
    that can take it: weights go into a replica slot, and all of its tokens go there. The home slot stays.

    The paper gives the order of moves, and leaves four rules open. Those here were selected on its own results, by how
    much token stragglers fall, out of many readings (`benchmarks/bench_feplb_readings.py`). None is nearest to them on
    all loads that are in line with the paper; `docs/systems/feplb.md` has the numbers.

    - Which experts are dynamic: the busiest of this microbatch.
    - Which moves are useful: those after which the taker has less than the giver had before.
    - What comes after a move that is not useful: nothing, the domain is done. With `skip` a smaller dynamic expert of
      the same rank is tried instead: that balances better, and better than published.
    - The threshold: none, `tau=1`. One of about 2000 token copies has the paper's trend, less on fewer ranks.

    After another balancer (`Chain`), only what homes serve moves, and replicas that exist keep their slots and quota.

    Args:
        num_dynamic: how many experts of each rank are dynamic; 4 by default, as in the paper, which studies 2, 4 and 8.
        max_num_dyn: how many experts a rank takes at most; the plan's empty slots limit it too. 8, the default, is the
            paper's.
        tau: an expert of fewer tokens than this does not move. 1, the default, lets any move and levels best; the paper
            does not say.
        skip: whether a smaller dynamic expert of the giver moves where the busiest cannot.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import FEPLB
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.zeros((4, 12), np.int32)
        >>> counts[0] = 6, 4, 3, 4, 1, 0, 2, 1, 0, 1, 1, 0
        >>> topology = Topology.flat(num_ranks=4)
        >>> plan, _ = FEPLB().rebalance(counts, plain_plan(counts, topology, slots=4), topology, ())
        >>> print(load(plan))  # of 13, 5, 3 and 2
        [7 5 4 7]
    """

    num_dynamic: int = 4
    max_num_dyn: int = 8
    tau: int = 1
    skip: bool = False

    def __post_init__(self) -> None:
        check_options(self.num_dynamic, self.max_num_dyn, self.tau)

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Makes one plan for all domains, each of which is planned for itself; see `Balancer.rebalance`."""
        del counts, topology
        placement, quota = edit(self.native_planner(plan.domain), plan.placement, plan.quota)
        return replace(plan, placement=placement, quota=quota), state

    def dynamic(self, plan: Plan) -> Bool[AnyArray, "E"]:
        """Names the busiest experts of each rank, and those that replicas serve already; see `Balancer.dynamic`."""
        expert = iota(plan.num_experts)
        served = jnp.asarray(plan.quota)[expert, expert // plan.num_home]
        busiest = dynamic_experts(served.reshape(plan.num_ranks, -1), self.num_dynamic).reshape(-1)
        # An expert with a replica has tokens elsewhere, so the static wave, which knows homes alone, cannot serve it.
        return busiest | (jnp.asarray(plan.quota).sum(1, dtype=jnp.int32) > served)

    def native_planner(self, domain: int) -> NativePlanner:
        """Returns the planner that `rebalance` applies, for domains of so many ranks."""
        return feplb_planner(domain, self.num_dynamic, self.max_num_dyn, self.tau, self.skip)
