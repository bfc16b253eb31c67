import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Plan, _planning
from jax_moe_lb.core import check_plan
from jax_moe_lb.planners.exact import UNBOUNDED, check_shapes, exact
from tests.planners.planner_cases import STOPPED, assert_same

RUN = jax.jit(exact, static_argnums=(1, 2, 3, 4, 5))

# Digests of plans, equal to those of an independent form in plain Python, by ranks, home experts, slots, ranks per
# domain, and tokens. Record them again only for a change of the search.
PLANS = {
    (3, 4, 5, 3, 300): "04fca0abd89e986d",
    (3, 4, 5, 3, 10**6): "81f00cd2313c7c83",
    (8, 2, 3, 8, 300): "ee41ba4bd82f6c97",
    (8, 2, 3, 8, 10**6): "b8385075cca331a5",
    (8, 4, 6, 4, 300): "041e073e7e30ebeb",
    (8, 4, 6, 4, 10**6): "628a518a1a3c7b8f",
    (12, 3, 4, 12, 300): "8ef38405a8a501e7",
    (12, 3, 4, 12, 10**6): "6b0061b4fdcbb673",
    (6, 2, 9, 2, 300): "6e90bc0ac7028a90",
    (6, 2, 9, 2, 10**6): "5f122210bfa87046",
    (2, 1, 2, 1, 300): "08d09e8ec85a4e9f",
    (2, 1, 2, 1, 10**6): "576a69ec6c16fdfd",
}


def draw_counts(rng, num_ranks, num_home, scale):
    """Return counts of uneven experts on uneven ranks, each mostly from a few ranks."""
    popularity = rng.lognormal(0, 0.6, num_ranks * num_home) * np.repeat(rng.lognormal(0, 0.5, num_ranks), num_home)
    tokens = np.floor(scale * popularity / popularity.sum()).astype(np.int64)
    starts = rng.dirichlet(np.full(num_ranks, 0.3), len(tokens))
    return np.stack([rng.multinomial(n, p) for n, p in zip(tokens, starts, strict=True)], 1).astype(np.int32)


@pytest.mark.parametrize("case", PLANS, ids=str)
def test_plans_are_the_recorded_ones(case):
    *shape, slots, domain, scale = case
    # The stream of this generator is the same in all releases of NumPy.
    rng, digest = np.random.RandomState(0), hashlib.sha256()
    for eps, max_fan_out, localize in [(0.0, UNBOUNDED, True), (0.01, UNBOUNDED, False), (0.05, 2, True)]:
        counts = draw_counts(rng, *shape, scale)
        plan = _planning.exact(counts, slots, domain, eps, max_fan_out, localize)
        check_plan(Plan(*plan, domain=domain), counts)
        for array in plan:
            digest.update(array.tobytes())
    assert digest.hexdigest()[:16] == PLANS[case]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 2, 3, 8), (6, 2, 9, 2)], ids=str)
def test_a_program_plans_as_the_host(shape):
    *sizes, slots, domain = shape
    counts = draw_counts(np.random.RandomState(0), *sizes, 10**6)
    for options in [(0.0, UNBOUNDED, True), (0.05, 2, False)]:
        assert_same(RUN(counts, slots, domain, *options), _planning.exact(counts, slots, domain, *options))


def best_max_loads(tokens, num_ranks, holders):
    """Return the lowest maximum load of each placement, from the densest set of ranks containing all holders of its
    experts.
    """
    best = np.zeros(len(holders), np.int64)
    for size in range(1, num_ranks + 1):
        for members in itertools.combinations(range(num_ranks), size):
            outside = [rank for rank in range(num_ranks) if rank not in members]
            stuck = (~holders[:, :, outside].any(2)) @ tokens
            best = np.maximum(best, -(-stuck // size))
    return best


def all_placements(num_ranks, num_home):
    """Return the holders of experts, `[placements, E, R]`, with one replica slot per rank."""
    num_experts = num_ranks * num_home
    choices = [[None, *(e for e in range(num_experts) if e // num_home != rank)] for rank in range(num_ranks)]
    home = np.arange(num_experts)[:, None] // num_home == np.arange(num_ranks)
    placements = []
    for replicas in itertools.product(*choices):
        holders = home.copy()
        for rank, expert in enumerate(replicas):
            if expert is not None:
                holders[expert, rank] = True
        placements.append(holders)
    return np.stack(placements)


def test_small_cases_are_solved_to_the_optimum():
    """Every placement of three ranks with four experts and one replica slot each, with its best quota."""
    rng, above_mean = np.random.default_rng(0), 0
    placements = all_placements(3, 4)
    for _ in range(60):
        tokens = rng.integers(1, np.repeat([1000, 500, 50], 4))
        counts = np.zeros((3, 12), np.int32)
        counts[0] = tokens
        placement, quota = _planning.exact(counts, 5, 3, 0.0)
        check_plan(Plan(placement, quota, domain=3), counts)
        assert quota.sum(0).max() == best_max_loads(tokens, 3, placements).min()
        above_mean += quota.sum(0).max() > -(-tokens.sum() // 3)
    assert above_mean >= 10


COUNTS = np.ones((2, 4), np.int32)


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        (np.ones((2, 3), np.int32), (3, 2), r"counts has 3 experts; expected a positive multiple of the 2 ranks"),
        (COUNTS, (1, 2), r"num_slots is 1; expected at least the 2 home experts"),
        (COUNTS, (3, 3), r"domain is 3; expected a divisor of the 2 ranks"),
        (COUNTS, (3, 2, -0.1), r"eps is -0.1; expected a finite number, at least 0"),
        (COUNTS, (3, 2, float("nan")), r"eps is nan; expected"),
        (COUNTS, (3, 2, float("inf")), r"eps is inf; expected"),
        (COUNTS, (3, 2, 0.0, -1), r"max_fan_out is -1; expected 0 to"),
    ],
)
def test_bad_arguments_are_refused(counts, options, message):
    for array in (counts, jnp.asarray(counts)):
        with pytest.raises(ValueError, match=message):
            exact(array, *options)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (COUNTS[0], r"counts has shape \(4,\); expected \[R, E\], both at least 1"),
        (COUNTS[:0], r"counts has shape \(0, 4\); expected \[R, E\], both at least 1"),
        (1.5 * COUNTS.astype(np.float32), r"counts has dtype float32; expected integers"),
        (COUNTS > 0, r"counts has dtype bool; expected integers"),
    ],
)
def test_what_is_no_array_of_counts_is_refused(counts, message):
    with pytest.raises(ValueError, match=message):
        check_shapes(counts, 3, 2)  # `exact` itself has its annotations checked in tests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (-COUNTS, r"counts of rank 0, expert 0 is -1; expected at least 0"),
        (COUNTS << 29, r"counts sum to 4294967296 tokens; expected at most 2147483647"),
    ],
)
def test_bad_entries_stop_the_program(counts, message):
    with pytest.raises(STOPPED, match=message):
        jax.block_until_ready(RUN(jnp.asarray(counts), 3, 2))
    with pytest.raises(ValueError, match=message):
        _planning.exact(counts, 3, 2)


@pytest.mark.parametrize(("more", "message"), [(2**32, "counts sum to 17179869176"), (-(2**32), "is -2147483648")])
def test_counts_wider_than_int32_do_not_wrap_round(more, message, x64):
    counts = COUNTS.astype(np.int64) + more
    for array in (counts, jnp.asarray(counts)):
        with pytest.raises(STOPPED, match=message):
            jax.block_until_ready(exact(array, 3, 2))
