"""A part of a machine represents the whole."""

import numpy as np
import pytest

from jax_moe_lb import greedy, plain
from jax_moe_lb.advise.search import Space
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, Migration, ModelShape, Parallel, Peers, Step, simulate
from jax_moe_lb.sim.run import simulate_sample
from jax_moe_lb.sim.work import sample_of, sampled_model

WHOLE = Cluster((Links("dc", 8, 1e9, 2, 1e-3), Links("gpu", 2, 1e11)), AnalyticGemm(1e13), planner_s=1e-4)
SAMPLE = sample_of(WHOLE, 8)
MODEL = ModelShape(layers=2, hidden=256, inner=512, experts=32, per_token=2, tokens=512)
FEW = sampled_model(MODEL, WHOLE, SAMPLE).experts


@pytest.mark.parametrize("system", [plain(), greedy(1)], ids=["plain", "greedy"])
@pytest.mark.parametrize("sizes", [(), (2, 1), (2, 2)])
def test_under_even_routing_it_is_the_whole(system, sizes):
    even, part = np.full((16, 32), 32, np.int32), np.full((8, FEW), 1024 // FEW, np.int32)
    step = Step(parallel=Parallel(data=Peers(4, 1e9)))
    whole = simulate(system, MODEL, WHOLE, even, migration=Migration(sizes), step=step)
    found = simulate_sample(system, MODEL, WHOLE, SAMPLE, part, migration=Migration(sizes), step=step)
    assert found.step_s == pytest.approx(whole.step_s)
    assert found.level_bytes["data"] == pytest.approx(whole.level_bytes["data"])
    assert found.level_bytes["dc"] == pytest.approx(whole.level_bytes["dc"])
    assert found.memory == whole.memory


def test_skew_counts_as_it_does_in_the_sample():
    skewed = np.full((8, FEW), 32, np.int32)
    skewed[:, 0] *= 8
    before, after = (simulate_sample(s, MODEL, WHOLE, SAMPLE, skewed) for s in (plain(), greedy(1)))
    assert before.imbalance_before == pytest.approx(before.imbalance_after)
    assert after.imbalance_after < before.imbalance_after


def test_a_sample_in_one_domain_says_nothing():
    with pytest.raises(ValueError, match="expected fewer than the 4 of the sample"):
        simulate_sample(plain(), MODEL, WHOLE, SAMPLE, np.ones((8, FEW), np.int32), migration=Migration((4, 1)))


def test_a_sample_has_as_large_members():
    assert [level.size for level in SAMPLE.levels] == [4, 2]
    assert few_sizes(SAMPLE) == {1, 2}
    # Weights moving between the outermost members would move in smaller domains.
    assert sample_of(Cluster((Links("gpu", 1000, 1e9),))) is None
    # An odd number of large members has no even part.
    assert sample_of(Cluster((Links("dc", 997, 1e9), Links("gpu", 8, 1e9)))) is None


def few_sizes(sample):
    return {sizes[0] for sizes in Space(sample, 1, sampled=True).domain_sizes()}
