"""FEPLB (arXiv 2604.19654): whole busy experts of overloaded ranks move to idle ranks of the domain."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Bool

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.native_planner import NativePlanner
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, Counts, State, iota
from jax_moe_lb.planners.base import edit
from jax_moe_lb.planners.feplb import check_options, dynamic_experts, feplb_planner


@dataclass(frozen=True)
@checked_fields
class FEPLB(Balancer):
    """FEPLB: repeated moves of a whole expert from the busiest to the least loaded rank of a domain.

    Use it with `PeerCopy` and `TwoPhase`, as `feplb()` does, if copy engines can move weights during matrix products.
    It suits ranks of several experts, slowed down by a few busy ones. A rank overloaded by a single expert cannot be
    relieved.

    The dynamic experts of a rank are its `num_dynamic` busiest in this microbatch; all others are static and never
    move. The rank with the highest load gives its busiest dynamic expert to the eligible rank with the lowest load. The
    weights are copied into a replica slot, which receives all tokens of the expert. The home slot is kept.

    The paper gives the order of moves and leaves four rules open. The rules below were selected among many readings by
    the reduction of token stragglers in its results (`benchmarks/papers/feplb_readings.py`). No reading is nearest to
    the paper on all loads consistent with it; `docs/systems/feplb.md` has the numbers.

    - Dynamic experts: the busiest of this microbatch.
    - Useful moves: the taker's load after the move is below the giver's load before it.
    - After a useless move: the domain is finished. With `skip`, a smaller dynamic expert of the same rank is
      tried, which balances better than the published results.
    - Threshold: none, `tau=1`. A threshold of about 2000 token copies follows the paper's trend, less closely on fewer
      ranks.

    After another balancer (`Chain`), only tokens served at home move; existing replicas keep their slots and quota.

    Args:
        num_dynamic: dynamic experts per rank; 4 (default) as in the paper, which studies 2, 4 and 8.
        max_num_dyn: maximum number of experts taken by a rank, also limited by empty slots; 8 (default) as in the
            paper.
        tau: minimum tokens of a moved expert; 1 (default) allows all moves and balances best. The paper gives no value.
        skip: if True, move a smaller dynamic expert if the busiest cannot move; False by default.

    Raises:
        ValueError: an option is out of range.

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

    Reference:
        FEPLB, arXiv 2604.19654.
    """

    num_dynamic: int = 4
    max_num_dyn: int = 8
    tau: int = 1
    skip: bool = False

    def __post_init__(self) -> None:
        check_options(self.num_dynamic, self.max_num_dyn, self.tau)

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Plan the domains separately; see `Balancer.rebalance`."""
        del counts, topology
        placement, quota = edit(self.native_planner(plan.domain), plan.placement, plan.quota)
        return replace(plan, placement=placement, quota=quota), state

    def dynamic(self, plan: Plan) -> Bool[AnyArray, "E"]:
        """Return the busiest experts per rank and all experts with replicas; see `Balancer.dynamic`."""
        expert = iota(plan.num_experts)
        served = jnp.asarray(plan.quota)[expert, expert // plan.num_home]
        busiest = dynamic_experts(served.reshape(plan.num_ranks, -1), self.num_dynamic).reshape(-1)
        # Tokens of a replicated expert are also served elsewhere, but a static expert is served at home only.
        return busiest | (jnp.asarray(plan.quota).sum(1, dtype=jnp.int32) > served)

    def busiest_moved(self, num_home: int) -> int | None:
        """Return the number of dynamic experts of a rank; `None` with `skip`. See `Balancer.busiest_moved`."""
        return None if self.skip else min(self.num_dynamic, num_home)

    def native_planner(self, domain: int) -> NativePlanner:
        """Return the planner applied by `rebalance`, for `domain` ranks per domain."""
        return feplb_planner(domain, self.num_dynamic, self.max_num_dyn, self.tau, self.skip)
