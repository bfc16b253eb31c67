"""`balance` without the other libraries; `ci/adoption.sh` compares with them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jax_moe_lb
from jax_moe_lb import Experts, Topology, systems
from jax_moe_lb.core.experts import dense_ffn
from jax_moe_lb.integrations.blocks import BlockConfig, serve
from tests.layer_cases import make_mesh


def mesh_of(axis_type=AxisType.Auto):
    return make_mesh((4,), ("fsdp",), axis_type)


def moe_layer():
    """Return a block with the attributes and the module of Tunix' block."""

    class ShdConfig:
        exp_weight_edf = ("fsdp", None, "tp")

        def __hash__(self):
            return 0

        def __eq__(self, other):
            return type(self) is type(other)

    class MoELayer(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.shd_config, self.experts_per_tok, self.num_experts, self.dtype = ShdConfig(), 2, 8, jnp.float32
            self.router = nnx.Linear(16, 8, use_bias=False, rngs=rngs)
            self.gate_proj = nnx.Param(rngs.params.normal((8, 16, 24)) / 4)
            self.up_proj = nnx.Param(rngs.params.normal((8, 16, 24)) / 4)
            self.down_proj = nnx.Param(rngs.params.normal((8, 24, 16)) / 4)

        def __call__(self, x):
            scores = jax.nn.softmax(self.router(x), -1)
            weights, chosen = jax.lax.top_k(scores, 2)
            weights = weights / weights.sum(-1, keepdims=True)
            hidden = jax.nn.silu(jnp.einsum("bd,edf->bef", x, self.gate_proj[...]))
            hidden = hidden * jnp.einsum("bd,edf->bef", x, self.up_proj[...])
            y = jnp.einsum("bef,efd->bed", hidden, self.down_proj[...])
            return (jnp.take_along_axis(y, chosen[..., None], 1) * weights[..., None]).sum(1)

    MoELayer.__module__ = "tunix.models.qwen3.model"
    return MoELayer()


class Model(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([moe_layer()])

    def __call__(self, x):
        return self.blocks[0](x)


@pytest.mark.slow
def test_a_block_is_replaced_and_keeps_its_parameters():
    model, x = Model(), jax.random.normal(jax.random.key(1), (10, 16))
    expected, graph = nnx.jit(lambda model, x: model(x))(model, x), list(nnx.to_flat_state(nnx.state(model)).paths)
    router = model.blocks[0].router
    assert jax_moe_lb.balance(model, mesh=mesh_of(), system="greedy", record_stats=True) is model
    y = nnx.jit(lambda model, x: model(x))(model, x)
    assert float(jnp.abs(y - expected).max()) < 1e-5
    found = nnx.pop(model, nnx.Intermediate)["blocks"][0]
    stats, experts = found["moe_stats"].get_value(), found["moe_experts"].get_value()
    assert int(stats.counts.sum()) == 20
    counts = np.bincount(np.ravel(experts), minlength=stats.counts.shape[-1])
    np.testing.assert_array_equal(counts, stats.counts.sum((0, 1)))
    assert list(nnx.to_flat_state(nnx.state(model)).paths) == graph
    assert model.blocks[0].router is router


@pytest.mark.slow
def test_weights_are_as_wide_as_the_tokens(x64):
    mesh, rng = mesh_of(), np.random.default_rng(0)
    config = BlockConfig(mesh, Topology.from_mesh(mesh, "fsdp"), systems.plain(), record_stats=False)
    up, down = (jnp.asarray(rng.normal(size=shape)) for shape in ((4, 8, 6), (4, 6, 8)))
    x, weights = jnp.asarray(rng.normal(size=(8, 8))), jnp.asarray(rng.random((8, 1)))
    ids, experts = jnp.arange(8)[:, None] % 4, Experts(up, down)
    y = serve(SimpleNamespace(balance_config=config), x, ids, weights, experts)
    want = weights * jnp.stack([dense_ffn(x[i], jax.tree.map(lambda w, i=i: w[i % 4], experts)) for i in range(8)])
    np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-13)


@pytest.mark.thorough
@pytest.mark.parametrize("num_tokens", [3, 25])
def test_embedding_gradients_of_tokens_that_the_ranks_do_not_divide(num_tokens):
    mesh = make_mesh((4, 2), ("fsdp", "tp"))
    ids, embedding = jnp.arange(63, 63 - num_tokens, -1), jax.random.normal(jax.random.key(1), (64, 16))

    def loss(embedding, model):
        x = embedding[ids]
        return jnp.square(x + 1 + model(x)).mean()

    gradient = nnx.jit(nnx.grad(loss))
    expected = gradient(embedding, Model())
    found = gradient(embedding, jax_moe_lb.balance(Model(), mesh=mesh, system="plain"))
    assert float(jnp.abs(found - expected).max()) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": mesh_of(AxisType.Explicit)}, "expected AxisType.Auto for each. Pass axis_types="),
        ({"system": "eplb"}, "system.balancer is EPLB; expected a balancer without state"),
        ({"system": "two_tier"}, "system.relocates is True; expected None or False"),
        ({"system": "none"}, "system is 'none'; expected one of"),
    ],
)
def test_unsupported_options_are_refused(options, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        jax_moe_lb.balance(model, **{"mesh": mesh_of()} | options)
    assert not hasattr(model.blocks[0], "balance_config")


def test_blocks_that_cannot_be_replaced_are_named():
    model = Model()
    model.blocks[0].up_proj.set_value(jnp.zeros((8, 16, 24), jnp.int8))
    with pytest.raises(ValueError, match=r"model\.blocks\.0\.up_proj\.dtype is int8; expected a floating dtype"):
        jax_moe_lb.balance(model, mesh=mesh_of())
    with pytest.raises(ValueError, match=r"mesh has the axes \('data',\); expected \['fsdp'\], .* model\.blocks\.0"):
        jax_moe_lb.balance(Model(), mesh=make_mesh((4,), ("data",)))

    class SparseMoe(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.zeros((4, 2, 2)))

    with pytest.raises(ValueError, match=r"model\.0 is a .*SparseMoe; expected one of maxtext\.layers\.moe\.RoutedMoE"):
        jax_moe_lb.balance(nnx.List([SparseMoe()]), mesh=mesh_of())


def test_another_system_replaces_the_first():
    model = Model()
    topology = Topology.from_mesh(mesh_of(), "fsdp")
    jax_moe_lb.balance(model, mesh=mesh_of(), topology=topology)
    first = type(model.blocks[0])
    jax_moe_lb.balance(model, mesh=mesh_of(), topology=topology, system=systems.plain())
    assert type(model.blocks[0]) is first
    assert model.blocks[0].balance_config.system == systems.plain()
