"""`Exact` is held against the optimum of a mixed-integer program, where slots are too few for the mean."""

import numpy as np
import pytest

from benchmarks.optimum import optimum
from jax_moe_lb import _planning

pytestmark = pytest.mark.slow


def gap(tokens, num_ranks, slots):
    """How far the maximum load is above the lowest one, and how far that is above the mean, as fractions."""
    counts = np.zeros((num_ranks, len(tokens)), np.int32)
    counts[0] = tokens
    _, quota = _planning.exact(counts, slots, num_ranks, 0.0)
    most = quota.sum(0).max() * num_ranks / tokens.sum(dtype=np.int64)
    best, bound = optimum(tokens, num_ranks, slots, candidates=len(tokens) // num_ranks)
    # Both within the solver's tolerance: its bound is a proof, its own plan one that can be had.
    assert bound - 1e-6 <= best <= most + 1e-3
    return most / best - 1, best - 1


@pytest.mark.parametrize(("shape", "cases"), [((6, 6, 7), 6), ((8, 8, 9), 2)], ids=str)
def test_it_is_near_the_optimum_where_slots_are_scarce(shape, cases):
    """Lognormal experts on uneven ranks, one replica slot on each."""
    num_ranks, num_home, slots = shape
    rng, gaps = np.random.default_rng(0), []
    for _ in range(cases):
        popularity = rng.lognormal(0, 0.8, (num_ranks, num_home)) * rng.lognormal(0, 0.8, (num_ranks, 1))
        gaps.append(gap((1e5 * popularity).astype(np.int32).reshape(-1), num_ranks, slots))
    above_optimum, above_mean = np.array(gaps).T
    assert above_optimum.mean() <= 0.005
    assert above_optimum.max() <= 0.02
    assert (above_mean > 0.01).sum() >= cases / 2
