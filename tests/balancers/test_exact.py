import numpy as np
import pytest

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Chain, Plan, Topology
from jax_moe_lb.balancers import Exact, Greedy, UltraEP
from jax_moe_lb.core import imbalance, load, plain_plan, traffic
from tests.balancers.plans import plan_for as planned
from tests.layer_cases import BY_NAME


def plan_for(counts, domain=None, slots=None, balancer=None, **options):
    return planned(balancer or Exact(**options), counts, slots, domain)


def test_the_worked_example_of_its_page():
    counts = np.diag([12, 15, 7, 6]).astype(np.int32)
    plan = plan_for(counts, slots=2, eps=0.0)
    assert plan.placement[:, 1].tolist() == [1, -1, 0, 1]
    assert plan.quota.tolist() == [[9, 0, 3, 0], [1, 10, 0, 4], [0, 0, 7, 0], [0, 0, 0, 6]]
    assert load(plan_for(counts, slots=2, balancer=Greedy())).max() > load(plan).max() == 10


@pytest.mark.parametrize("name", ["zipf", "lognormal", "hot_rank", "one_hot"])
def test_with_two_slots_on_many_ranks_it_reaches_the_mean(name):
    for seed in range(3):
        counts = BY_NAME[name].counts(seed, 32, 512, 64, 4)
        assert load(plan_for(counts, slots=4, eps=0.0)).max() == counts.sum() // 32


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 32, 6), (16, 64, 5), (64, 128, 3)], ids=str)
def test_never_above_the_others_and_within_their_maximum_no_more_replicas(shape):
    """Uses the `eps` that allows the maximum of the other balancer."""
    num_ranks, num_experts, slots = shape
    for workload in WORKLOADS[1:3]:
        counts = workload.counts(0, num_ranks, 512, num_experts, 4)
        best = int(load(plan_for(counts, slots=slots, eps=0.0)).max())
        for other in (Greedy(), UltraEP(min_tokens=16)):
            theirs = plan_for(counts, slots=slots, balancer=other)
            most = int(load(theirs).max())
            assert best <= most
            within = plan_for(counts, slots=slots, eps=(most - best + 0.5) / best)
            assert load(within).max() <= most
            assert traffic(within, counts).replicas <= traffic(theirs, counts).replicas


def test_eps_trades_load_for_replicas():
    counts = WORKLOADS[2].counts(0, 32, 512, 64, 4)
    replicas = []
    for eps in (0.0, 0.01, 0.1):
        plan = plan_for(counts, slots=4, eps=eps)
        assert imbalance(load(plan)) <= 1.001 * (1 + eps)
        replicas.append(int(traffic(plan, counts).replicas))
    assert replicas[0] > replicas[1] > replicas[2]


def test_no_home_rank_exceeds_its_fan_out():
    counts = WORKLOADS[1].counts(0, 16, 512, 64, 4)
    for max_fan_out in (0, 1, 3):
        plan = plan_for(counts, slots=8, max_fan_out=max_fan_out)
        assert traffic(plan, counts).fan_out.max() <= max_fan_out


def test_replicas_go_where_tokens_start():
    rng, gained = np.random.default_rng(0), []
    for _ in range(20):
        tokens = rng.lognormal(6, 1, 32)
        starts = [rng.multinomial(int(n), rng.dirichlet(np.full(8, 0.1))) for n in tokens]
        counts = np.stack(starts, 1).astype(np.int32)
        far, near = (plan_for(counts, slots=8, eps=0.2, localize=localize) for localize in (False, True))
        assert traffic(near, counts).replicas == traffic(far, counts).replicas
        gained.append(int(np.minimum(counts.T, near.quota).sum() - np.minimum(counts.T, far.quota).sum()))
    assert min(gained) >= 0
    assert max(gained) > 0


def test_replicas_of_another_balancer_are_planned_anew():
    counts = WORKLOADS[1].counts(0, 8, 512, 16, 2)
    chained = plan_for(counts, slots=4, balancer=Chain((Greedy(), Exact())))
    alone = plan_for(counts, slots=4)
    np.testing.assert_array_equal(chained.placement, alone.placement)
    np.testing.assert_array_equal(chained.quota, alone.quota)


def test_relays_of_dropped_replicas_are_dropped():
    counts = np.diag([12, 0]).astype(np.int32)
    start = plain_plan(counts, Topology.flat(2), 2)
    relay = np.zeros_like(start.placement)
    plan, _ = Exact().rebalance(counts, Plan(start.placement, start.quota, relay, domain=2), Topology.flat(2), ())
    assert plan.relay is None
