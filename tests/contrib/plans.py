"""Legal plans of balancers on flat topologies."""

from jax_moe_lb import Topology
from jax_moe_lb.core import check_plan, plain_plan


def plan_for(balancer, counts, slots, domain=None):
    topology = Topology.flat(len(counts), domain)
    plan, _ = balancer.rebalance(counts, plain_plan(counts, topology, slots), topology, ())
    check_plan(plan, counts)
    return plan
