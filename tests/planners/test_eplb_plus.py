import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_moe_lb import Plan, _planning
from jax_moe_lb.core import check_plan
from jax_moe_lb.planners.eplb import eplb_plus, eplb_plus_reference, round_robin
from tests.planners.planner_cases import assert_same, draw_placement, draw_tokens

RUN = jax.jit(eplb_plus, static_argnums=2)
REFERENCE = jax.jit(eplb_plus_reference, static_argnums=2)
# ranks, home experts, slots, ranks per domain
SHAPES = [(1, 1, 1, 1), (2, 1, 2, 2), (4, 1, 2, 4), (6, 3, 5, 3), (8, 2, 4, 4), (8, 1, 3, 8), (4, 2, 3, 1)]


def by_the_book(tokens, placement, domain):
    """Apply the rule one copy at a time, with Python integers and sets."""
    num_ranks, num_home = len(placement), len(tokens) // len(placement)
    slots = placement.tolist()
    holders = [{rank for rank in range(num_ranks) if expert in slots[rank]} for expert in range(len(tokens))]
    copies = [len(ranks) for ranks in holders]
    blocks = [range(first, first + domain) for first in range(0, num_ranks, domain)]
    share = lambda expert: -(-int(tokens[expert]) // max(1, copies[expert]))  # noqa: E731
    new = []
    for ranks in blocks:
        experts = range(ranks.start * num_home, ranks.stop * num_home)
        limit = {e: copies[e] + sum(-1 in slots[r] and r not in holders[e] for r in ranks) for e in experts}
        for _ in range(sum(slots[rank].count(-1) for rank in ranks)):
            able = [expert for expert in experts if copies[expert] < limit[expert] and share(expert) > 1]
            if able:
                heaviest = max(able, key=lambda expert: (share(expert), -expert))
                copies[heaviest] += 1
                new.append((heaviest, ranks))
    load = [sum(share(e) for e in range(len(tokens)) if rank in holders[e]) for rank in range(num_ranks)]
    for expert, ranks in sorted(new, key=lambda copy: (-share(copy[0]), copy[0])):
        fitting = [rank for rank in ranks if -1 in slots[rank] and rank not in holders[expert]]
        if fitting:
            rank = min(fitting, key=lambda rank: (load[rank], rank))
            slots[rank][slots[rank].index(-1)] = expert
            holders[expert].add(rank)
            load[rank] += share(expert)
    quota = np.zeros((len(tokens), num_ranks), np.int32)
    for expert, ranks in enumerate(holders):
        for i in range(int(tokens[expert])) if len(ranks) and tokens[expert] < 10**4 else ():
            quota[expert, sorted(ranks)[i % len(ranks)]] += 1
    return np.array(slots, np.int32), quota


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=() if i in (0, 3, 4, 5) else pytest.mark.thorough) for i, shape in enumerate(SHAPES)],
    ids=str,
)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([2, 30, 5000]), empty=st.sampled_from([1.0, 0.6]))
def test_all_implementations_follow_the_rule(shape, seed, scale, empty):
    num_ranks, num_home, slots, domain = shape
    rng = np.random.default_rng(seed)
    placement = draw_placement(rng, num_ranks, num_home, slots, domain, empty)
    tokens = draw_tokens(rng, num_ranks * num_home, scale)
    want = by_the_book(tokens, placement, domain)
    for plan in (RUN, REFERENCE, _planning.eplb_plus):
        assert_same(plan(tokens, placement, domain), want)
    counts = np.zeros((num_ranks, num_ranks * num_home), np.int32)
    counts[0] = tokens
    check_plan(Plan(*want, domain=domain), counts)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), most=st.sampled_from([0, 1, 100, 2**31 // 24]))
def test_any_replicas(shape, seed, most):
    """Experts far from home or twice on a rank, many ties, large numbers."""
    num_ranks, num_home, slots, domain = shape
    rng = np.random.default_rng(seed)
    placement = draw_placement(rng, num_ranks, num_home, slots, domain)
    placement[:, num_home:] = rng.integers(-1, num_ranks * num_home, (num_ranks, slots - num_home))
    tokens = rng.integers(0, most + 1, num_ranks * num_home, np.int32)
    want = REFERENCE(tokens, placement, domain)
    assert_same(RUN(tokens, placement, domain), want)
    assert_same(_planning.eplb_plus(tokens, placement, domain), want)
    np.testing.assert_array_equal(np.asarray(want[1], np.int64).sum(1), tokens)


@pytest.mark.slow
def test_the_largest_load():
    tokens, placement = np.array([2**31 - 1, 0], np.int32), np.array([[0, -1], [1, -1]], np.int32)
    want = np.array([[0, -1], [1, 0]], np.int32), np.array([[2**30, 2**30 - 1], [0, 0]], np.int32)
    for plan in (RUN, REFERENCE, _planning.eplb_plus):
        assert_same(plan(tokens, placement, 2), want)


def test_round_robin_gives_the_rest_to_the_lower_ranks():
    quota = round_robin(np.array([8, 3, 5], np.int32), np.array([[0, 2], [1, 0], [2, 0]], np.int32))
    assert quota.tolist() == [[3, 3, 2], [0, 3, 0], [3, 0, 2]]
