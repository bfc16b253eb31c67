import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Chain, Cost, Plan, System, Topology, balancers, exact
from jax_moe_lb.balancers import Exact, Greedy, LayerCost
from jax_moe_lb.balancers.cost import (
    busiest,
    lowest_max_load,
    min_saved,
    moved_copies,
    slowest_bytes_per_s,
)
from jax_moe_lb.core import Level, check_plan, load, plain_plan, traffic
from jax_moe_lb.sim import Cluster, Links, ModelShape
from jax_moe_lb.sim.work import layer_facts
from jax_moe_lb.transport import Relay

# The example of docs/systems/exact.md. Rank 1 falls from 15 token copies to the mean, 10, with one replica from each of
# three ranks. At 100 bytes and 1000 operations per second, a replica takes `expert_bytes / 100` seconds and a
# token copy one.
COUNTS = np.diag([12, 15, 7, 6]).astype(np.int32)
MODEL, CLUSTER = ModelShape(1, 64, 64, 8, 2, 64), Cluster((Links("gpu", 8, 1e9),))
TOPOLOGY = Topology((Level("gpu", 4, bytes_per_s=100.0),), 4, flops_per_s=1000.0)
FREE = Cost(expert_bytes=1.0, token_flops=1000.0)


def rebalance(counts, cost, topology=TOPOLOGY, slots=2):
    balancer = Exact(eps=0.0, cost=cost)
    return balancer.rebalance(counts, plain_plan(counts, topology, slots), topology, ())[0]


JITTED = jax.jit(rebalance, static_argnums=(1, 2, 3))


def max_loads(cost, counts=COUNTS, **options):
    """Return the maximum load of the host plan and of the jitted plan, which must be equal."""
    host, jitted = rebalance(counts, cost, **options), JITTED(jnp.asarray(counts), cost, **options)
    check_plan(jitted, counts)
    np.testing.assert_array_equal(jitted.placement, host.placement)
    np.testing.assert_array_equal(jitted.quota, host.quota)
    return int(load(host).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cost", "max_load"),
    [
        # One replica of each busy rank against the five saved token copies, 5 s.
        (Cost(499.0, 1000.0), 10),
        # A further round of 2 s beside the saved copies.
        (Cost(700.0, 1000.0, round_rows=12, round_s=2.0), 15),
    ],
)
def test_it_declines_what_does_not_pay(cost, max_load):
    assert max_loads(cost) == max_load


@pytest.mark.parametrize(
    ("cost", "max_load"),
    [
        # The other side of the limits above.
        (Cost(500.0, 1000.0), 15),
        (Cost(699.0, 1000.0, round_rows=12, round_s=2.0), 10),
        # Two seconds of seven are hidden.
        (Cost(699.0, 1000.0, gradient_bytes=200.0, overlap_s=3.0), 10),
        (Cost(700.0, 1000.0, gradient_bytes=200.0, overlap_s=3.0), 15),
        (Cost(699.0, 1000.0, gradient_bytes=200.0, overlap_s=1.9), 15),
        # A copy takes 0.5 s in its expert, and 0.495 s in exchanges of three quarters of its bytes.
        (Cost(497.0, 500.0, token_bytes=66.0), 10),
        (Cost(498.0, 500.0, token_bytes=66.0), 15),
        # The weights of a replica, without gradients, travel twice.
        (Cost(200.0, 1000.0, gradient_bytes=50.0, max_bytes=75.0), 10),
        (Cost(200.0, 1000.0, gradient_bytes=50.0, max_bytes=74.0), 15),
        # Products of a replica beyond its tokens.
        (Cost(1.0, 1000.0, slot_copies=4), 10),
        (Cost(1.0, 1000.0, slot_copies=5), 15),
        # A rank cannot serve more than 14, so replicas have no price.
        (Cost(1e6, 1000.0, max_rows=14), 10),
        (Cost(1e6, 1000.0, max_rows=15), 15),
        # The plain plan has another round of 2 s, two of them, or as many rounds as the balanced plan.
        (Cost(600.0, 1000.0, round_rows=14, round_s=2.0), 10),
        (Cost(600.0, 1000.0, round_rows=15, round_s=2.0), 15),
        (Cost(800.0, 1000.0, round_rows=7, round_s=4.0), 10),
        (Cost(900.0, 1000.0, round_rows=7, round_s=4.0), 15),
        (Cost(600.0, 1000.0, round_rows=8, round_s=2.0), 15),
        # More seconds than int32 has token copies.
        (Cost(1e9, 1000.0, round_rows=14, round_s=1e30), 10),
    ],
)
def test_what_else_a_plan_costs(cost, max_load):
    assert load(rebalance(COUNTS, cost)).max() == max_load


