"""CRAFT's budget: slots go to the layers where they lower the maximum load most."""

import itertools

import numpy as np
import pytest

from jax_moe_lb import Topology
from jax_moe_lb.balancers import Exact, Plain
from jax_moe_lb.contrib import slots_by_layer
from jax_moe_lb.core import load, plain_plan

TOPOLOGY = Topology.flat(4)
LAYERS = np.array([np.diag([9, 9, 9, 9]), np.diag([30, 2, 2, 2]), np.diag([12, 8, 8, 8])], np.int32)


def max_load(counts, slots):
    plan, _ = Exact(eps=0.0).rebalance(counts, plain_plan(counts, TOPOLOGY, slots), TOPOLOGY, ())
    return int(load(plan).max())


def test_slots_go_where_they_gain_and_no_further():
    # One slot lowers the maxima of the second and third layer to the mean; the first is balanced.
    assert slots_by_layer(Exact(eps=0.0), LAYERS, TOPOLOGY, budget=1, most=2) == (0, 1, 0)
    assert slots_by_layer(Exact(eps=0.0), LAYERS, TOPOLOGY, budget=9, most=2) == (0, 1, 1)
    assert slots_by_layer(Exact(eps=0.0), LAYERS, TOPOLOGY, budget=9, most=0) == (0, 0, 0)
    assert slots_by_layer(Plain(), LAYERS, TOPOLOGY, budget=9, most=2) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_no_other_split_of_the_budget_is_much_better(seed):
    """A gain that needs several slots is taken; the sum of maximum loads is within 2 % of the best of all splits."""
    rng = np.random.default_rng(seed)
    heat = rng.lognormal(0, rng.choice([0.3, 1.0, 2.0], 4)[:, None, None], (4, 1, 8))
    counts = np.stack([rng.multinomial(200, one[0] / one.sum(), 4) for one in heat]).astype(np.int32)
    most = 3
    loads = [[max_load(one, 2 + slots) for slots in range(most + 1)] for one in counts]

    def total(split):
        return sum(loads[layer][slots] for layer, slots in enumerate(split))

    for budget in (1, 3, 5):
        found = slots_by_layer(Exact(eps=0.0), counts, TOPOLOGY, budget, most)
        assert sum(found) <= budget
        best = min(total(s) for s in itertools.product(range(most + 1), repeat=4) if sum(s) <= budget)
        assert total(found) <= 1.02 * best


@pytest.mark.parametrize(("options", "message"), [((-1, 1), "budget is -1"), ((1, 4), "most is 4; .* at most 3")])
def test_bad_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        slots_by_layer(Exact(), LAYERS, TOPOLOGY, *options)
