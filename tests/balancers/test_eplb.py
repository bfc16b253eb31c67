from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Chain, HostCallback, Plan, Topology
from jax_moe_lb.balancers import EPLB, EPLBPlus
from jax_moe_lb.balancers.eplb import MAX_EVERY, History, mean, no_history, observe
from jax_moe_lb.core import check_plan, load, plain_plan
from tests.balancers.plans import replay as replay_plans

TOPOLOGY, SLOTS = Topology.flat(8, 4), 4


replay = partial(replay_plans, domain=4, slots=SLOTS)


def draw(seed, scale=300):
    return WORKLOADS[seed % len(WORKLOADS)].counts(seed, 8, scale, 16, 2)


def replicas(placement):
    return [set(row[2:][row[2:] >= 0].tolist()) for row in placement]


def exact_plan(tokens):
    counts = np.zeros((8, len(tokens)), np.int32)
    counts[0] = tokens
    return EPLBPlus().rebalance(counts, plain_plan(counts, TOPOLOGY, SLOTS), TOPOLOGY, ())[0]


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2, 3])
def test_plans_come_from_the_mean_of_the_steps_before(every):
    steps = [draw(seed) for seed in range(8)]
    for number, plan in enumerate(replay(EPLB(every), steps)):
        last = number // every * every
        if not last:
            assert replicas(plan.placement) == [set()] * 8
            continue
        tokens = sum(counts.sum(0, dtype=np.int32) for counts in steps[last - every : last]) // every
        assert replicas(plan.placement) == replicas(np.asarray(exact_plan(tokens).placement))


def test_tokens_are_split_evenly_over_the_copies():
    steps = [draw(3), draw(4)]
    plan = replay(EPLB(1), steps)[1]
    tokens = steps[1].sum(0)
    assert any(replicas(plan.placement))
    for expert in range(16):
        served = plan.quota[expert][(plan.placement == expert).any(1)]
        assert served.max() - served.min() <= 1
        assert served.sum() == tokens[expert]


def test_the_same_load_again_is_planned_as_if_it_were_known():
    counts = draw(2)
    plan = replay(EPLB(every=2), [counts] * 3)[2]
    np.testing.assert_array_equal(load(plan), load(exact_plan(counts.sum(0, dtype=np.int32))))


def test_a_change_of_load_is_seen_too_late():
    """The plan for a hot rank 0 is used with a hot rank 4."""
    hot = [np.zeros((8, 16), np.int32) for _ in range(2)]
    hot[0][:, 0], hot[1][:, 8] = 100, 100
    plans = replay(EPLB(every=1), [hot[0], hot[0], hot[1]])
    assert [int(load(plan).max()) for plan in plans] == [800, 200, 800]


def test_sums_of_history_do_not_overflow():
    history, every = no_history(3), 5
    for tokens in ([2**31 - 1, 4, 0], [2**31 - 1, 4, 1], [2**31 - 2, 4, 0], [2**31 - 1, 4, 0], [2**31 - 1, 3, 0]):
        history = observe(history, jnp.array(tokens, jnp.int32), every)
    assert mean(history).tolist() == [2**31 - 2, 3, 0]
    history = observe(history, jnp.array([MAX_EVERY + 7, 0, 0], jnp.int32), every)
    assert (int(history.steps), history.whole.tolist(), history.rest.tolist()) == (1, [1, 0, 0], [7, 0, 0])
    # The longest history, of the highest loads: each step adds 46341 times the base, and 41707.
    largest = np.int32(2**31 - 1)
    whole, rest = (MAX_EVERY * np.int32([part, 0]) for part in divmod(int(largest), MAX_EVERY))
    longest = History(np.array(MAX_EVERY, np.int32), whole, rest)
    assert mean(longest).tolist() == mean(jax.tree.map(jnp.asarray, longest)).tolist() == [largest, 0]


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("every", [2, 4, 9])
def test_restored_loads_keep_their_weight(xp, every):
    """Four steps of another `every` precede."""
    rng, history = np.random.default_rng(0), no_history(4)
    steps = rng.integers(0, 2**20, (max(every, 4), 4), dtype=np.int32)
    for number, tokens in enumerate(steps):
        history = observe(history, xp.asarray(tokens), 4 if number < 4 else every)
    assert int(history.steps) == len(steps)
    np.testing.assert_array_equal(mean(history), steps.sum(0) // len(steps))
    np.testing.assert_array_equal(mean(no_history(4)), 0)


def test_a_restored_state_plans_from_the_mean_of_its_steps():
    steps = [draw(seed) for seed in range(3)]
    state = EPLB(every=5).init((8, 16))
    for counts in steps:
        plan, state = EPLB(every=5).rebalance(counts, plain_plan(counts, TOPOLOGY, SLOTS), TOPOLOGY, state)
    plan, state = EPLB(every=2).rebalance(counts, plain_plan(counts, TOPOLOGY, SLOTS), TOPOLOGY, state)
    expected = exact_plan(sum(counts.sum(0, dtype=np.int32) for counts in steps) // 3)
    assert replicas(plan.placement) == replicas(np.asarray(expected.placement))
    assert int(state.history.steps) == 1


@pytest.mark.slow
def test_a_slot_that_is_taken_is_passed_over():
    """Another balancer fills the first replica slot of rank 1, sometimes with EPLB's own expert for it."""
    steps = [draw(seed) for seed in (5, 5, 6)]

    def put(counts, plan, topology):
        placement = plan.placement.copy()
        placement[1, 2] = [1, 6][int(counts.sum()) % 2]
        return Plan(placement, plan.quota, domain=plan.domain)

    plans = replay(Chain((HostCallback(put), EPLB(every=1))), steps)
    assert all(plan.placement[1, 2] in (1, 6) for plan in plans)


def test_garbage_in_the_state_gives_a_legal_plan():
    rng = np.random.default_rng(0)
    for held in (np.ones((8, 16), bool), rng.random((8, 16)) < 0.5):
        for steps in (0, 1, 9):
            history = History(np.array(steps, np.int32), *rng.integers(0, 2**20, (2, 16), np.int32))
            counts = draw(1)
            state = type(EPLB().init((8, 16)))(history, held)
            plan, _ = EPLB().rebalance(counts, plain_plan(counts, TOPOLOGY, SLOTS), TOPOLOGY, state)
            check_plan(plan, counts)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (EPLB().init((8, 32)), r"state.history.whole is int32\[32\]; expected int32\[16\], for counts \[8, 16\]"),
        (EPLB().init((4, 16)), r"state.held is bool\[4, 16\]; expected bool\[8, 16\]"),
        ((), r"state is PyTreeDef.*; expected PyTreeDef.*_State"),
    ],
)
def test_a_history_of_another_shape_is_refused(state, message):
    counts = draw(0)
    with pytest.raises(ValueError, match=message):
        EPLB().rebalance(counts, plain_plan(counts, TOPOLOGY, SLOTS), TOPOLOGY, state)
