import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.papers.feplb import fastermoe, plain, reduction
from benchmarks.papers.stragglers import CASES, counts
from jax_moe_lb import Topology
from jax_moe_lb.balancers import FasterMoE, LayerCost
from jax_moe_lb.core import Level, check_plan, nearest_first, plain_plan


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.num_ranks} ranks")
def test_stragglers_fall_about_as_far_as_published(case):
    """By 55, 47 and 39 %, as measured by FEPLB's authors (figure 5)."""
    loads = counts(case, 0, 2000)
    published = 100 * (1 - case.fastermoe / case.straggler)
    np.testing.assert_allclose(reduction(fastermoe(loads), plain(loads)), published, atol=4)


def test_tokens_of_a_copied_expert_stay_where_they_are():
    loads, topology = counts(CASES[2], 0, 1)[0], Topology.flat(8)
    start = plain_plan(jnp.asarray(loads), topology, 24)
    plan, _ = jax.jit(lambda counts, start: FasterMoE().rebalance(counts, start, topology, ()))(loads, start)
    check_plan(plan, loads)
    plan = jax.tree.map(np.asarray, plan)
    copied = np.setdiff1d(plan.placement[0, 16:], [-1])
    assert len(copied) > 0
    for rank in range(8):
        going = nearest_first(loads, plan.quota, rank, plan.domain)
        assert (going[copied, rank] == loads[rank, copied]).all()


def test_what_a_copy_must_save():
    # 216 MiB at 360 GB/s, against 0.45 us of grouped FFN and 0.14 us of exchange per token.
    here = Topology.flat(8), 8
    balancer = FasterMoE()
    np.testing.assert_allclose(balancer.copy_s(*here), 629e-6, rtol=1e-3)
    np.testing.assert_allclose(balancer.token_s(*here), 0.5895e-6, rtol=1e-3)
    assert balancer.min_saved(*here) == 1068
    assert FasterMoE(expert_bytes=1e30).min_saved(*here) == 2**31 - 1
    assert FasterMoE(expert_bytes=1e-9, gradient_bytes=1e-9).min_saved(*here) == 1


def test_what_is_left_out_is_that_of_the_layer_and_the_topology():
    sizes = LayerCost(num_copies=8, expert_bytes=10**6, gradient_bytes=2 * 10**6, token_bytes=1000, token_flops=10**6)
    topology = Topology((Level("gpu", 4, bytes_per_s=1e9),), ranks_per_domain=4, flops_per_s=1e12)
    balancer = FasterMoE().sized(sizes)
    assert balancer.copy_s(topology, 4) == 3e6 / 1e9
    assert balancer.token_s(topology, 4) == 3 * 1e6 / 1e12 + 4 * 1e3 / 1e9
    kept = FasterMoE(expert_bytes=5.0, bytes_per_s=1.0).sized(sizes)
    assert kept.copy_s(topology, 4) == 5 + 2e6
