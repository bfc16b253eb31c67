import numpy as np

from benchmarks.plans.load_families import spread
from jax_moe_lb import Plan, Topology
from jax_moe_lb.balancers import UltraEP
from jax_moe_lb.core import check_plan, imbalance, load, plain_plan
from tests.balancers.plans import plan_for as planned

# Rank loads of layer 12, microbatch 684, of the authors' run; the hottest expert of each overloaded rank is recorded,
# and the others are filled in. 8 ranks, 4 home experts, 2 replica slots, 8192 tokens per rank, top-4.
RECORDED = np.array(
    [
        [9000, 6000, 4000, 2941],
        [15000, 16266, 10000, 5564],
        [17263, 9000, 6000, 3094],
        [800, 400, 200, 70],
        [35500, 3000, 1568, 1000],
        [2000, 3000, 33824, 300],
        [38652, 9548, 8000, 5000],
        [9000, 3000, 2000, 1154],
    ],
    np.int32,
)


def plan_for(counts, domain=None, slots=None, **options):
    return planned(UltraEP(**options), counts, slots, domain)


def test_the_recorded_layer():
    assert RECORDED.sum(1).tolist() == [21941, 46830, 35357, 1470, 41068, 39124, 61200, 15154]
    plan = plan_for(spread(RECORDED.reshape(-1), 8), slots=6)
    moved = {(e, r): q for e, row in enumerate(plan.quota.tolist()) for r, q in enumerate(row) if q and e // 4 != r}
    hottest = {rank: rank * 4 + int(RECORDED[rank].argmax()) for rank in range(8)}
    assert moved == {
        (hottest[6], 3): 28104,
        (hottest[1], 7): 13734,
        (hottest[4], 0): 7972,
        (hottest[5], 7): 4208,
        (hottest[5], 3): 1820,
        (hottest[2], 0): 2261,
    }
    # Slots are filled in the order of replica creation.
    assert plan.placement[:, 4:].tolist() == [
        [hottest[4], hottest[2]], [-1, -1], [-1, -1], [hottest[6], hottest[5]],
        [-1, -1], [-1, -1], [-1, -1], [hottest[1], hottest[5]],
    ]  # fmt: skip
    assert load(plan).tolist() == [32174, 33096, 33096, 31394, *[33096] * 4]
    assert round(RECORDED.sum(1).max() / 32768, 3) == 1.868
    assert round(float(imbalance(load(plan))), 3) == 1.010


def test_all_tokens_to_one_expert():
    plan = plan_for(np.full((4, 1), 16384, np.int32) * (np.arange(4) == 0).astype(np.int32), slots=2)
    assert load(plan).tolist() == [16548, 16548, 16548, 15892]


def test_a_replica_can_be_smaller_than_min_tokens():
    """Algorithm 1 as printed would leave this load unchanged."""
    assert load(plan_for(spread(np.array([130, 70]), 2), slots=2, min_tokens=1024)).tolist() == [101, 99]


def test_replicas_of_another_balancer_keep_their_slot_and_quota():
    counts = spread(np.array([120, 0, 0]), 3)
    start = plain_plan(counts, Topology.flat(3), 3)
    placement, quota = start.placement.copy(), start.quota.copy()
    placement[1, 2], quota[0] = 0, [90, 30, 0]
    plan, _ = UltraEP(eps=0.0, min_tokens=1).rebalance(counts, Plan(placement, quota, domain=3), Topology.flat(3), ())
    check_plan(plan, counts)
    assert plan.placement[1].tolist() == [1, -1, 0]
    assert plan.quota[0].tolist() == [45, 30, 45]
