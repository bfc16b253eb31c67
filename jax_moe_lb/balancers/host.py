"""A balancer out of any NumPy function, which is called on the host in every step."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import numpy as np

from jax_moe_lb._varying import vary_like
from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.legality import check_plan
from jax_moe_lb.plan import Plan
from jax_moe_lb.split import Split
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import Counts, State, namespace

Planner = Callable[[np.ndarray, Plan, Topology], Plan]


@dataclass(frozen=True)
class HostBalancer(Balancer):
    """Plans with a function of yours, through a host callback: it is slow, and the quickest way to try an idea.

    Use it to try a rule before you write it in JAX or C++. Tokens are split as the plan so far says: a planner need not
    carry on its `split`, and cannot choose another.

    Args:
        planner: a pure function of the counts `[R, E]`, the plan so far (both NumPy) and the topology. What it returns
            is checked before it is used.

    Examples:
        >>> from dataclasses import replace
        >>> import numpy as np
        >>> from jax_moe_lb import HostBalancer, Topology, load, plain_plan
        >>> def halve_the_first(counts, plan, topology):
        ...     placement, quota = plan.placement.copy(), plan.quota.copy()
        ...     placement[1, 1] = 0  # the replica slot of rank 1 holds expert 0
        ...     quota[0, :2] = quota[0, 0] - quota[0, 0] // 2, quota[0, 0] // 2
        ...     return replace(plan, placement=placement, quota=quota)
        >>> counts = np.array([[4, 0], [3, 1]], np.int32)
        >>> topology = Topology.flat(num_ranks=2)
        >>> plan = plain_plan(counts, topology, slots=2)
        >>> plan, _ = HostBalancer(halve_the_first).rebalance(counts, plan, topology, ())
        >>> print(load(plan))
        [4 4]
    """

    planner: Planner

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Calls the planner, and checks its plan; see `Balancer.rebalance`.

        Raises:
            jax.errors.JaxRuntimeError: the planner failed or its plan is illegal; the message ends with the reason, in
            the
                words of `check_plan`. With NumPy arrays it is the planner's own error.
        """

        def call(counts: Counts, plan: Plan) -> Plan:
            counts, plan = jax.tree.map(np.asarray, (counts, plan))
            answer = self.planner(counts, plan, topology)
            if not isinstance(answer, Plan):
                raise ValueError(f"planner returned {type(answer).__name__}; expected a Plan")
            # The receipt of a microbatch is made with the static part of the plan, which a callback cannot change.
            if answer.split not in (Split(), plan.split):
                raise ValueError(f"planner returned a plan with {answer.split}; expected {plan.split}, as it was given")
            answer = replace(answer, split=plan.split)
            check_plan(answer, counts)
            return jax.tree.map(_same_type, answer, plan)

        if namespace(counts) is np:
            return call(counts, plan), state
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), plan)
        answer = jax.pure_callback(call, shapes, counts, plan, vmap_method="sequential")
        # A callback's result carries no manual axes; counts carry the ones that it depends on.
        return vary_like(answer, counts), state


def _same_type(answer: np.ndarray, before: np.ndarray) -> np.ndarray:
    if answer.shape != before.shape:
        raise ValueError(f"planner returned an array of shape {answer.shape}; expected {before.shape}, as it was given")
    return np.asarray(answer, before.dtype)
