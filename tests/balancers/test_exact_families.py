"""`Exact` on loads that are hard to level, beside every other balancer and an optimum."""

import jax
import numpy as np
import pytest

from benchmarks.plans.load_families import families, spread
from benchmarks.plans.optimum import optimum
from benchmarks.plans.plans import OTHERS, outcome, plan
from jax_moe_lb import _planning
from jax_moe_lb.balancers import Exact
from jax_moe_lb.balancers.exact import SEARCH_ENDS
from jax_moe_lb.contrib import LPLB
from jax_moe_lb.core import check_plan, load
from jax_moe_lb.planners.exact import UNBOUNDED
from jax_moe_lb.planners.exact_search import exact_in_jax

BEST = Exact(eps=0.0, localize=False)
IN_JAX = jax.jit(exact_in_jax, static_argnums=(1, 2, 3, 4, 5))
# ranks, home experts, replica slots
SHAPES = [(8, 4, 1), (16, 8, 2), (72, 8, 1), (128, 4, 2)]
MORE = [(8, 8, 4), (16, 8, 1), (32, 4, 1), (64, 4, 1), (64, 4, 2), (72, 8, 2), (96, 4, 1), (128, 8, 2), (256, 2, 1)]


def further(shapes):
    return [pytest.param(shape, marks=pytest.mark.thorough) for shape in shapes]


@pytest.mark.parametrize("shape", [*SHAPES, *further(MORE)], ids=str)
def test_no_balancer_is_more_level(shape):
    num_ranks, num_home, slots = shape
    for tokens in families(num_ranks, num_home).values():
        counts = spread(tokens, num_ranks)
        found = plan(BEST, counts, slots)
        check_plan(found, counts)
        others = {name: outcome(balancer, counts, slots)[0] for name, balancer in OTHERS.items()}
        # The search ends this close to the mean.
        enough = counts.sum() / num_ranks * (1 + SEARCH_ENDS)
        assert load(found).max() <= max(min(others.values()), enough), others
        assert load(found).max() <= others["Greedy"]


@pytest.mark.parametrize("shape", [(8, 8, 2), (8, 8, 4), *further([(32, 4, 2), (72, 8, 2), (256, 1, 4)])], ids=str)
def test_no_plan_is_as_good_in_all_numbers_and_better_in_one(shape):
    """Maximum, replicas, and replicas sent by the busiest rank."""
    num_ranks, num_home, slots = shape
    for name, tokens in families(num_ranks, num_home).items():
        counts = spread(tokens, num_ranks)
        own = outcome(Exact(), counts, slots)
        others = {other: outcome(balancer, counts, slots) for other, balancer in OTHERS.items()}
        assert not [other for other, its in others.items() if its.dominates(own)], (name, own, others)


@pytest.mark.thorough
def test_no_linear_program_is_more_level():
    for tokens in families(8, 4).values():
        counts = spread(tokens, 8)
        assert outcome(BEST, counts, 1)[0] <= outcome(LPLB(every=1), counts, 1)[0]


def test_slots_that_cannot_level_are_shared():
    """Half of 128 ranks are hot, and the slots of the others take half of their surplus."""
    counts = np.zeros((128, 1024), np.int32)
    counts[:, :512] = 64
    assert outcome(BEST, counts, 2)[0] == 1.5 * counts.sum() / 128


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 4, 1), *further([(8, 8, 2), (16, 4, 1)])], ids=str)
def test_the_maximum_is_near_the_optimum(shape):
    num_ranks, num_home, slots = shape
    gaps = []
    for tokens in families(num_ranks, num_home).values():
        best, _ = optimum(tokens, num_ranks, num_home + slots, candidates=num_home, limit_s=5)
        gaps.append(outcome(BEST, spread(tokens, num_ranks), slots)[0] * num_ranks / tokens.sum() / best - 1)
    # The solver ends within 0.05 %, or at its time limit with a worse plan.
    assert np.mean(gaps) <= 0.001
    assert max(gaps) <= 0.005


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 4, 1), *further([(16, 8, 2), (72, 8, 2)])], ids=str)
def test_the_jnp_search_is_never_above_greedy_and_ultraep(shape):
    num_ranks, num_home, slots = shape
    for tokens in families(num_ranks, num_home).values():
        counts = spread(tokens, num_ranks)
        options = (num_home + slots, num_ranks, 0.0)
        ours = int(IN_JAX(counts, *options, UNBOUNDED, False)[1].sum(0).max())
        assert ours <= min(outcome(OTHERS[name], counts, slots)[0] for name in ("Greedy", "UltraEP"))
        theirs = _planning.exact(counts, *options)[1].sum(0).max()
        assert theirs <= 1.005 * ours


@pytest.mark.parametrize("shape", [(8, 8, 2), *further([(16, 8, 2), (64, 4, 2), (72, 4, 2)])], ids=str)
def test_the_slack_of_eps_saves_replicas_alone(shape):
    """The quotas of a plan are the best for its replicas: planning them again with eps = 0 gives the same maximum."""
    num_ranks, num_home, slots = shape
    for tokens in families(num_ranks, num_home).values():
        counts = spread(tokens, num_ranks)
        default, best = plan(Exact(localize=False), counts, slots), outcome(BEST, counts, slots)[0]
        assert best <= load(default).max() <= 1.01 * best
        assert load(default).max() == lowest(tokens, default, num_home)
        assert load(plan(Exact(), counts, slots)).max() == load(default).max()


def lowest(tokens, found, num_home):
    """Return the lowest maximum of a placement, by a linear program."""
    from scipy.optimize import linprog

    expert, rank = np.nonzero(found.quota + (np.arange(len(tokens))[:, None] // num_home == np.arange(found.num_ranks)))
    size, ranks = len(expert), found.num_ranks
    above = np.zeros((ranks, size + 1))
    above[rank, np.arange(size)] = 1
    above[:, size] = -1
    served = np.zeros((len(tokens), size + 1))
    served[expert, np.arange(size)] = 1
    cost = np.zeros(size + 1)
    cost[size] = 1
    result = linprog(cost, A_ub=above, b_ub=np.zeros(ranks), A_eq=served, b_eq=tokens)
    return int(np.ceil(result.fun - 1e-6))
