"""Planners of placements and quotas follow their rules, written in plain Python, in all implementations."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_moe_lb import _planning
from jax_moe_lb.planners.eplb import round_robin
from tests import released_ultraep
from tests.marks import parametrize
from tests.planners.planner_cases import FORMS, assert_same, draw_counts, draw_placement, draw_plan, draw_tokens


def eplb_plus_rule(tokens, placement, domain):
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


def fastermoe_rule(placement, quota, counts, domain, min_saved):
    """Apply the rule of `ffi/planning/fastermoe.h` literally."""
    placement, quota = placement.copy(), quota.copy()
    num_experts, num_ranks = quota.shape
    home = np.arange(num_experts) // (num_experts // num_ranks)
    for first in range(0, num_ranks, domain):
        ranks = range(first, first + domain)
        while True:
            load = quota.sum(0)
            giver = max(ranks, key=lambda r: (load[r], -r))
            others = [r for r in ranks if r != giver]
            able = [
                e
                for e in range(num_experts)
                if home[e] == giver and quota[e, giver] == counts[:, e].sum() and (placement == e).sum() == 1
            ]
            if not able or any(-1 not in placement[r] for r in others):
                break
            expert = max(able, key=lambda e: (quota[e, giver], -e))
            row = quota[expert].copy()
            row[others] = counts[others, expert]
            row[giver] -= row[others].sum()
            after = load - quota[expert] + row
            if load[ranks].max() - after[ranks].max() < min_saved:
                break
            quota[expert] = row
            for rank in others:
                placement[rank, list(placement[rank]).index(-1)] = expert
    return placement, quota


def feplb_rule(placement, quota, domain, num_dynamic, max_num_dyn, tau, skip):
    """Apply the rule of `ffi/planning/feplb.h` literally."""
    placement, quota = placement.copy(), quota.copy()
    num_experts, num_ranks = quota.shape
    home = np.arange(num_experts) // (num_experts // num_ranks)
    served = quota[np.arange(num_experts), home].copy()
    dynamic, taken = set(), np.zeros(num_ranks, int)
    for rank in range(num_ranks):
        mine = sorted(np.flatnonzero(home == rank), key=lambda e: (-served[e], e))
        dynamic |= set(mine[:num_dynamic])
    for first in range(0, num_ranks, domain):
        ranks = range(first, first + domain)
        moved = True
        while moved:
            moved, load = False, quota.sum(0)
            giver = max(ranks, key=lambda r: (load[r], -r))
            experts = sorted((e for e in dynamic if home[e] == giver), key=lambda e: (-served[e], e))
            for expert in experts if skip else experts[:1]:
                able = [
                    r for r in ranks if -1 in placement[r] and taken[r] < max_num_dyn and expert not in placement[r]
                ]
                taker = min(able, key=lambda r: (load[r], r), default=None)
                if taker is None or served[expert] < tau or load[taker] + served[expert] >= load[giver]:
                    continue
                placement[taker, list(placement[taker]).index(-1)] = expert
                quota[expert, taker] += served[expert]
                quota[expert, giver] = 0
                taken[taker] += 1
                dynamic.discard(expert)
                moved = True
                break
    return placement, quota


def ultraep_rule(*args):
    return tuple(released_ultraep.plan(*args)[:2])


def draw_heavy(rng, shape, empty, scale):
    """Return a placement, and heavy-tailed tokens, most of them at home."""
    num_ranks, num_home, slots, domain = shape
    placement = draw_placement(rng, num_ranks, num_home, slots, domain, empty)
    holds = (placement[:, :, None] == np.arange(num_ranks * num_home)).any(1).T
    popularity = rng.pareto(rng.choice([0.3, 1.0, 3.0]), (len(holds), 1)) + 0.01
    quota = scale * popularity / popularity.max() * np.where(holds, rng.random(holds.shape), 0)
    at_home = np.arange(len(holds))[:, None] // num_home == np.arange(num_ranks)
    return placement, np.where(at_home, quota, quota // 8).astype(np.int32)


def draw_any(rng, shape, most):
    """Return experts far from home or twice on a rank, quotas without a slot, many ties, and large numbers."""
    num_ranks, num_home, slots, domain = shape
    placement = draw_placement(rng, num_ranks, num_home, slots, domain)
    placement[:, num_home:] = rng.integers(-1, num_ranks * num_home, (num_ranks, slots - num_home))
    return placement, rng.integers(0, most + 1, (num_ranks * num_home, num_ranks), np.int32)


@dataclass(frozen=True)
class Planner:
    """Options of a planner to test, and its rule."""

    options: tuple[tuple, ...]  # values of the options after the ranks per domain
    scales: tuple[int, ...]  # numbers of tokens
    draw: Callable  # function `(rng, shape, empty, scale)` sampling legal operands
    rule: Callable | None = None
    draw_any: Callable | None = draw_any  # the same of illegal plans; `None` if the planner refuses these
    covers_any: bool = False  # whether the rule describes the plans of such operands


def any_tokens(rng, shape, most):
    placement, quota = draw_any(rng, shape, most)
    return quota[:, 0], placement


def any_placement(rng, shape, most):
    placement, quota = draw_any(rng, shape, most)
    return rng.integers(-1, len(quota), placement.shape, np.int32), quota


PLANNERS = {
    "eplb_plus": Planner(
        ((),),
        (2, 30, 5000),
        lambda rng, shape, empty, scale: (
            draw_tokens(rng, shape[0] * shape[1], scale),
            draw_placement(rng, *shape, empty),
        ),
        eplb_plus_rule,
        any_tokens,
    ),
    "fastermoe": Planner(
        ((1,), (40,)),
        (200,),
        lambda rng, shape, empty, _: draw_counts(rng, *shape, empty),
        fastermoe_rule,
        None,
    ),
    "feplb": Planner(
        # dynamic experts, experts taken by a rank, threshold, skip
        ((4, 8, 1, False), (4, 8, 1, True), (2, 1, 20, True)),
        (5, 200, 10**6),
        lambda rng, shape, *args: draw_plan(rng, *shape, *args),
        feplb_rule,
        covers_any=True,
    ),
    "greedy": Planner(
        ((1,), (5,)),
        (200, 10_000),
        lambda rng, shape, *args: draw_plan(rng, *shape, *args),
        draw_any=any_placement,
    ),
    "ultraep": Planner(
        # eps, least tokens of a replica
        ((0.01, 1024), (0.0, 7)),
        (3, 50, 5000, 100_000, 2**25),
        draw_heavy,
        ultraep_rule,
        covers_any=True,
    ),
}
TWO_DOMAINS = (6, 3, 5, 3)
# ranks, home experts, slots, ranks per domain
SHAPES = [(1, 1, 2, 1), (2, 1, 1, 2), (8, 1, 3, 8)]
MORE_SHAPES = [(1, 1, 1, 1), (4, 4, 6, 4), (8, 2, 4, 4), (4, 2, 3, 1)]


@cache
def compiled(name):
    """Return both implementations in JAX; the arguments after the operands are static."""
    planner, operands = PLANNERS[name], 3 if name == "fastermoe" else 2
    static = range(operands, operands + 1 + len(planner.options[0]))
    return [jax.jit(one, static_argnums=tuple(static)) for one in FORMS[name]]


def assert_all_agree(name, operands, domain, options, rule=None):
    """Compare all implementations, and the rule if given; return placement and quota."""
    args = *operands, domain, *options
    run, reference = compiled(name)
    want = tuple(map(np.asarray, reference(*args)))
    for one in (run, getattr(_planning, name), *([] if rule is None else [rule])):
        assert_same(one(*args), want)
    # No planner loses or makes tokens.
    tokens = operands[0] if name == "eplb_plus" else operands[1].sum(1)
    np.testing.assert_array_equal(want[1].sum(1, dtype=np.int64), tokens)
    return want


@pytest.mark.slow
@parametrize(
    "name, shape, options",
    # Each shape with the first options, and all options with two domains.
    [
        *((name, TWO_DOMAINS, options) for name, one in PLANNERS.items() for options in one.options),
        *((name, shape, one.options[0]) for name, one in PLANNERS.items() for shape in SHAPES),
    ],
    [case for name, one in PLANNERS.items() for case in product([name], SHAPES + MORE_SHAPES, one.options)],
    ids=str,
)
@settings(max_examples=50, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), is_legal=st.booleans())
def test_all_implementations_follow_the_rule(name, shape, options, data, seed, is_legal):
    planner, rng = PLANNERS[name], np.random.default_rng(seed)
    if is_legal or planner.draw_any is None:
        empty, scale = data.draw(st.sampled_from([1.0, 0.6, 0.1])), data.draw(st.sampled_from(planner.scales))
        assert_all_agree(name, planner.draw(rng, shape, empty, scale), shape[3], options, planner.rule)
    else:
        operands = planner.draw_any(rng, shape, data.draw(st.sampled_from([0, 1, 100, 2**31 // 260])))
        assert_all_agree(name, operands, shape[3], options, planner.rule if planner.covers_any else None)


@pytest.mark.slow
def test_cases_of_fastermoe_copy_experts():
    rng, copies = np.random.default_rng(0), 0
    for _ in range(50):
        operands = draw_counts(rng, *TWO_DOMAINS, 1.0)
        placement, _ = assert_all_agree("fastermoe", operands, 3, (1,), fastermoe_rule)
        copies += int((placement >= 0).sum() - (operands[0] >= 0).sum())
    assert copies > 50


@pytest.mark.slow
def test_cases_of_ultraep_reach_the_search():
    """Limits not tried by the ladder, below the largest load."""
    found, rng = 0, np.random.default_rng(0)
    for _ in range(300):
        placement, quota = draw_heavy(rng, (8, 2, 3, 8), 1.0, 5000)
        *_, (limit,) = released_ultraep.plan(placement, quota, 8, 0.0, 7)
        load = quota.sum(0)
        low, step = -(-load.sum() // 8), max(1, -(-load.max() // 100))
        found += limit < load.max() and limit not in (low, low + step, low + 2 * step)
    assert found >= 10


def table(*rows):
    return np.array(rows, np.int32)


PAIR = table([0, -1], [1, -1])
LARGEST = [
    ("eplb_plus", (table(2**31 - 1, 0), PAIR), 2, ()),
    ("greedy", (PAIR, np.diag(table(2**31 - 1, 0))), 2, (1,)),
    ("fastermoe", (PAIR, table([2**31 - 1, 0], [0, 0]), table([2**30, 0], [2**30 - 1, 0])), 2, (1,)),
    ("feplb", (table([0, 1, -1], [2, 3, -1]), table([2**30, 0], [2**30 - 1, 0], [0, 0], [0, 0])), 2, (2, 8, 1, False)),
    *(
        ("ultraep", (table([0, -1], [1, -1], [2, -1]), np.diag(table(2**31 - 1, 0, 0))), 3, (eps, 1))
        for eps in (0.0, 0.01, 1.0)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "operands", "domain", "options"), LARGEST)
def test_the_largest_loads(name, operands, domain, options):
    _, quota = assert_all_agree(name, operands, domain, options)
    if domain == 2:
        assert quota.sum(0).max() == 2**30


def test_round_robin_gives_the_rest_to_the_lower_ranks():
    quota = round_robin(np.array([8, 3, 5], np.int32), np.array([[0, 2], [1, 0], [2, 0]], np.int32))
    assert quota.tolist() == [[3, 3, 2], [0, 3, 0], [3, 0, 2]]
