"""The worked example of the page."""

import numpy as np

from jax_moe_lb import Topology
from jax_moe_lb.balancers import Halve
from jax_moe_lb.core import load, plain_plan


def test_half_of_the_first_expert_moves():
    counts = np.array([[6, 1], [2, 1]], np.int32)
    topology = Topology.flat(num_ranks=2)
    plan, _ = Halve().rebalance(counts, plain_plan(counts, topology, slots=2), topology, ())
    assert load(plan).tolist() == [5, 5]
