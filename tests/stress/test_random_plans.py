"""Random plans are legal; `python -m benchmarks.reliability plans` makes more of them."""

import numpy as np

from tests.balancers.fields import draw_balancer, kinds, made, names_of
from tests.stress.plans import STEPS, random_plans

NUMBER = 200


def test_random_plans_are_legal():
    cases = list(random_plans(1, NUMBER))
    assert len(cases) == NUMBER // STEPS * STEPS
    assert [case.fault for case in cases if case.fault] == []


def test_all_balancers_and_fields_take_part():
    drawn = [draw_balancer(np.random.default_rng(seed)) for seed in range(500)]
    assert {type(balancer) for balancer in drawn} == set(kinds())
    unchanged = {(kind, name) for kind in kinds() for name in names_of(kind)}
    for balancer in drawn:
        kind, usual = type(balancer), made(type(balancer))
        unchanged -= {(kind, name) for name in names_of(kind) if getattr(balancer, name) != getattr(usual, name)}
    assert unchanged == set()
