import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from tunix.models.gemma4.moe import MoERagged
from tunix.models.qwen3 import model as qwen3

import jax_moe_lb
from jax_moe_lb import Topology
from tests.adoption.comparison import SYSTEMS, assert_equal, outcome, paths, randomize

SIZES = {
    "num_layers": 2,
    "vocab_size": 64,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 2,
    "head_dim": 16,
    "num_kv_heads": 2,
    "rope_theta": 10_000,
    "norm_eps": 1e-6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def model_of(**options):
    return randomize(qwen3.Qwen3(qwen3.ModelConfig(**SIZES, **options), rngs=nnx.Rngs(0)))


def logits(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
    return model(tokens, positions, None, jnp.broadcast_to(mask, (tokens.shape[0], *mask.shape[1:])))[0]


def tokens_of(batch, length):
    return jax.random.randint(jax.random.key(1), (batch, length), 0, SIZES["vocab_size"])


CASES = [*(({"fsdp": 4, "tp": 2}, system) for system in SYSTEMS), ({"fsdp": 8, "tp": 1}, "greedy")]


@pytest.mark.parametrize(("axes", "system"), CASES, ids=str)
def test_outputs_and_gradients_equal_tunix(axes, system):
    mesh, tokens = mesh_of(**axes), tokens_of(8, 12)
    expected = outcome(model_of(), logits, tokens)
    model = model_of()
    before = paths(model)
    balanced = jax_moe_lb.balance(model, mesh=mesh, system=system)
    assert balanced is model
    assert paths(model) == before
    with mesh:
        assert_equal(outcome(model, logits, tokens), expected, f"tunix {axes} {system}")


@pytest.mark.parametrize(("batch", "length"), [(5, 5), (1, 3)])
def test_tokens_that_the_ranks_do_not_divide(batch, length):
    mesh, tokens = mesh_of(fsdp=4, tp=2), tokens_of(batch, length)
    expected = outcome(model_of(), logits, tokens)
    model = jax_moe_lb.balance(model_of(remat_config=qwen3.RematConfig.DECODER), mesh=mesh, system="greedy")
    assert_equal(outcome(model, logits, tokens), expected, f"tunix, {tokens.size} tokens on 8 devices, remat")


def test_statistics_show_the_balance():
    mesh, tokens = mesh_of(fsdp=4, tp=2), tokens_of(8, 12)
    model = jax_moe_lb.balance(model_of(), mesh=mesh, system="greedy", record_stats=True)
    nnx.jit(logits)(model, tokens)
    stats = nnx.pop(model, nnx.Intermediate)
    for layer in range(SIZES["num_layers"]):
        found = stats["layers"][layer]["mlp"]["moe_stats"].get_value()
        assert int(found.counts.sum()) == tokens.size * SIZES["num_experts_per_tok"]
        assert float(found.imbalance_after.max()) < float(found.imbalance_before.max())


def test_other_axes_and_another_system_later():
    mesh, tokens = mesh_of(data=2, expert=4), tokens_of(4, 4)
    expected = outcome(model_of(), logits, tokens)
    model = model_of()
    with pytest.raises(ValueError, match=r"expected \['fsdp'\], the expert axes of model\.layers\.0\.mlp"):
        jax_moe_lb.balance(model, mesh=mesh)
    jax_moe_lb.balance(model, mesh=mesh, topology=Topology.from_mesh(mesh), system="plain")
    jax_moe_lb.balance(model, mesh=mesh, topology=Topology.from_mesh(mesh), system="greedy")
    assert type(model.layers[0].mlp).__mro__[1] is qwen3.MoELayer
    assert_equal(outcome(model, logits, tokens), expected, "tunix, axis expert")


def test_quantized_weights_are_refused():
    model = model_of(param_dtype=jnp.float32)
    model.layers[1].mlp.up_proj.set_value(jnp.zeros((8, 32, 48), jnp.int8))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.dtype is int8; expected a floating dtype"):
        jax_moe_lb.balance(model, mesh=mesh_of(fsdp=4, tp=2))
    assert type(model.layers[0].mlp) is qwen3.MoELayer


def test_other_blocks_are_refused_by_name():
    class Config:
        embed_dim, expert_dim, num_experts, num_experts_per_tok, param_dtype = 32, 48, 8, 2, jnp.float32
        shd_config = qwen3.ShardingConfig.get_default_sharding()

    with pytest.raises(ValueError, match=r"model\.0 is a tunix\.models\.gemma4\.moe\.MoERagged; expected one of"):
        jax_moe_lb.balance(nnx.List([MoERagged(Config, rngs=nnx.Rngs(0))]), mesh=mesh_of(fsdp=8))


def test_dense_models_are_refused():
    dense = qwen3.Qwen3(qwen3.ModelConfig(**SIZES | {"num_experts": None}), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Qwen3 without MoE blocks"):
        jax_moe_lb.balance(dense, mesh=mesh_of(fsdp=8))
