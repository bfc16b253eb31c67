"""The simulator runs user-defined strategies, through the properties they provide."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from jax_moe_lb import System
from jax_moe_lb.balancers import Greedy, HybridEP, Plain
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, ModelShape, Step, simulate, skewed_counts
from jax_moe_lb.sim.planner_times import needs_counts
from jax_moe_lb.transport import Direct, Gather, PeerCopy, Relay, TransportCost

SHAPE = ModelShape(layers=2, hidden=256, inner=512, experts=16, per_token=2, tokens=512, pre_expert_s=1e-4)
LEVELS = Links("node", 2, 25e9, links=4), Links("gpu", 4, 400e9)
CLUSTER = Cluster(LEVELS, AnalyticGemm(1e13, 0.0, 0.0), copy_bytes_per_s=100e9, planner_s=1e-3)
COUNTS = skewed_counts(SHAPE, 8, 2.0, 2, 0)
ONE_PASS = Step(backward=False)


@dataclass(frozen=True)
class Fixed(Plain):
    """Balancer by which the next rank of the domain always takes part of a rank's first expert, for any load."""

    dtype: str = "int32"

    def rebalance(self, counts, plan, topology, state):
        rank = np.arange(plan.num_ranks)
        helper = rank // plan.domain * plan.domain + (rank + 1) % plan.domain
        placement, quota = plan.placement.copy(), plan.quota.copy()
        expert = placement[:, 0]
        placement[helper, plan.num_home] = expert
        half = quota[expert, rank] // 2
        quota[expert, rank] -= half
        quota[expert, helper] += half
        return replace(plan, placement=placement.astype(self.dtype), quota=quota.astype(self.dtype)), state


@dataclass(frozen=True)
class ByEngine(Gather):
    """Gather with copy engines."""

    @property
    def uses_copy_engines(self):
        return True


@dataclass(frozen=True)
class ByTheFirst(Direct):
    """Dispatch sending rows for another node through the first rank of the sender's node."""

    def cost(self):
        return ByTheFirstCost(self.buffers)


class ByTheFirstCost(TransportCost):
    def hops(self, wave, topology):
        members, rows = topology.ranks_per_node, wave.copies
        node = np.arange(len(rows)) // members
        far = np.where(node[:, None] != node[None], rows, 0)
        there, onward = rows - far, np.zeros_like(rows)
        np.add.at(there, (np.arange(len(rows)), node * members), far.sum(1))
        np.add.at(onward, node * members, far)
        return there, onward


def test_a_balancer_says_whether_a_planner_runs():
    """Without counts, weights are sent with the layer, without waiting for a planner."""
    fixed = simulate(System(Fixed(), replica_slots=1), SHAPE, CLUSTER, COUNTS, step=ONE_PASS)
    greedy = simulate(System(Greedy(), replica_slots=1), SHAPE, CLUSTER, COUNTS, step=ONE_PASS)
    assert "plan" not in fixed.stages
    assert greedy.stages["plan"].busy_s == pytest.approx(2e-3)
    first = next(task for task in fixed.timeline.tasks if task.stage == "weights")
    assert first.start.max() == 0
    later = next(task for task in greedy.timeline.tasks if task.stage == "weights")
    assert later.start.max() >= 1e-3


@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint64"])
def test_a_plan_may_have_another_integer_dtype(unchecked, dtype):
    given, int32 = (System(Fixed(one), replica_slots=1) for one in (dtype, "int32"))
    assert simulate(given, SHAPE, CLUSTER, COUNTS).step_s == simulate(int32, SHAPE, CLUSTER, COUNTS).step_s


def test_a_replication_says_whether_it_uses_copy_engines():
    times = {}
    for replicate in (Gather(), ByEngine()):
        report = simulate(System(Fixed(), replicate, replica_slots=1), SHAPE, CLUSTER, COUNTS, step=ONE_PASS)
        weights = [task for task in report.timeline.tasks if task.stage == "weights"]
        assert all(("copy" in task.streams) == replicate.uses_copy_engines for task in weights)
        times[type(replicate)] = report.stages["weights"].busy_s
    # The engines are a quarter as fast as the links of the domain.
    assert times[ByEngine] == pytest.approx(4 * times[Gather], rel=0.05)


def test_a_dispatch_says_which_exchanges_its_rows_take():
    straight, relayed = (
        simulate(System(Plain(), dispatch=dispatch), SHAPE, CLUSTER, COUNTS, step=ONE_PASS)
        for dispatch in (Direct(), ByTheFirst())
    )
    tasks = [task for task in relayed.timeline.tasks if task.stage == "dispatch"]
    assert len(tasks) == 2 * len([task for task in straight.timeline.tasks if task.stage == "dispatch"])
    # All rows leaving a node use one of its four links, so the exchange takes at least four times the mean.
    assert relayed.stages["dispatch"].busy_s > straight.stages["dispatch"].busy_s
    assert relayed.level_bytes["node"] == straight.level_bytes["node"]


def test_a_dispatch_says_what_is_served_together():
    @dataclass(frozen=True)
    class Twice(Direct):
        """Dispatch with even tokens in the first wave, and the others in the second."""

        def cost(self):
            return TwiceCost(self.buffers)

    class TwiceCost(TransportCost):
        def waves(self, counts, start, plan, balancer):
            first, served = counts // 2, plan.quota // 2
            return [(first, replace(plan, quota=served)), (counts - first, replace(plan, quota=plan.quota - served))]

    even = COUNTS // 2 * 2
    report = simulate(System(Plain(), dispatch=Twice()), SHAPE, CLUSTER, even, step=ONE_PASS)
    assert len([task for task in report.timeline.tasks if task.stage == "experts"]) == 2 * SHAPE.layers


def test_every_strategy_of_the_library_says_it_of_itself():
    assert [needs_counts(one) for one in (Plain(), HybridEP(), Greedy())] == [False, False, True]
    assert [one.uses_copy_engines for one in (Gather(), PeerCopy(), Relay())] == [False, True, True]
