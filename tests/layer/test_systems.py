import jax
import numpy as np
import pytest

from jax_moe_lb import Buffers, Chain, Cost, System, Topology, exact, feplb, greedy, hybridep, rails, two_tier, ultraep
from jax_moe_lb.balancers import Exact, Greedy, HybridEP, LayerCost, RailS, UltraEP
from jax_moe_lb.core import load, plain_plan
from jax_moe_lb.planners.exact_search import exact_in_jax
from tests.layer_cases import make_layer, make_mesh


@pytest.mark.parametrize(
    ("system", "topology", "why"),
    [
        (hybridep(2), Topology.flat(8), "expert domains have one rank each; expected replica_slots of at least 8"),
        (hybridep(8), Topology.flat(8), None),
        (hybridep(8), Topology.flat(8, ranks_per_domain=1), "domains have one rank each, so no expert can move"),
        (System(HybridEP(1), replica_slots=8), Topology.flat(8), "domain_size is 1, so no expert can move"),
        (System(HybridEP(2), replica_slots=8), Topology.flat(8), None),
        (rails(), Topology.flat(8), "all ranks are in one node, so no row uses a rail"),
        (rails(), Topology.flat(8, ranks_per_domain=4), "rails_per_node is 1, so there is no choice of rails"),
        (greedy(0), Topology.flat(8), "replica_slots is 0"),
        (System(Chain((Greedy(), RailS())), replica_slots=2), Topology.flat(8), "all ranks are in one node"),
        (greedy(2), Topology.flat(8), None),
        (greedy(0), Topology.flat(1), None),
        (System(), Topology.flat(8), None),
    ],
)
def test_a_system_that_can_do_nothing_says_why(system, topology, why):
    said = system.no_op_reason(topology, num_experts=64)
    assert said == why or said.startswith(why)


@pytest.mark.slow
def test_a_layer_warns_of_it():
    mesh = make_mesh((8,), ("expert",))
    with pytest.warns(UserWarning, match="cannot balance anything: expert domains have one rank each"):
        make_layer(mesh, "hybridep", (8, 64, 8))


def test_what_is_left_to_the_layer_is_derived_from_its_sizes():
    sizes = LayerCost(num_copies=6400, expert_bytes=100, gradient_bytes=200, token_flops=7)
    chain = Chain((UltraEP(), Exact(cost=Cost()), UltraEP(min_tokens=3), Exact())).sized(sizes)
    first, second, third, fourth = chain.balancers
    assert (first.min_tokens, third.min_tokens, fourth) == (100, 3, Exact())
    assert second.cost == Cost(expert_bytes=400.0, token_flops=28.0, gradient_bytes=200.0, num_copies=6400)
    counts = np.ones((2, 2), np.int32)
    with pytest.raises(ValueError, match=r"Cost.token_flops is None; expected a number outside a layer"):
        Exact(cost=Cost()).rebalance(counts, plain_plan(counts, Topology.flat(2), 2), Topology.flat(2), ())


@pytest.mark.slow
def test_two_tiers_keep_what_relocation_needs():
    mesh = make_mesh((2, 2), ("node", "expert"))
    moving, staying = (
        make_layer(mesh, system, topology=Topology.from_mesh(mesh, ("node", "expert")))
        for system in (two_tier(1), "exact")
    )
    assert None not in (moving.homes, moving.loads)
    assert (staying.homes, staying.loads) == (None, None)


@pytest.mark.parametrize(
    ("system", "topology", "rounds"),
    [
        (exact(2), Topology.flat(8), 1),
        (exact(1), Topology.flat(8), 8),
        (exact(2), Topology.flat(8, ranks_per_domain=4), 2),
        (two_tier(2), Topology.flat(8), 1),
        (feplb(4), Topology.flat(8), 4),
        (ultraep(2, Buffers(headroom=8.0)), Topology.flat(8), 1),
        (System(Exact(max_fan_out=2), replica_slots=2), Topology.flat(8), 8),
    ],
)
def test_the_rounds_that_a_layer_needs_at_most(system, topology, rounds):
    assert system.max_rounds_bound(topology, num_experts=16, num_copies=4096) == rounds


def hard_counts(shapes):
    """Yield difficult counts: few hot experts, many equal ones on one rank, heavy tails."""
    rng = np.random.default_rng(0)
    draws = (
        lambda n: rng.dirichlet(np.full(n, 0.1)),
        lambda n: np.exp(3 * rng.normal(size=n)),
        lambda n: (rng.random(n) < 0.3) * rng.random(n) + 1e-9,
        lambda n: (np.arange(n) < n // 4) + 1e-3 * rng.random(n),
    )
    for trial in range(400):
        num_ranks, num_home = shapes[trial % len(shapes)]
        share = draws[trial % 4](num_ranks * num_home)
        total = rng.multinomial(1000 * num_ranks, share / share.sum())
        counts = rng.multinomial(total, np.full(num_ranks, 1 / num_ranks)).T.astype(np.int32)
        yield counts, Topology.flat(num_ranks), num_home, min(2 * num_home, num_ranks * num_home)


@pytest.mark.slow
def test_exact_keeps_the_bound_that_it_promises():
    for counts, topology, num_home, slots in hard_counts([(2, 4), (3, 2), (8, 1), (8, 2), (4, 4)]):
        plan, _ = Exact().rebalance(counts, plain_plan(counts, topology, slots), topology, ())
        assert load(plan).max() <= Exact().bound(topology, num_home, slots) * 1000 + 1


@pytest.mark.thorough
def test_exact_in_jnp_keeps_it_too():
    run = jax.jit(lambda counts: exact_in_jax(counts, 4, 8, 0.01, 2**63 - 1, True)[1].sum(0).max())
    for counts, topology, num_home, slots in hard_counts([(8, 2)]):
        assert int(run(counts)) <= Exact().bound(topology, num_home, slots) * 1000 + 1
