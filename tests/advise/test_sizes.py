"""Other degrees of expert parallelism and microbatch sizes are evaluated with their costs."""

from dataclasses import replace

import pytest

from jax_moe_lb.advise.advise import groups_of, other_sizes, sum_s
from jax_moe_lb.advise.choice import Choice
from jax_moe_lb.advise.evaluate import Evaluator, drawn_workloads
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, ModelShape, Step
from jax_moe_lb.sim.loads import LoadShape

MODEL = ModelShape(layers=2, hidden=256, inner=512, experts=16, per_token=2, tokens=1024)
CLUSTER = Cluster((Links("node", 4, 1e9, 2, 1e-5), Links("gpu", 2, 50e9)), AnalyticGemm(1e13))
LOADS = drawn_workloads(MODEL, 8, 1.5, 1, [LoadShape.RANKS], 1, 0)


def test_groups_are_bounded_by_nodes():
    sizes = [tuple(level.size for level in group.levels) for group in groups_of(CLUSTER)]
    assert sizes == [(4, 2), (2, 2), (1, 2)]
    odd = Cluster((Links("dc", 3, 1e9), Links("node", 2, 1e9), Links("gpu", 2, 1e9)))
    assert [group.num_ranks for group in groups_of(odd)] == [12, 4, 2]


def test_gradients_of_groups_are_summed_over_what_is_between_them():
    judge = Evaluator(MODEL, CLUSTER, Step())
    whole, half, alone = groups_of(CLUSTER)
    assert sum_s(judge, whole) == 0
    # Four experts of a rank over two groups: half of them sent, half returned, over its own rail, with a hop each way.
    assert sum_s(judge, half) == pytest.approx(4 * MODEL.expert_gradient_bytes / 1e9 + 2e-5)
    assert sum_s(judge, alone) == pytest.approx(1.5 * 8 * MODEL.expert_gradient_bytes / 1e9 + 6e-5)
    assert sum_s(replace(judge, step=Step(backward=False)), half) == 0


@pytest.mark.slow
def test_what_fits_comes_first_and_what_does_not_says_why():
    judge = Evaluator(MODEL, CLUSTER, Step())
    free = other_sizes(judge, [Choice()], LOADS)
    assert len(free) == 3 * 4
    assert all(size.refused is None for size in free)
    assert [size.token_s for size in free] == sorted(size.token_s for size in free)
    limit = sorted(size.total_bytes for size in free)[5]
    short = other_sizes(replace(judge, cluster=replace(CLUSTER, memory_bytes=limit)), [Choice()], LOADS)
    assert [size.refused is None for size in short] == [True] * 6 + [False] * 6
    assert "GB of" in short[-1].refused
    # A single node keeps its tokens off the slow links.
    inference = other_sizes(Evaluator(MODEL, CLUSTER, Step(backward=False)), [Choice()], LOADS)
    assert inference[0].ranks == 2
