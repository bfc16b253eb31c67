"""Legal plans of balancers on flat topologies."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe_lb import Topology
from jax_moe_lb.core import check_plan, plain_plan


def plan_for(balancer, counts, slots=None, domain=None):
    topology = Topology.flat(len(counts), domain)
    start = plain_plan(counts, topology, slots)
    plan, _ = balancer.rebalance(counts, start, topology, balancer.init(counts.shape))
    check_plan(plan, counts)
    return plan


def replay(balancer, steps, domain=None, slots=None):
    """Return plans of consecutive counts, with one compilation."""
    topology = Topology.flat(len(steps[0]), domain)

    @jax.jit
    def step(counts, state):
        return balancer.rebalance(counts, plain_plan(counts, topology, slots), topology, state)

    state, plans = jax.device_put(balancer.init(steps[0].shape)), []
    for counts in steps:
        plan, state = step(jnp.asarray(counts), state)
        check_plan(plan, counts)
        plans.append(jax.tree.map(np.asarray, plan))
    assert step._cache_size() == 1
    return plans
