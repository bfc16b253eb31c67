"""Random plans are legal; `python -m benchmarks.bench_reliability plans` makes more of them."""

import inspect

import numpy as np
import pytest

from jax_moe_lb import Balancer, balancers, contrib
from jax_moe_lb.balancers import HostCallback
from tests.stress.plans import STEPS, draw_balancer, random_plans

NUMBER = 200


def test_random_plans_are_legal():
    cases = list(random_plans(1, NUMBER))
    assert len(cases) == NUMBER // STEPS * STEPS
    assert [case.fault for case in cases if case.fault] == []


@pytest.mark.slow
def test_all_balancers_take_part():
    public = [getattr(room, name) for room in (balancers, contrib) for name in room.__all__]
    classes = {kind for kind in public if inspect.isclass(kind) and issubclass(kind, Balancer)}
    drawn = {type(draw_balancer(np.random.default_rng(seed), 2)) for seed in range(300)}
    # The planner of a HostCallback is the user's.
    assert drawn == {kind for kind in classes if not inspect.isabstract(kind)} - {HostCallback}