def test_the_time_of_many_replicas_fits_int32():
    counts, topology = np.zeros((2, 16), np.int32), Topology((Level("gpu", 2, 100.0),), 2, flops_per_s=1000.0)
    counts[0, :8] = 100
    for slot_copies, max_load in ((99, 500), (2**29, 800)):
        plan = rebalance(counts, Cost(1.0, 1000.0, slot_copies=slot_copies), topology, 16)
        assert load(plan).max() == max_load


def test_more_rows_than_int32_has_are_no_bound():
    cost = Cost(100.0, 1000.0, max_rows=2**40, round_rows=2**40, round_s=1.0)
    assert load(rebalance(COUNTS, cost)).max() == 10
    assert jax.eval_shape(lambda counts: rebalance(counts, cost), COUNTS).quota.shape == (4, 4)


def test_a_declined_plan_keeps_what_another_balancer_left():
    start = Greedy().rebalance(COUNTS, plain_plan(COUNTS, TOPOLOGY, 2), TOPOLOGY, ())[0]
    assert load(start).max() == 11
    for cost, max_load in ((FREE, 10), (dataclasses.replace(FREE, slot_copies=1), 11)):
        chain = Chain((Greedy(), Exact(eps=0.0, cost=cost)))
        plan, _ = chain.rebalance(COUNTS, plain_plan(COUNTS, TOPOLOGY, 2), TOPOLOGY, chain.init((4, 4)))
        assert load(plan).max() == max_load
        assert np.array_equal(plan.placement, start.placement) == (max_load == 11)


def test_replicas_that_go_pay_for_planning():
    """Every rank has an unused replica; the plan without replicas is as fast and moves no weights."""
    counts = np.diag([5, 5]).astype(np.int32)
    start = Plan(np.array([[0, 1], [1, 0]], np.int32), counts.copy(), domain=2)
    topology = dataclasses.replace(TOPOLOGY, levels=(Level("gpu", 2, bytes_per_s=100.0),), ranks_per_domain=2)
    plan, _ = Exact(cost=dataclasses.replace(FREE, expert_bytes=100.0)).rebalance(counts, start, topology, ())
    assert busiest(start) == 1
    assert busiest(plan) == 0


@pytest.mark.slow
def test_all_domains_are_declined_or_none():
    """The second domain alone would gain 2 copies, but no time, as it waits for the first, which gains 4."""
    topology = dataclasses.replace(TOPOLOGY, ranks_per_domain=2)
    counts = np.diag([20, 12, 10, 6]).astype(np.int32)
    assert lowest_max_load(plain_plan(counts, topology, 2)) == 16
    assert max_loads(Cost(399.0, 1000.0), counts, topology=topology) == 16
    assert max_loads(Cost(400.0, 1000.0), counts, topology=topology) == 20


@pytest.mark.slow
def test_the_planner_does_not_run_in_vain(monkeypatch):
    """Without the kernel, invalid counts raise no error if balancing cannot pay, as the planner does not run."""
    monkeypatch.setattr(balancers.exact, "fits_kernel", lambda *_: False)
    bad = COUNTS - 2 * np.eye(4, k=1, dtype=np.int32)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="counts of rank 0, expert 1 is -2"):
        jax.block_until_ready(JITTED(jnp.asarray(bad), FREE))
    jax.block_until_ready(JITTED(jnp.asarray(bad), Cost(1e6, 1000.0)))


def test_tokens_that_are_worth_a_time():
    assert [min_saved(cost_s, 2.0) for cost_s in (0.0, 1.9, 2.0, 5.0, -2.0, -3.0)] == [1, 1, 2, 3, 0, -1]
    assert min_saved(1e300, 1e-300) == 2**31 - 1
    assert min_saved(-1e300, 1e-300) == -(2**31) + 2


