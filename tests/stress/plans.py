"""Random plans: every balancer on random shapes, loads and histories, on the host."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jax_moe_lb import Topology
from jax_moe_lb.core import check_plan, plain_plan
from tests.balancers.fields import draw_balancer

STEPS = 4
"""Plans of one case, for balancers with a history."""

OF_TOPOLOGY = ("domain_size", "speeds")
"""Fields whose values must fit the topology."""

DENSEST = 2**31 - 1
"""Largest sum of counts."""


class PlanCase(NamedTuple):
    """Result of one plan.

    Args:
        balancer: name of the balancer.
        fault: message of the error; empty if the plan is legal.
    """

    balancer: str
    fault: str


def draw_counts(rng: np.random.Generator, num_ranks: int, num_experts: int) -> np.ndarray:
    """Return counts `[R, E]`: uniform to concentrated on one expert, with idle ranks, up to the largest sum."""
    tokens = int(rng.choice([0, 1, 7, 100, 4096, DENSEST // num_ranks]))
    popularity = rng.dirichlet(np.full(num_experts, rng.choice([0.01, 0.1, 1.0, 100.0])), rng.choice([1, num_ranks]))
    active = rng.random(num_ranks) < rng.choice([0.5, 1.0])
    return rng.multinomial(tokens * active, popularity).astype(np.int32)


def random_plans(seed: int, number: int) -> Iterator[PlanCase]:
    """Plan for random counts and yield whether each plan is legal.

    Args:
        seed: seed of all cases.
        number: number of plans.
    """
    for index in range(number // STEPS):
        rng = np.random.default_rng([seed, index])
        num_ranks = int(rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 32]))
        num_home = int(rng.integers(1, 5))
        domain = int(rng.choice([size for size in range(1, num_ranks + 1) if num_ranks % size == 0]))
        num_experts = num_home * num_ranks
        slots = num_home + int(rng.integers(0, min(4, num_experts - num_home) + 1))
        topology, balancer = Topology.flat(num_ranks, domain), draw_balancer(rng, OF_TOPOLOGY)
        state = balancer.init((num_ranks, num_experts))
        for _ in range(STEPS):
            counts, fault = draw_counts(rng, num_ranks, num_experts), ""
            try:
                plan, state = balancer.rebalance(counts, plain_plan(counts, topology, slots), topology, state)
                check_plan(plan, counts)
            except Exception as error:
                fault = f"case {index}: {type(error).__name__}: {error}"
            yield PlanCase(type(balancer).__name__, fault)
