"""Every compared balancer has a measured planning time; mixes of recordings keep their tokens."""

import numpy as np

from benchmarks.plans import recorded
from benchmarks.plans.balancers import SYSTEMS
from benchmarks.plans.times import PLANNERS
from jax_moe_lb.sim.planner_times import place_of, planner_times


def test_every_compared_balancer_has_a_planning_time():
    timed = {(row.planner, row.place) for row in planner_times()}
    balancers = [system.balancer for name, system in SYSTEMS.items() if name != "plain"]
    assert {(type(one).__name__, place_of(one)) for one in balancers} <= timed
    assert {planner for planner, _ in timed} == {type(one).__name__ for one in PLANNERS}


def test_every_rank_serves_a_mix_of_the_recordings():
    first, second = np.zeros((2, 3, 8), np.int32)
    first[:, :4], second[:, 4:] = 5, 5
    counts = recorded.mixed({"first": first, "second": second}, num_ranks=4, num_steps=3, copies=100)
    assert counts.shape == (3, 2, 4, 8)
    assert (counts.sum(3) == 100).all()
    # Both layers of a rank have one mix; ranks and steps have others.
    of_first = counts[..., :4].sum(3) / 100
    assert np.abs(of_first[:, 0] - of_first[:, 1]).max() < 0.2
    assert np.ptp(of_first.mean(1)) > 0.2