def test_a_domain_is_as_fast_as_its_slowest_level():
    levels = (Level("dc", 2), Level("node", 4, bytes_per_s=25.0), Level("gpu", 8, bytes_per_s=400.0))
    assert slowest_bytes_per_s(Topology(levels, 8), 8) == 400.0
    assert slowest_bytes_per_s(Topology(levels, 8), 32) == 25.0
    assert slowest_bytes_per_s(Topology(levels, 8), 1) == math.inf
    with pytest.raises(ValueError, match=r"Level\('dc'\).bytes_per_s is None; expected a finite rate"):
        slowest_bytes_per_s(Topology(levels, 8), 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops_per_s": None}, r"Topology.flops_per_s is None; expected a finite rate"),
        ({"levels": (Level("gpu", 4),)}, r"Level\('gpu'\).bytes_per_s is None; expected a finite rate"),
    ],
)
def test_missing_rates_are_named(change, message):
    topology = dataclasses.replace(TOPOLOGY, **change)
    for plan in (rebalance, JITTED):
        with pytest.raises(ValueError, match=message):
            plan(COUNTS, FREE, topology)


def test_plans_are_not_weighed_without_rates_unless_it_is_required():
    topology = dataclasses.replace(TOPOLOGY, flops_per_s=None)
    counts = COUNTS
    for cost in (Cost(1e6, 1000.0, required=False), Cost(required=False)):
        assert load(rebalance(counts, cost, topology)).max() == 10
    assert load(rebalance(counts, Cost(1e6, 1000.0, required=False))).max() == 15
    # The rates of a named device: 270 GB/s of link, 450 TFLOP/s.
    named = Cost(270e9, 450e12, device="h100", required=False)
    bare = dataclasses.replace(topology, levels=(Level("gpu", 4),))
    assert load(rebalance(counts, named, bare)).max() == 10
    assert load(rebalance(counts, dataclasses.replace(named, expert_bytes=10 * 270e9), bare)).max() == 15


