"""`jax.vmap` over microbatches or weights equals a loop over them, for every kind of transport."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError

from jax_moe_lb import Buffers, TopK, Topology, exact, feplb, plain
from jax_moe_lb.balancers import LayerCost
from jax_moe_lb.core import plain_plan
from jax_moe_lb.layer import CHECKPOINT_NAMES, systems
from jax_moe_lb.layer.systems import eplb, system_names
from jax_moe_lb.transport import Codec, CodecBase, GatherExpertDomain
from tests.layer_cases import (
    Case,
    assert_close,
    dense_with_gradients,
    expert_domains,
    make_layer,
    make_mesh,
    sharded_moe,
    with_gradients,
)
from tests.oracle import dense_moe

CASE = Case()


def microbatches(names, num_shards):
    """Return tokens of several microbatches, and as many targets."""
    x = jnp.stack([CASE.tokens(name, num_shards, "float32")[0] for name in names])
    return x, jnp.asarray(np.random.default_rng(3).normal(size=x.shape), "float32")


def stacked(results):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


AS_EXACT = {"eplb", "eplb_plus", "fastermoe", "greedy", "two_tier"}
"""Systems with the transport of `exact` and another planner; `test_planners.py` maps the planners."""


@pytest.mark.parametrize("name", [name for name in system_names() if name not in AS_EXACT])
@pytest.mark.thorough
def test_every_system_serves_one_microbatch_after_the_other(name):
    """Each microbatch has its own plan and number of rounds; outputs and gradients equal the dense layer."""
    mesh, system = make_mesh((2, 4), ("node", "gpu")), getattr(systems, name)(buffers=Buffers(headroom=0.4))
    if name == "feplb":
        # With enough headroom for all moved rows, the served plan equals the balancer's.
        system = replace(system, dispatch=replace(system.dispatch, moved_headroom=8.0))
    topology = Topology.from_mesh(mesh, ("node", "gpu"), ranks_per_domain=8, rails_per_node=4)
    x, target = microbatches(("zipf", "one_hot", "hot_rank"), 8)
    fixed = jnp.ones(x.shape[1], bool), *CASE.params("float32")
    run = jax.jit(jax.vmap(with_gradients(sharded_moe(mesh, topology, system)), (0, None, None, None, 0)))
    (y, stats), gradients = run(x, *fixed, target)
    dense = dense_with_gradients(TopK(2))
    want, want_gradients = stacked([dense(one, *fixed, wanted) for one, wanted in zip(x, target, strict=True)])
    assert_close((y, gradients), (want[0], want_gradients), 1e-5)
    numbers = 3 * CASE.width * CASE.mlp_dim
    facts = LayerCost(CASE.num_tokens * CASE.per_tok, 4 * numbers, 4 * numbers, 4 * CASE.width, 2 * numbers)
    balancer = system.balancer.sized(facts)
    for counts, quota in zip(np.asarray(stats.counts)[:, 0], stats.quota[:, 0], strict=True):
        start = plain_plan(counts, topology, CASE.num_experts // 8 + system.replica_slots)
        plan, _ = balancer.rebalance(counts, start, topology, balancer.init(counts.shape))
        np.testing.assert_array_equal(quota, plan.quota)
    assert stats.rounds.min() > 1


@pytest.mark.parametrize(
    "system", [plain(), feplb(2), exact(2, Buffers(0.4), dispatch="once")], ids=["plain", "feplb", "once"]
)
@pytest.mark.thorough
def test_weights_may_be_mapped_over_too(system):
    """An ensemble: separate layers for the same tokens."""
    mesh = make_mesh((2, 4), ("data", "expert"))
    run = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), system))
    (x,), (target,) = microbatches(("zipf",), 8)
    mask = jnp.ones(x.shape[0], bool)
    members = [jax.tree.map(lambda w, scale=scale: scale * w, CASE.params("float32")) for scale in (1.0, -0.5)]
    got = jax.jit(jax.vmap(run, (None, None, 0, 0, None)))(x, mask, *stacked(members), target)
    assert_close(got, stacked([run(x, mask, *member, target) for member in members]), 1e-5)


@pytest.mark.thorough
def test_with_remat_inside_and_a_gradient_outside():
    mesh = make_mesh((8,), ("expert",))
    layer = sharded_moe(mesh, Topology.from_mesh(mesh), feplb(2))
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
    x, target = microbatches(("zipf", "hot_rank"), 8)
    mask = jnp.ones(x.shape[1], bool)

    def loss(x, kernel, experts, one):
        return (jax.vmap(lambda x: one(x, mask, kernel, experts)[0])(x) * target).sum()

    def looped(x, kernel, experts):
        outputs = [dense_moe(one, kernel, experts, TopK(2), mask) for one in x]
        return (jnp.stack(outputs) * target).sum()

    args = (x, *CASE.params("float32"))
    got = jax.jit(jax.grad(lambda *args: loss(*args, jax.checkpoint(layer, policy=policy)), (0, 1, 2)))(*args)
    assert_close(got, jax.jit(jax.grad(looped, (0, 1, 2)))(*args), 1e-5)


@pytest.mark.thorough
def test_the_layer_of_expert_domains():
    mesh, domains = expert_domains(make_mesh((2, 4), ("dc", "gpu")), {"dc": 2, "gpu": 2}, ("dc", "gpu"))
    system = plain().replace(migrate=GatherExpertDomain(domains, Codec(2.0, CodecBase.SHARED, gradient_ratio=1.0)))
    layer = make_layer(mesh, system, (CASE.width, CASE.num_experts, 8))
    x, target = microbatches(("zipf", "one_hot"), 8)

    def each(layer, x, target):
        return nnx.value_and_grad(lambda layer: (layer(x)[0] * target).sum())(layer)

    got = nnx.jit(nnx.vmap(each, in_axes=(None, 0, 0)))(layer, x, target)
    assert_close(got, stacked([nnx.jit(each)(layer, a, b) for a, b in zip(x, target, strict=True)]), 1e-5)


@pytest.mark.slow
def test_a_layer_that_remembers_refuses_in_one_line():
    """A loop would carry the state between microbatches, which vmap cannot."""
    layer = make_layer(make_mesh((8,), ("expert",)), eplb(), (CASE.width, CASE.num_experts, 8))
    x, _ = microbatches(("zipf", "one_hot"), 8)
    with pytest.raises(TraceContextError, match="Cannot mutate BalancerState from a different trace level") as refused:
        jax.eval_shape(jax.vmap(layer), x)
    assert "\n" not in str(refused.value)
