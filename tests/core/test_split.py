import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plans import popular_ranks
from jax_moe_lb import Chain, HostCallback, Plan, Topology
from jax_moe_lb.balancers import UltraEP
from jax_moe_lb.core import Split, check_plan, nearest_first, plain_plan
from jax_moe_lb.core import traffic as plan_traffic
from jax_moe_lb.core.split import arrivals, copies_of_all, floor_share, kept, rows_of_all
from tests.oracle import random_plan

SPLITS = [Split(tier, locality) for tier in ("nearest", "proportional") for locality in (True, False)]
PROPORTIONAL = Split("proportional")


def draw(rng, num_domains, members, most):
    """Return counts and a quota on ranks of the expert's domain, or, with probability 1/3, on any ranks."""
    num_ranks, home = num_domains * members, int(rng.integers(1, 4))
    counts = rng.integers(0, most, (num_ranks, num_ranks * home), endpoint=True)
    counts = (counts * (rng.random(counts.shape) < 0.7)).astype(np.int32)
    if rng.random() < 0.3:
        quota = [rng.multinomial(tokens, rng.dirichlet(np.full(num_ranks, 0.3))) for tokens in counts.sum(0)]
        return counts, np.array(quota, np.int32)
    return counts, random_plan(rng, counts, home + int(rng.integers(0, 4)), members)[1]


def sent_by_all(counts, quota, domain, split):
    """Return the split `[R, E, R]`, by source, expert and serving rank."""
    return np.stack([nearest_first(counts, quota, rank, domain, split) for rank in range(len(counts))])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([1, 5, 1000, 2**20]),
    st.sampled_from(SPLITS),
)
def test_both_sides_are_exact_and_agree(seed, num_domains, members, most, split):
    counts, quota = draw(np.random.default_rng(seed), num_domains, members, most)
    sent, ranks = sent_by_all(counts, quota, members, split), range(len(counts))
    got = np.stack([arrivals(counts, quota, rank, members, split) for rank in ranks])
    assert (sent >= 0).all()
    np.testing.assert_array_equal(sent.sum(2), counts)
    np.testing.assert_array_equal(sent.sum(0), quota)
    np.testing.assert_array_equal(sent, got.transpose(2, 1, 0))
    np.testing.assert_array_equal(sent[ranks, :, ranks].T, kept(counts, quota, members, split))
    if split.locality:
        np.testing.assert_array_equal(sent[ranks, :, ranks], np.minimum(counts, quota.T))


@pytest.mark.slow
@pytest.mark.parametrize(("split", "domain"), [(SPLITS[0], 4), (SPLITS[1], 4), (SPLITS[2], 4), (SPLITS[3], 8)])
def test_it_is_the_same_in_jax_and_for_a_few_experts(split, domain):
    rng, rank = np.random.default_rng(1), 6
    some = np.array([5, 0, 2])

    @jax.jit
    def run(counts, quota, rank):
        few = arrivals(counts[:, some], quota[some], rank, domain, split)
        return nearest_first(counts, quota, rank, domain, split), few, kept(counts, quota, domain, split)

    for most in (50, 2**23):
        counts = (rng.integers(0, most, (8, 16)) * rng.integers(0, 2, (8, 16))).astype(np.int32)
        quota = random_plan(rng, counts, 4, domain)[1]
        row, few, own = run(jnp.asarray(counts), jnp.asarray(quota), jnp.int32(rank))
        np.testing.assert_array_equal(row, nearest_first(counts, quota, rank, domain, split))
        np.testing.assert_array_equal(few, arrivals(counts, quota, rank, domain, split)[some])
        np.testing.assert_array_equal(own, kept(counts, quota, domain, split))


@pytest.mark.slow
@pytest.mark.parametrize("locality", [True, False])
def test_every_share_is_within_a_token_per_level(locality):
    """Four levels of a tree over 13 ranks."""
    rng = np.random.default_rng(0)
    for _ in range(8):
        counts, quota = draw(rng, 1, 13, 1000)
        stay = np.minimum(counts, quota.T) if locality else np.zeros_like(counts)
        supply, demand = counts - stay, quota - stay.T
        exact = supply[:, :, None] * demand / np.maximum(demand.sum(1), 1)[:, None]
        own = stay[:, :, None] * np.eye(13, dtype=int)[:, None]
        sent = sent_by_all(counts, quota, 13, Split("proportional", locality))
        assert np.abs(sent - own - exact).max() < 4