MIXTRAL = LayerCost(8192, 352_321_536, 352_321_536, 8192, 352_321_536, slot_copies=256, device="h100")
"""A layer of Mixtral-8x7B on H100: a replica takes the time of about 1,700 token copies, of 8,192."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hot", "pays"), [(1.0, False), (1.1, False), (1.2, False), (1.25, True), (1.3, True), (2.0, True), (3.0, True)]
)
def test_by_the_rates_of_the_device_a_plan_is_kept_only_if_it_saves_time(hot, pays, monkeypatch):
    """The decision is a selection on integers, equal on the host and in one program without branches."""
    monkeypatch.setattr(balancers.exact, "fits_kernel", lambda *_: True)
    loads = np.array([hot, *[(8 - hot) / 7] * 7]) * 8192
    counts = np.tile(np.rint(loads / 8).astype(np.int32), (8, 1))
    topology, balancer = Topology((Level("gpu", 8),), 8), exact().balancer.sized(MIXTRAL)
    start = plain_plan(counts, topology, 3)
    plan, _ = balancer.rebalance(counts, start, topology, ())
    assert bool((plan.placement[:, 1:] >= 0).any()) == pays
    assert (load(plan).max() < load(start).max()) == pays
    program = jax.jit(lambda counts: balancer.rebalance(counts, plain_plan(counts, topology, 3), topology, ())[0])
    np.testing.assert_array_equal(program(jnp.asarray(counts)).quota, plan.quota)
    assert "conditional" not in program.lower(jnp.asarray(counts)).as_text("hlo")
    # A load above the rows of a rank is balanced at any price, and one above those of a round at that of a round.
    for change in ({"max_rows": 8602}, {"round_rows": 8602, "round_s": 0.02}):
        few = exact().balancer.sized(dataclasses.replace(MIXTRAL, **change))
        kept, _ = few.rebalance(counts, start, topology, ())
        assert load(kept).max() <= 8602


@pytest.mark.slow
def test_a_further_round_is_saved_by_the_rates_of_the_device():
    counts = np.tile(np.array([1126, *[1009] * 7], np.int32), (8, 1))
    topology, start = Topology((Level("gpu", 8),), 8), plain_plan(counts, Topology.flat(8), 3)
    for round_s, pays in ((1e-3, False), (1e-2, True)):
        balancer = exact().balancer.sized(dataclasses.replace(MIXTRAL, round_rows=8602, round_s=round_s))
        plan, _ = balancer.rebalance(counts, start, topology, ())
        assert (load(plan).max() <= 8602) == pays
    jitted = jax.jit(lambda counts, start: balancer.rebalance(counts, start, topology, ())[0])(counts, start)
    np.testing.assert_array_equal(jitted.quota, plan.quota)


def test_the_device_of_a_layer_is_that_of_the_program():
    assert exact().balancer.sized(MIXTRAL).cost.device == "h100"
    assert Exact(cost=Cost()).sized(MIXTRAL).cost.device is None
    assert Exact(cost=Cost(device="a100", required=False)).sized(MIXTRAL).cost.device == "a100"


@pytest.mark.parametrize("seed", range(8))
def test_no_limit_of_replicas_is_much_faster_than_the_chosen_plan(seed):
    """The chosen plan is within 2 % of the best of all limits, and no slower than the old plan."""
    rng = np.random.default_rng(seed)
    num_ranks, num_home = 8, int(rng.choice([1, 4, 16]))
    heat = rng.lognormal(0, rng.choice([0.5, 1.0, 1.5]), num_ranks * num_home)
    counts = rng.multinomial(4096, heat / heat.sum(), num_ranks).astype(np.int32)
    topology = Topology((Level("gpu", 8, bytes_per_s=1.0),), 8, flops_per_s=1.0)
    # A replica takes the time of 1 to 10 % of the mean load.
    replica = {"expert_bytes": float(rng.integers(40, 400)), "slot_copies": int(rng.integers(0, 100))}
    cost = Cost(**replica, token_flops=1.0, round_rows=int(rng.integers(2000, 8000)), round_s=float(seed * 200))
    balancer, start = Exact(cost=cost), plain_plan(counts, topology, num_home + 2)
    chosen, _ = balancer.rebalance(counts, start, topology, ())
    time = balancer._weighing(start, topology).time
    for limit in range(num_home * 8):
        plan = Exact(max_fan_out=limit).rebalance(counts, start, topology, ())[0]
        assert time(chosen) <= min(time(start), 1.02 * time(plan))


def one_hot(num_ranks):
    """Return counts of 8 ranks and more, where the expert of rank 0 is hot, with copies from all ranks."""
    counts = np.full((num_ranks, num_ranks), 8, np.int32)
    counts[:, 0] *= 10
    return counts


@pytest.mark.slow
def test_relays_pay_for_more_replicas_of_a_hot_expert():
    """The home of the expert sends two copies in place of eight, and gets all gradients."""
    counts = one_hot(16)
    topology = dataclasses.replace(TOPOLOGY, levels=(Level("gpu", 16, 100.0),), ranks_per_domain=16)
    found = {}
    for relays in (None, (4, 8, 2)):
        balancer = Exact(cost=Cost(800.0, 1000.0, gradient_bytes=100.0, relays=relays))

        def plan_of(counts, balancer=balancer):
            return balancer.rebalance(counts, plain_plan(counts, topology, 2), topology, ())[0]

        plan = plan_of(counts)
        found[relays] = int((plan.placement[:, 1] == 0).sum()), int(load(plan).max())
    # Of the mean load of 200, five replicas leave 214.
    assert found == {None: (5, 214), (4, 8, 2): (8, 202)}
    jax.tree.map(np.testing.assert_array_equal, jax.jit(plan_of)(counts), plan)


def test_copies_along_relays_are_those_of_the_planned_trees():
    topology = Topology((Level("gpu", 16, 1.0),), 16, flops_per_s=1.0)
    scale = Cost(1.0, 1.0, gradient_bytes=0.0, relays=(4, 8, 2)).scale(topology, 16, 16)
    for number in range(16):
        placement = np.full((16, 2), -1, np.int32)
        placement[:, 0], placement[1 : number + 1, 1] = np.arange(16), 0
        plan = Plan(placement, np.zeros((16, 16), np.int32), domain=16)
        sent = traffic(Relay().plan(plan), np.zeros((16, 16), np.int32)).fan_out
        assert moved_copies(plan, scale) == sent.max(), number


def test_a_system_with_relays_prices_them():
    facts = layer_facts(System(exact().balancer, Relay(max_relays=4), replica_slots=2), MODEL, CLUSTER)
    assert facts.relays == (4, 4, 2)
    assert exact().balancer.sized(facts).cost.relays == (4, 4, 2)
    assert layer_facts(exact(), MODEL, CLUSTER).relays is None


@pytest.mark.parametrize(("part", "shape"), [("relay", (4, 2)), ("rails", (4, 4, 1))])
def test_relays_and_rails_would_be_lost(part, shape):
    start = dataclasses.replace(plain_plan(COUNTS, TOPOLOGY, 2), **{part: np.zeros(shape, np.int32)})
    with pytest.raises(ValueError, match=rf"plan.{part} is set; expected None before"):
        Exact(cost=FREE).rebalance(COUNTS, start, TOPOLOGY, ())
