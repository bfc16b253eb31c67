"""Legal plans of balancers on flat topologies."""

from jax_moe_lb import Topology
from jax_moe_lb.core import check_plan, plain_plan


def plan_for(balancer, counts, slots=None, domain=None):
    topology = Topology.flat(len(counts), domain)
    start = plain_plan(counts, topology, slots)
    plan, _ = balancer.rebalance(counts, start, topology, balancer.init(counts.shape))
    check_plan(plan, counts)
    return plan