def test_it_is_ultraeps_formula_where_that_divides():
    """`min(counts, quota)` stays; of the rest, each serving rank gets `rest * (quota - stay) / sum`."""
    counts, quota = np.zeros((4, 4), np.int32), np.zeros((4, 4), np.int32)
    # Of 40, 10, 38 and 72 tokens 40, 10 and 20 stay; 18 and 72 are left, for 40 and 50.
    counts[:, 0], quota[0] = [40, 10, 38, 72], [80, 60, 20, 0]
    want = [[40, 0, 0, 0], [0, 10, 0, 0], [8, 10, 20, 0], [32, 40, 0, 0]]
    assert sent_by_all(counts, quota, 4, PROPORTIONAL)[:, 0].tolist() == want
    counts[:, 0] = [16, 0, 48, 96]
    want = [[8, 6, 2, 0], [0, 0, 0, 0], [24, 18, 6, 0], [48, 36, 12, 0]]
    assert sent_by_all(counts, quota, 4, Split("proportional", locality=False))[:, 0].tolist() == want


def test_own_domain_comes_before_others():
    counts = np.array([[8, 0, 0, 0], [0] * 4, [8, 0, 0, 0], [0] * 4], np.int32)
    quota = np.array([[0, 8, 0, 8], [0] * 4, [0] * 4, [0] * 4], np.int32)
    sent = sent_by_all(counts, quota, 2, PROPORTIONAL)[:, 0]
    assert sent.tolist() == [[0, 8, 0, 0], [0] * 4, [0, 0, 0, 8], [0] * 4]
    assert sent_by_all(counts, quota, 4, PROPORTIONAL)[:, 0].tolist() == [[0, 4, 0, 4], [0] * 4, [0, 4, 0, 4], [0] * 4]


@pytest.mark.slow
def test_no_pair_of_ranks_has_as_much_to_exchange_as_in_the_order_of_ranks():
    case = next(case for case in popular_ranks.CASES if case.imbalance == 8.0)
    counts = popular_ranks.counts(case, seed=0, num_tokens=256)
    start = plain_plan(counts, Topology.flat(64), slots=case.num_experts // 64 + 2)
    plan, _ = UltraEP(min_tokens=32).rebalance(counts, start, Topology.flat(64), ())
    assert plan.split == PROPORTIONAL
    pairs = {}
    for split in SPLITS:
        tokens = sent_by_all(counts, plan.quota, 64, split).sum(1)
        pairs[split] = (tokens * (1 - np.eye(64, dtype=int))).max()
        check_plan(
            Plan(plan.placement, plan.quota, rails=tokens[:, :, None].astype(np.int32), domain=64, split=split), counts
        )
        moved = plan_traffic(Plan(plan.placement, plan.quota, domain=64, split=split), counts)
        assert moved.rows == tokens.sum() - tokens.trace()
    assert pairs[PROPORTIONAL] < 0.5 * pairs[Split()]


def test_another_split_breaks_the_sums_of_rails():
    counts = np.array([[8, 0], [8, 0]], np.int32)
    start = plain_plan(counts, Topology.flat(2), 2)
    quota = np.array([[8, 8], [0, 0]], np.int32)
    placement = np.array([[0, -1], [1, 0]], np.int32)
    rails = np.array([[[8], [0]], [[0], [8]]], np.int32)
    check_plan(Plan(placement, quota, rails=rails, domain=start.domain), counts)
    with pytest.raises(ValueError, match=r"plan\.rails from rank 0 to rank 0 sums to 8 tokens; expected 4,"):
        check_plan(Plan(placement, quota, rails=rails, domain=2, split=Split("proportional", locality=False)), counts)


def test_balancers_that_come_after_keep_it():
    counts, topology = np.full((4, 4), 6, np.int32), Topology.flat(4)

    def rebuild(counts, plan, topology):
        return Plan(plan.placement, plan.quota, domain=plan.domain)

    chain = Chain((UltraEP(tier="proportional", locality=False), HostCallback(rebuild)))
    plan, _ = chain.rebalance(counts, plain_plan(counts, topology, 2), topology, chain.init((4, 4)))
    assert plan.split == Split("proportional", locality=False)


def test_a_host_planner_cannot_choose_it():
    counts, topology = np.full((4, 4), 6, np.int32), Topology.flat(4)
    choose = HostCallback(lambda counts, plan, topology: Plan(plan.placement, plan.quota, domain=4, split=PROPORTIONAL))
    with pytest.raises(ValueError, match=r"planner returned a plan with Split.*expected Split"):
        choose.rebalance(counts, plain_plan(counts, topology, 2), topology, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "split"), [(nearest_first, Split()), (nearest_first, PROPORTIONAL), (arrivals, PROPORTIONAL)]
)
def test_it_holds_no_more_than_rows(side, split):
    """No temporary has shape [E, R, R]."""
    shape, rank = jax.ShapeDtypeStruct((256, 256), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(side, static_argnums=(3, 4)).lower(shape, shape, rank, 256, split).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 256 * 256 * 4


def test_an_unknown_tier_is_refused():
    broken = copy.copy(PROPORTIONAL)
    # Bypass the constructor, whose annotations are checked in tests.
    object.__setattr__(broken, "tier", "farthest")
    with pytest.raises(ValueError, match="tier is 'farthest'; expected 'nearest' or 'proportional'"):
        broken.__post_init__()


@pytest.mark.parametrize("bits", [(0, 8), (1, 20.99), (20, 20.99), (20, 31), (1, 31), (30.9, 31)])
def test_floor_share_is_exact(bits):
    rng = np.random.default_rng(0)
    whole = np.minimum(2.0 ** rng.uniform(*bits, 50_000), 2**31 - 1).astype(np.int32)
    part, share = ((rng.random(len(whole)) * (whole + 1.0)).astype(np.int64).clip(0, whole) for _ in range(2))
    part[:100], share[50:150], part[200:300] = whole[:100], whole[50:150], whole[200:300] - 1
    want = [a * b // w for a, b, w in zip(part.tolist(), share.tolist(), whole.tolist(), strict=True)]
    part, share = part.astype(np.int32), share.astype(np.int32)
    np.testing.assert_array_equal(floor_share(part, share, whole), want)
    np.testing.assert_array_equal(jax.jit(floor_share)(part, share, whole), want)


@pytest.mark.parametrize("locality", [True, False])
@pytest.mark.parametrize("tier", ["nearest", "proportional"])
@pytest.mark.parametrize(("num_ranks", "num_experts", "domain"), [(8, 16, 8), (12, 24, 4), (5, 10, 1), (1, 4, 1)])
def test_rows_of_all_ranks_are_those_of_each(num_ranks, num_experts, domain, tier, locality, monkeypatch):
    rng = np.random.default_rng(num_ranks)
    counts = rng.integers(0, 50, (num_ranks, num_experts)).astype(np.int32)
    counts[rng.random(counts.shape) < 0.5] = 0
    shares = rng.dirichlet(np.full(num_ranks, 0.3), num_experts)
    quota = np.stack([rng.multinomial(n, p) for n, p in zip(counts.sum(0), shares, strict=True)]).astype(np.int32)
    split = Split(tier, locality)
    each = np.stack([nearest_first(counts, quota, rank, domain, split) for rank in range(num_ranks)])
    np.testing.assert_array_equal(copies_of_all(counts, quota, domain, split), each)
    np.testing.assert_array_equal(rows_of_all(counts, quota, domain, split), each.sum(1))
    # The result in pieces equals the result at once.
    monkeypatch.setattr("jax_moe_lb.core.split.MOST_AT_ONCE", 7)
    np.testing.assert_array_equal(copies_of_all(counts, quota, domain, split), each)
    np.testing.assert_array_equal(rows_of_all(counts, quota, domain, split), each.sum(1))
