import itertools

import numpy as np
import pytest

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Chain, HostCallback, Plan, Topology
from jax_moe_lb.balancers import EPLBPlus
from jax_moe_lb.contrib import LPLB
from jax_moe_lb.contrib.lplb import spread
from jax_moe_lb.core import check_plan, imbalance, load, plain_plan, traffic
from tests.balancers.plans import replay
from tests.layer_cases import BY_NAME
from tests.planners.planner_cases import draw_placement, draw_tokens


def spread_over(tokens, placement, domain):
    """Return the checked quota of `spread`."""
    counts = np.zeros((len(placement), len(tokens)), np.int32)
    counts[0] = tokens
    plan = spread(
        counts,
        Plan(placement, np.zeros((len(tokens), len(placement)), np.int32), domain=domain),
        Topology.flat(len(placement)),
    )
    check_plan(plan, counts)
    return plan.quota


def least_maximum(tokens, placement):
    """Return the minimum possible maximum load of one domain, by enumerating subsets of ranks."""
    holders = [set(np.flatnonzero((placement == expert).any(1)).tolist()) for expert in range(len(tokens))]
    best = 0
    for size in range(1, len(placement) + 1):
        for ranks in itertools.combinations(range(len(placement)), size):
            stuck = sum(int(n) for n, held in zip(tokens, holders, strict=True) if held <= set(ranks))
            best = max(best, -(-stuck // size))
    return best


def test_a_chain_of_ranks_hands_tokens_on():
    """Rank 0 has a replica only on rank 1, which frees capacity by passing its own tokens on to rank 2."""
    placement = np.array([[0, -1], [1, 0], [2, 1]], np.int32)
    quota = spread_over(np.array([90, 30, 0]), placement, 3)
    assert quota.tolist() == [[40, 50, 0], [0, 0, 30], [0, 0, 0]] or quota.sum(0).tolist() == [45, 45, 30]
    assert quota.sum(0).max() == 45


@pytest.mark.parametrize("shape", [(1, 2, 3, 1), (2, 1, 2, 2), (4, 2, 4, 4), (5, 1, 3, 5), (6, 2, 4, 3)], ids=str)
@pytest.mark.parametrize("scale", [3, 200, 2**26])
def test_the_largest_load_is_the_least_possible(shape, scale):
    num_ranks, num_home, slots, domain = shape
    rng = np.random.default_rng(scale)
    for _ in range(8):
        placement = draw_placement(rng, num_ranks, num_home, slots, domain)
        tokens = draw_tokens(rng, num_ranks * num_home, scale)
        loads = spread_over(tokens, placement, domain).sum(0)
        for first in range(0, num_ranks, domain):
            ranks = slice(first, first + domain)
            experts = slice(first * num_home, (first + domain) * num_home)
            local = np.where(placement[ranks] < 0, -1, placement[ranks] - first * num_home)
            assert loads[ranks].max() == least_maximum(tokens[experts], local)


def test_no_token_moves_without_need():
    placement = np.array([[0, 1], [1, 0]], np.int32)
    assert spread_over(np.array([10, 8]), placement, 2).tolist() == [[9, 1], [0, 8]]


@pytest.mark.slow
def test_an_expert_has_one_replica_at_most():
    for domain, slots in ((8, 5), (4, 4), (2, 6), (1, 6), (8, 9)):
        plan = replay(LPLB(), [WORKLOADS[1].counts(0, 8, 100, 32, 2)], domain, slots)[0]
        held = plan.placement[:, 4:]
        assert np.bincount(held[held >= 0], minlength=32).max(initial=0) <= 1
        assert (held >= 0).sum() == 8 * min(slots - 4, 4, domain - 1)


def test_the_graph_is_fixed_and_its_experts_follow_history():
    """Slot k of rank r copies from rank r + 1, r + 2 and r + 4: its k-th heaviest expert of earlier steps."""
    steps = [WORKLOADS[seed].counts(seed, 8, 200, 32, 2) for seed in (1, 2, 3, 1, 2)]
    plans = replay(LPLB(every=2), steps, slots=7)
    for number, plan in enumerate(plans):
        sources = (np.arange(8)[:, None] + [1, 2, 4]) % 8
        np.testing.assert_array_equal(plan.placement[:, 4:] // 4, sources)
        last = number // 2 * 2
        tokens = sum(counts.sum(0) for counts in steps[last - 2 : last]) // 2 if last else np.zeros(32, int)
        order = np.argsort(-tokens.reshape(8, 4), axis=1, kind="stable") + 4 * np.arange(8)[:, None]
        np.testing.assert_array_equal(plan.placement[:, 4:], order[sources, np.arange(3)])


def test_distances_can_be_chosen():
    counts = WORKLOADS[1].counts(0, 4, 50, 16, 2)
    plan = replay(LPLB(distances=(3, 4, 1)), [counts], slots=8)[0]
    assert plan.placement[:, 4:].tolist() == [[12, -1, 6, -1], [0, -1, 10, -1], [4, -1, 14, -1], [8, -1, 2, -1]]


@pytest.mark.slow
def test_replicas_of_another_balancer_are_used():
    """More of them than LPLB would make."""
    counts = np.zeros((8, 8), np.int32)
    counts[:, 3] = 100
    assert load(replay(LPLB(), [counts], slots=2)[0]).max() == 400
    plan = replay(Chain((EPLBPlus(), LPLB())), [counts], slots=2)[0]
    assert load(plan).tolist() == [100] * 8
    alone = HostCallback(spread).rebalance(counts, plan, Topology.flat(8), ())[0]
    np.testing.assert_array_equal(alone.quota, plan.quota)


def test_it_balances_a_mild_skew_and_not_one_hot_expert():
    topology = Topology.flat(8)
    for name, before, after in (("lognormal", 1.69, 1.0), ("one_hot", 2.58, 1.37)):
        counts = BY_NAME[name].counts(0, 8, 512, 32, 4)
        plan = replay(LPLB(every=1), [counts, counts], slots=6)[1]
        assert traffic(plan, counts).replicas == 16
        assert abs(imbalance(load(plain_plan(counts, topology))) - before) < 0.01
        assert abs(imbalance(load(plan)) - after) < 0.01


def test_large_counts():
    counts = np.diag([2**31 - 1, 0, 0]).astype(np.int32)
    assert sorted(load(replay(LPLB(), [counts], slots=2)[0]).tolist()) == [0, 2**30 - 1, 2**30]
