import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import (
    Chain,
    Cost,
    Exact,
    Greedy,
    LayerFacts,
    RailS,
    System,
    TopK,
    Topology,
    UltraEP,
    greedy,
    hybridep,
    plain_plan,
    rails,
    two_tier,
    ultraep,
)
from jax_moe_lb.nn import MoE
from tests.layer import assert_close, make_mesh


@pytest.mark.parametrize(
    ("system", "topology", "why"),
    [
        (hybridep(2), Topology.flat(8), "expert domains have one rank each; expected replica_slots of at least 8"),
        (hybridep(8), Topology.flat(8), None),
        (hybridep(8), Topology.flat(8, ranks_per_domain=1), "domains have one rank each, so that no expert may move"),
        (rails(), Topology.flat(8), "all ranks are of one node, and no row takes a rail"),
        (rails(), Topology.flat(8, ranks_per_domain=4), "rails_per_node is 1, which leaves no choice"),
        (greedy(0), Topology.flat(8), "replica_slots is 0"),
        (System(Chain((Greedy(), RailS())), replica_slots=2), Topology.flat(8), "all ranks are of one node"),
        (greedy(2), Topology.flat(8), None),
        (greedy(0), Topology.flat(1), None),
        (System(), Topology.flat(8), None),
    ],
)
def test_a_system_that_can_do_nothing_says_why(system, topology, why):
    said = system.why_idle(topology, num_experts=64)
    assert said == why or said.startswith(why)


def test_a_layer_warns_of_it():
    mesh = make_mesh((8,), ("expert",))
    with pytest.warns(UserWarning, match="cannot balance anything: expert domains have one rank each"):
        MoE(8, 8, 64, TopK(2), mesh=mesh, system="hybridep", rngs=nnx.Rngs(0))


def test_what_is_left_to_the_layer_is_derived_from_its_sizes():
    sizes = LayerFacts(num_copies=6400, expert_bytes=100, gradient_bytes=200, token_flops=7)
    chain = Chain((UltraEP(), Exact(cost=Cost()), UltraEP(min_tokens=3), Exact())).sized(sizes)
    first, second, third, fourth = chain.balancers
    assert (first.min_tokens, third.min_tokens, fourth) == (100, 3, Exact())
    assert second.cost == Cost(expert_bytes=400.0, token_flops=21.0)
    counts = np.ones((2, 2), np.int32)
    with pytest.raises(ValueError, match=r"Cost.expert_bytes is None; expected a number off any layer"):
        Exact(cost=Cost()).rebalance(counts, plain_plan(counts, Topology.flat(2), 2), Topology.flat(2), ())


@pytest.mark.slow
def test_small_layers_of_ultraep_are_level():
    """Of 64 copies on a rank none would move under the published least of 1024."""
    mesh = make_mesh((8,), ("expert",))
    skewed = jnp.zeros((8, 16)).at[:, :2].set(4.0)
    layer, reference = (MoE(8, 8, 16, TopK(2), mesh=mesh, system=s, rngs=nnx.Rngs(0)) for s in (ultraep(2), "plain"))
    for one in (layer, reference):
        one.kernel[...] += skewed
    x = jnp.abs(jax.random.normal(jax.random.key(0), (256, 8)))
    y, stats = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert_close(y, nnx.jit(lambda layer, x: layer(x)[0])(reference, x), 1e-5)
    assert float(stats.imbalance_before[0]) > 3
    assert float(stats.imbalance_after[0]) < 1.2


def test_two_tiers_keep_what_relocation_needs():
    mesh = make_mesh((2, 2), ("node", "expert"))
    topology = Topology.from_mesh(mesh, ("node", "expert"))
    layer = MoE(8, 8, 8, TopK(2), mesh=mesh, topology=topology, system=two_tier(1), rngs=nnx.Rngs(0))
    assert layer.homes is not None
    assert layer.loads is not None
    assert MoE(8, 8, 8, TopK(2), mesh=mesh, topology=topology, system="exact", rngs=nnx.Rngs(0)).homes is None
