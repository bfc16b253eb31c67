import jax
import jax.numpy as jnp
import pytest
from easydel import Qwen3MoeConfig
from easydel.modules.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseBlock
from flax import nnx

import jax_moe_lb
from tests.adoption.comparison import SYSTEMS, assert_equal, outcome, paths, randomize

X = jax.random.normal(jax.random.key(1), (8, 12, 32))


def config_of(axes=(1, 2, 4, 1, 1), **options):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 64,
    }
    config = Qwen3MoeConfig(**sizes | options)
    config.add_basic_configurations(
        sharding_axis_dims=axes, attn_mechanism="vanilla", moe_force_xla_gmm=True, use_scan_mlp=False
    )
    return config


def block_of(config):
    with config.mesh:
        return randomize(
            Qwen3MoeSparseBlock(
                config, dtype=jnp.float32, param_dtype=jnp.float32, precision="highest", rngs=nnx.Rngs(0)
            )
        )


def run(config, block, *arrays):
    with config.mesh:
        return outcome(block, lambda block, x: block(x), *arrays)


@pytest.mark.parametrize(
    ("options", "system"),
    [*(({"norm_topk_prob": True}, name) for name in SYSTEMS), ({"norm_topk_prob": False}, "greedy")],
)
def test_outputs_and_gradients_equal_easydel(options, system):
    # The exchange of EasyDeL's block is not available on CPUs: the unchanged block has all experts on each device.
    unchanged = config_of(axes=(8, 1, 1, 1, 1), **options)
    expected = run(unchanged, block_of(unchanged), X)
    config = config_of(**options)
    block = block_of(config)
    before = paths(block)
    jax_moe_lb.balance(block, mesh=config.mesh, system=system)
    assert paths(block) == before
    assert_equal(run(config, block, X), expected, f"easydel qwen3_moe {options} {system}")


def test_unsupported_features_are_refused_by_name():
    config = config_of()
    block = block_of(config)
    block.module_moe_method = "standard_moe"
    with pytest.raises(ValueError, match=r"model\.module_moe_method is standard_moe; expected fused_moe"):
        jax_moe_lb.balance(block, mesh=config.mesh)
    block = block_of(config)
    block.moe_hooks = block.moe_hooks.replace(scale_replicated_inputs=jnp.multiply)
    with pytest.raises(ValueError, match=r"model\.moe_hooks\.scale_replicated_inputs is .*; expected None"):
        jax_moe_lb.balance(block, mesh=config.mesh)
