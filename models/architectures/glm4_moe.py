"""GLM-4.5: sigmoid routing with a bias, a shared expert, dense first layers, partial rotary embedding."""

import jax

from jax_moe_lb import TopK
from jax_moe_lb.routing import GroupLimit
from models.architectures.config_json import Fields
from models.architectures.parameter_map import usual_pieces as pieces
from models.decoder.config import DecoderConfig

__all__ = ["config", "pieces", "sigmoid_router"]


def sigmoid_router(fields: Fields) -> TopK:
    """Return the router of GLM-4.5 and DeepSeek-V3."""
    num_groups = fields.integer("n_group", 1)
    limit = GroupLimit(num_groups, fields.integer("topk_group", 1)) if num_groups > 1 else None
    return TopK(
        fields.integer("num_experts_per_tok"),
        score=jax.nn.sigmoid,
        renormalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        group_limit=limit,
        selection_bias=True,
    )


def config(fields: Fields) -> DecoderConfig:
    """Return the `DecoderConfig` of a GLM-4.5 `config.json`."""
    fields.require("hidden_act", "silu")
    num_heads, head_dim = fields.integer("num_attention_heads"), fields.integer("head_dim", 128)
    share = fields.rope_settings().get("partial_rotary_factor", fields.number("partial_rotary_factor", 0.5))
    num_layers, mlp_dim = fields.num_layers(), fields.integer("moe_intermediate_size")
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=head_dim,
        mlp_dim=mlp_dim,
        num_experts=fields.num_experts("n_routed_experts"),
        router=sigmoid_router(fields),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        rope=fields.rope(int(head_dim * share), base=1e4),
        attention_scale=head_dim**-0.5,
        source=fields.text,
        dense_mlp_dim=fields.integer("intermediate_size"),
        dense_layers=tuple(range(min(num_layers, fields.integer("first_k_dense_replace", 1)))),
        shared_mlp_dim=mlp_dim * fields.integer("n_shared_experts", 1),
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("use_qk_norm", False),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )
