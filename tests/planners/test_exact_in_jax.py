"""The jnp search replacing the C++ planner of `exact`."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Plan, _planning
from jax_moe_lb.core import check_plan, custom_calls
from jax_moe_lb.core.types import iota
from jax_moe_lb.planners.base import plan_on_host
from jax_moe_lb.planners.exact import UNBOUNDED, exact
from jax_moe_lb.planners.exact_on_tpu import fill_in_kernel, why_no_kernel
from jax_moe_lb.planners.exact_packing import Candidates, _may, _Places, fill
from jax_moe_lb.planners.exact_search import WIDTH, exact_in_jax, order_near, usual_order
from tests.layer_cases import BY_NAME
from tests.marks import parametrize
from tests.planners.planner_cases import STOPPED, assert_same

RUN = jax.jit(exact_in_jax, static_argnums=(1, 2, 3, 4, 5))
# ranks, experts, slots, ranks per domain: spare slots, domains, one rank, one expert each, all experts everywhere, none
SHAPES = [(8, 32, 6, 4), (1, 4, 5, 1), (4, 4, 3, 4), (3, 6, 6, 3), (4, 8, 2, 4)]
OPTIONS = [(0.0, UNBOUNDED, True), (0.01, 1, False), (1e300, 0, True)]


def draw_adversarial(rng, num_ranks, num_experts):
    """Return random counts, zeros, one hot expert, all on one rank, ties, and int32 extremes."""
    shape = (num_ranks, num_experts)
    expert = np.arange(num_experts) + np.zeros((num_ranks, 1), int)
    return [
        (1e4 * rng.random(shape) ** 6).astype(int),
        np.zeros(shape, int),
        np.where(expert == num_experts - 1, 1000, 0),
        np.where(expert < num_experts // num_ranks, 77, 0),
        np.full(shape, 5),
        rng.dirichlet(np.full(num_experts, 0.2), num_ranks) * ((2**31 - 1) // num_ranks),
    ]


def replicas(placement, num_experts):
    return int((np.asarray(placement) >= 0).sum()) - num_experts


@pytest.mark.slow
@parametrize(
    "shape, options",
    # The quick shapes; all options with several domains.
    [*((shape, OPTIONS[0]) for shape in SHAPES if shape[0] != 3), *((SHAPES[0], one) for one in OPTIONS[1:])],
    itertools.product(SHAPES, OPTIONS),
    ids=str,
)
def test_every_plan_is_legal_and_within_its_limit(shape, options):
    num_ranks, num_experts, slots, domain = shape
    home, maxima = num_experts // num_ranks, []
    for drawn in draw_adversarial(np.random.default_rng(0), num_ranks, num_experts):
        counts = drawn.astype(np.int32)
        placement, quota = map(np.asarray, RUN(counts, slots, domain, *options))
        check_plan(Plan(placement, quota, domain=domain), counts)
        made = placement[:, home:]
        assert ((made[:, 1:] < 0) | (made[:, :-1] >= 0)).all()  # replicas, then -1
        assert np.bincount(made[made >= 0] // home, minlength=num_ranks).max() <= options[1]
        assert (quota[made[made >= 0], np.nonzero(made >= 0)[0]] > 0).all()  # every replica serves tokens
        tokens, load = counts.sum(0).reshape(num_ranks, -1).sum(1), quota.sum(0)
        assert load.max() <= tokens.max()
        maxima.append(load.max())
        if options[1] == UNBOUNDED:
            assert load.max() >= -(-tokens.sum() // num_ranks)
    assert maxima[1] == 0


@pytest.mark.slow
@parametrize("shape", [(8, 256, 2)], [(8, 256, 1), (16, 256, 1)], ids=str)
def test_the_maximum_is_that_of_the_cpp_planner(shape):
    """Within 0.1 % of the mean on average, for scarce slots with which the mean is out of reach."""
    num_ranks, num_experts, spare = shape
    slots, above = num_experts // num_ranks + spare, []
    for seed, name in enumerate(("zipf", "lognormal", "zipf", "lognormal")):
        counts = BY_NAME[name].counts(seed, num_ranks, 512, num_experts, 8)
        theirs = _planning.exact(counts, slots, num_ranks, 0.0, UNBOUNDED, False)[1].sum(0).max()
        ours = int(RUN(counts, slots, num_ranks, 0.0, UNBOUNDED, False)[1].sum(0).max())
        above.append((ours - theirs) / (counts.sum() / num_ranks))
    assert np.mean(above) <= 0.001
    assert max(above) <= 0.004


@pytest.mark.thorough
def test_a_fan_out_that_binds_costs_no_more_than_in_cpp():
    """Three replicas of a rank's experts suffice if the taking ranks have freed capacity first."""
    above = []
    for seed in range(4):
        counts = WORKLOADS[2].counts(seed, 32, 512, 128, 8)
        theirs = _planning.exact(counts, 5, 32, 0.0, 3, False)[1].sum(0).max()
        ours = int(RUN(counts, 5, 32, 0.0, 3, False)[1].sum(0).max())
        above.append((ours - theirs) / (counts.sum() / 32))
    assert np.mean(above) <= 0.005
    assert max(above) <= 0.02


def filled(tokens, limit, max_fan_out, most=4, **changes):
    """Return the plan of one candidate for tokens `[M, L]` and one slot per rank."""
    tokens = jnp.asarray(np.array(tokens, np.int32).T)
    order = jax.tree.map(lambda weight: weight[..., None], replace(usual_order(tokens, is_limited=True), **changes))
    place = jnp.argsort(jnp.argsort(tokens.sum(0))).astype(jnp.int32)[:, None]
    limit, most = (jnp.full((1, 1), number, jnp.int32) for number in (limit, most))
    return fill(Candidates(tokens[..., None], place, limit, order, most), slots=1, max_fan_out=max_fan_out)


@pytest.mark.slow
def test_room_is_made_on_idle_ranks():
    """Rank 0 may send one replica, of 10 token copies: rank 3 has capacity for them once its own 2 are on rank 1."""
    for cleared, highest in ((0, 12), (1, 10)):
        tokens = [[20, 0], [5, 3], [5, 3], [2, 0]]
        assert filled(tokens, 10, max_fan_out=1, cleared=jnp.int32([cleared])).load.max() == highest


@pytest.mark.slow
def test_room_is_made_within_the_fan_out():
    """Rank 1 has three experts that ranks 2 and 3 have room for."""
    for max_fan_out, sent in ((1, 1), (2, 2)):
        plan = filled([[20, 0, 0], [2, 2, 2], [9, 0, 0], [9, 0, 0]], 12, max_fan_out, cleared=jnp.int32([1]))
        assert (np.asarray(plan.expert) // 3 == 1).sum() == sent


@pytest.mark.slow
def test_a_plan_ends_with_the_most_replicas():
    """Rank 0 would give to all others; a plan of further replicas cannot have the fewest."""
    made = [filled([[20, 0], [4, 0], [4, 0], [4, 0]], 8, max_fan_out=4, most=most) for most in range(5)]
    assert [int((plan.expert >= 0).sum()) for plan in made] == [0, 1, 2, 3, 3]
    assert [int(plan.load.max()) for plan in made] == [20, 16, 12, 8, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "slots", "max_fan_out"),
    # One vector of ranks, three, and three of four ranks.
    [((1, 2), 1, 2), ((2, 8), 2, 3), ((5, 8), 3, 24), ((1, 24), 2, 48), ((2, 12), 2, 3)],
)
def test_the_kernel_of_tpus_makes_the_same_plans(shape, slots, max_fan_out):
    """Interpreted, for candidates of different limits, orders and numbers of replicas; also of two domains."""
    rng, is_limited = np.random.default_rng(0), max_fan_out < slots * shape[1]
    tokens = jnp.asarray((1e4 * rng.random((2, *shape)) ** 6).astype(np.int32))
    load = tokens.sum(1)
    limits = (load.mean(1, keepdims=True) * np.linspace(0.9, 1.5, WIDTH)[None]).astype(jnp.int32)[:, None]

    def orders_of(tokens):
        near = partial(order_near, usual_order(tokens, is_limited), tokens.max(), tokens.min())
        return jax.vmap(near, out_axes=-1)(iota(WIDTH))

    most = jnp.broadcast_to(iota(WIDTH) % 7 * 5, limits.shape)
    place = jnp.argsort(jnp.argsort(load)).astype(jnp.int32)[..., None] if is_limited else None
    given = tokens[..., None], place, limits, jax.vmap(orders_of)(tokens), most
    assert why_no_kernel(*shape, slots, WIDTH) is None
    want, got = (
        jax.vmap(lambda *given, form=form: form(Candidates(*given), slots, max_fan_out))(*given)
        for form in (fill, partial(fill_in_kernel, interpret=True))
    )
    assert (want.expert >= 0).any()
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_kernel_needs_its_vectors_in_memory():
    assert why_no_kernel(2, 64, 2, WIDTH) is None
    assert why_no_kernel(32, 8, 2, WIDTH) is None
    assert why_no_kernel(30, 256, 2, WIDTH) == "experts and slots are 1024 vectors; expected at most 512"


@pytest.mark.thorough
def test_it_needs_about_as_many_replicas_as_the_cpp_planner():
    """If the mean is in reach, both use all of `eps`."""
    ours, theirs = [], []
    for seed in range(4):
        counts = WORKLOADS[2].counts(seed, 32, 512, 128, 8)
        ours.append(replicas(RUN(counts, 6, 32, 0.01, UNBOUNDED, False)[0], 128))
        theirs.append(replicas(_planning.exact(counts, 6, 32, 0.01, UNBOUNDED, False)[0], 128))
    assert np.mean(ours) <= 1.05 * np.mean(theirs)


@pytest.mark.slow
def test_replicas_go_where_tokens_start():
    rng, gained = np.random.default_rng(0), []
    for _ in range(5):
        tokens = rng.lognormal(6, 1, 64)
        starts = [rng.multinomial(int(n), rng.dirichlet(np.full(8, 0.3))) for n in tokens]
        counts = np.stack(starts, 1).astype(np.int32)
        far, near = (RUN(counts, 12, 8, 0.05, UNBOUNDED, localize) for localize in (False, True))
        check_plan(Plan(*map(np.asarray, near), domain=8), counts)
        assert replicas(near[0], 64) == replicas(far[0], 64)
        gained.append(int(np.minimum(counts.T, near[1]).sum() - np.minimum(counts.T, far[1]).sum()))
    assert min(gained) >= 0
    assert max(gained) > 0


@pytest.mark.slow
def test_slots_exchange_only_experts_that_the_other_rank_lacks():
    """3 ranks with 2 home experts and 2 slots each: by pairs, against the rule in words."""
    rng, limit, home, slots = np.random.default_rng(0), 40, 2, 2
    rank = np.repeat(np.arange(3), slots)
    seen = set()
    for _ in range(20):
        expert = rng.integers(-1, 3 * home, 3 * slots)
        tokens = np.where(expert < 0, 0, rng.integers(0, 20, expert.size))
        load = rng.integers(20, limit, 3)
        places = _Places(*map(jnp.asarray, (expert, tokens, load)), jnp.int32(0), jnp.array(True))
        may = np.asarray(_may(places, jnp.int32(limit), home))
        for a, b in np.ndindex(may.shape):
            held = [set(expert[rank == r]) | set(range(r * home, (r + 1) * home)) for r in range(3)]
            twice = expert[a] in held[rank[b]] - {-1} or expert[b] in held[rank[a]] - {-1}
            above = max(load[rank[b]] + tokens[a] - tokens[b], load[rank[a]] + tokens[b] - tokens[a]) > limit
            assert may[a, b] == (not twice and not above), (expert, tokens, load, a, b)
            seen.add((bool(twice), bool(above)))
    assert len(seen) == 4


@pytest.mark.thorough
def test_domains_are_planned_each_for_itself():
    """Tokens from the other domain count, on any rank."""
    counts = WORKLOADS[2].counts(0, 8, 512, 32, 4)
    _, quota = RUN(counts, 6, 4, 0.01, UNBOUNDED, False)
    for first in (0, 1):
        experts, ranks = slice(16 * first, 16 * first + 16), slice(4 * first, 4 * first + 4)
        alone = np.zeros((4, 16), np.int32)
        alone[0] = counts[:, experts].sum(0)
        np.testing.assert_array_equal(quota[experts, ranks], RUN(alone, 6, 4, 0.01, UNBOUNDED, False)[1])


@pytest.mark.thorough
def test_jitted_and_eager_plans_are_mapped(no_custom_calls):
    counts = np.stack([WORKLOADS[k].counts(k, 2, 256, 8, 2) for k in (1, 2)])
    mapped = jax.jit(jax.vmap(lambda counts: exact(counts, 5, 2)))(counts)
    for layer in range(2):
        alone = tuple(array[layer] for array in mapped)
        assert_same(alone, RUN(counts[layer], 5, 2, 0.01, UNBOUNDED, True))
        assert_same(alone, exact(jnp.asarray(counts[layer]), 5, 2))


def test_the_host_makes_the_plan_of_the_cpp_planner(no_custom_calls):
    counts = np.stack([WORKLOADS[k].counts(k, 4, 256, 16, 2) for k in (1, 2)])
    plan = jax.jit(jax.vmap(lambda counts: exact(counts, 6, 4, 0.01, 3, call_host=True)))
    for layer, placed in enumerate(zip(*plan(jnp.asarray(counts)), strict=True)):
        assert_same(placed, plan_on_host("exact", counts[layer], num_slots=6, domain=4, eps=0.01, max_fan_out=3))
    with pytest.raises(STOPPED, match="counts of rank 0, expert 0 is -"):
        jax.block_until_ready(plan(-jnp.asarray(counts) - 1))


def test_without_a_planning_module_the_host_cannot_be_called(monkeypatch):
    monkeypatch.setattr(custom_calls, "PLANNING_MODULE", "jax_moe_lb._absent_planning")
    with pytest.raises(RuntimeError, match=r"call_host is set, but jax_moe_lb\._planning was not built"):
        exact(np.ones((2, 4), np.int32), 3, 2, call_host=True)
    # NumPy arrays are then planned by a JAX program.
    assert isinstance(exact(np.ones((2, 4), np.int32), 3, 2)[0], np.ndarray | jax.Array)


@pytest.mark.slow
def test_a_tpu_needs_no_custom_call():
    plan = jax.vmap(lambda counts: exact(counts, 3, 4))
    traced = jax.jit(plan).trace(jnp.ones((2, 4, 8), jnp.int32))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "moe_lb" not in text
    assert "callback" not in text
    assert "stablehlo.while" in text
