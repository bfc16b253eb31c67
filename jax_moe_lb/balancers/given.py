"""Plans made before the step, for routing that is known: `plan_all` makes them and `Given` follows them."""

from dataclasses import dataclass, replace

import jax
import numpy as np
from jaxtyping import Bool, Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.balancers.eplb import checked, fill
from jax_moe_lb.core.checks import Count, checked_fields
from jax_moe_lb.core.plan import Plan, plain_plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, Counts, State, host_iota, namespace, pytree
from jax_moe_lb.planners.eplb import holds, round_robin


def plan_all(balancer: Balancer, counts: Int[np.ndarray, "P R E"], topology: Topology, slots: int) -> Plan:
    """Return the plans of several microbatches, made on the host one after another.

    Args:
        balancer: balancer that plans; its state goes from each microbatch to the next.
        counts: `[P, R, E]` int32, the token copies by source rank and expert in `P` microbatches.
        topology: topology of the group.
        slots: `S`, slots per rank.

    Returns:
        A plan with one leading dimension `P`.

    Raises:
        ValueError: `counts` has no microbatch.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import Greedy, plan_all
        >>> counts = np.array([[[8, 2], [0, 0]], [[2, 8], [0, 2]]], np.int32)
        >>> plans = plan_all(Greedy(), counts, Topology.flat(num_ranks=2), slots=2)
        >>> plans.quota.shape, plans.quota.sum(1).tolist()
        ((2, 2, 2), [[5, 5], [6, 6]])
    """
    if not len(counts):
        raise ValueError(f"counts has shape {counts.shape}; expected at least one microbatch")
    state, plans = balancer.init(counts.shape[1:]), []
    for one in counts:
        plan, state = balancer.rebalance(one, plain_plan(one, topology, slots), topology, state)
        plans.append(plan)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *plans)


@pytree
class _State:
    quota: Int[AnyArray, "*D P E R"]  # the quotas of the plans
    step: Int[AnyArray, "*D"]  # number of the next plan


@dataclass(frozen=True)
@checked_fields
class Given(Balancer):
    """Plans of known routing, made before the step.

    Use it if the routing of all microbatches is known, as in reinforcement learning that replays the routing of its
    rollouts. The placement does not depend on the counts of the microbatch, so no planner runs in the layer, and
    weights can be transferred before the router. Make the plans by any balancer with `plan_all`, and pass
    `follow(plans)` as the state of the layer.

    Each call follows the next plan, and the first one again after the last. An expert whose tokens are not those of
    the plan, or whose replicas find no slot, splits its tokens evenly over the copies. Replicas of another balancer
    (`Chain`) are kept and count as copies; its quotas are replaced. Relays and rails of the plans are not followed.

    Args:
        number: `P`, number of plans.

    Raises:
        ValueError: `number` is not positive.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import Exact, Given, plan_all
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.array([[[8, 2], [0, 0]], [[2, 8], [0, 2]]], np.int32)
        >>> topology, balancer = Topology.flat(num_ranks=2), Given(number=2)
        >>> state = balancer.follow(plan_all(Exact(eps=0.0, cost=None), counts, topology, slots=2))
        >>> for one in counts:
        ...     plan, state = balancer.rebalance(one, plain_plan(one, topology, slots=2), topology, state)
        ...     print(load(plan))
        [5 5]
        [6 6]

    Reference:
        ForeMoE, arXiv 2606.11867.
    """

    number: Count

    def init(self, counts_shape: tuple[int, int]) -> _State:
        """Return the state of plain plans, which have no replicas."""
        num_ranks, num_experts = counts_shape
        return _State(np.zeros((self.number, num_experts, num_ranks), np.int32), np.zeros((), np.int32))

    def follow(self, plans: Plan) -> _State:
        """Return the state that follows these plans, from the first on.

        Args:
            plans: plans of `number` microbatches with one leading dimension, such as the result of `plan_all`.

        Raises:
            ValueError: `plans` has another number of plans.
        """
        if plans.quota.ndim != 3 or len(plans.quota) != self.number:
            raise ValueError(f"plans.quota has shape {plans.quota.shape}; expected [P, E, R] with P = {self.number}")
        return _State(namespace(plans.quota).asarray(plans.quota, np.int32), np.zeros((), np.int32))

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, _State]:
        """Return the next plan; see `Balancer.rebalance`.

        Raises:
            ValueError: the state does not match the shapes or dtypes of `init`.
        """
        del topology
        state = checked(state, self.init(counts.shape), counts)
        tokens = counts.sum(0, dtype=np.int32)
        quota = state.quota[state.step % self.number]
        placement = fill(plan.placement, _replicated(quota), plan.domain)
        followed = (quota.sum(1, dtype=np.int32) == tokens) & ((quota == 0) | holds(placement, len(quota)).T).all(1)
        xp = namespace(tokens)
        quota = xp.where(followed[:, None], quota, round_robin(tokens, placement))
        step = xp.asarray((state.step + 1) % self.number, np.int32)
        return replace(plan, placement=placement, quota=quota), _State(state.quota, step)


def _replicated(quota: Int[AnyArray, "E R"]) -> Bool[AnyArray, "R E"]:
    """Return whether each rank other than the home serves tokens of each expert."""
    num_experts, num_ranks = quota.shape
    home = host_iota(num_experts) // (num_experts // num_ranks)
    return (quota > 0).T & (home[None] != host_iota(num_ranks)[:, None])
