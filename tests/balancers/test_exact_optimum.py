"""`Exact` is compared with the optimum of a mixed-integer program, with too few slots to reach the mean."""

import numpy as np
import pytest

from benchmarks.plans.optimum import optimum
from jax_moe_lb import _planning

pytestmark = pytest.mark.slow


def gap(tokens, num_ranks, slots):
    """Return the maximum load relative to the optimum, and the optimum relative to the mean, as excess fractions."""
    counts = np.zeros((num_ranks, len(tokens)), np.int32)
    counts[0] = tokens
    _, quota = _planning.exact(counts, slots, num_ranks, 0.0)
    most = quota.sum(0).max() * num_ranks / tokens.sum(dtype=np.int64)
    best, bound = optimum(tokens, num_ranks, slots, candidates=len(tokens) // num_ranks)
    # Both are within the solver's tolerance: its bound is proven, and its plan is feasible.
    assert bound - 1e-6 <= best <= most + 1e-3
    return most / best - 1, best - 1


@pytest.mark.parametrize(("shape", "cases"), [((6, 6, 7), 6), ((8, 8, 9), 2)], ids=str)
def test_it_is_near_the_optimum_where_slots_are_scarce(shape, cases):
    """Lognormal experts on uneven ranks, with one replica slot each."""
    num_ranks, num_home, slots = shape
    rng, gaps = np.random.default_rng(0), []
    for _ in range(cases):
        popularity = rng.lognormal(0, 0.8, (num_ranks, num_home)) * rng.lognormal(0, 0.8, (num_ranks, 1))
        gaps.append(gap((1e5 * popularity).astype(np.int32).reshape(-1), num_ranks, slots))
    above_optimum, above_mean = np.array(gaps).T
    assert above_optimum.mean() <= 0.005
    assert above_optimum.max() <= 0.02
    assert (above_mean > 0.01).sum() >= cases / 2
